"""The rest of an epoch that other ranks had begun, read on from their states.

The samples that they would have given out are numbered in turn, and number n goes to rank n mod world size, as for a
stream that is split by samples. A rank reads only the streams in which it has a share: with 2 ranks after 4, each reads
two; with 8 after 4, two share each.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

from headrace._core.ranks.distributed import Remainder, ShardOptions
from headrace._core.ranks.rankinfo import OF_STATE, RankInfo, provided_rank
from headrace._core.streams.kinds import walk_datasets
from headrace._core.streams.operators import Split
from headrace._core.streams.resumable import (
    InContext,
    ResumableIterator,
    State,
    StreamOperation,
    expect,
    is_stateful,
    start_stream,
)

T = TypeVar("T")


def resume_stream(dataset: AsyncIterable[T], state: State) -> ResumableIterator[T]:
    """Start to read a stream from a state: its own, or one of several ranks."""
    iterator = _start_for(dataset, state)
    iterator.load_state_dict(state)
    return iterator


def _start_for(dataset: AsyncIterable[T], state: State) -> ResumableIterator[T]:
    if not isinstance(state, Mapping) or state.get("operation") != Merged.operation:
        return start_stream(dataset)
    share = ShardOptions(*expect(state, "share", list, length=2))
    return cast(ResumableIterator[T], Merged(dataset, share, cast(Remainder, state.get("remainder"))))


def divided_state(states: Sequence[Mapping[str, object]], new: ShardOptions) -> State:
    """The state from which one of the new readers (ranks, or lanes of ranks) continues.

    The states are of each old reader, in order: those of all ranks in their first lane, then in their second, …; new
    readers are numbered in the same order. Each has the number of old ranks, and the policy `remainder`.
    """
    ranks, remainder = max(1, expect(states[0], "ranks", int)), expect(states[0], "remainder", str)
    groups = math.gcd(len(states), new.count)
    group = new.index % groups
    share = [new.index // groups, new.count // groups]
    numbers = list(range(group, len(states), groups))
    readers: State = {
        "operation": _Readers.operation,
        "world_size": ranks,
        "turn": 0,
        "numbers": numbers,
        "ended": ["ended" in states[number] for number in numbers],
        "inner": [states[number]["stream"] for number in numbers],
    }
    inner: State = {"operation": Split.operation, "world_size": share[1], "ended": False, "inner": readers}
    inner |= {"given": 0, "errors": 0}
    return {"operation": Merged.operation, "share": share, "remainder": remainder, "inner": inner}


def remainder_of(dataset: object) -> Remainder:
    """The policy of a stream for ranks with unequal numbers of samples; ``"keep"`` if it has none."""
    for part in walk_datasets(dataset):
        remainder = getattr(part, "_remainder", None)
        if remainder in get_args(Remainder):
            return cast(Remainder, remainder)
    return "keep"


class Merged(StreamOperation[object]):
    """One rank's share of the streams of other ranks, from a state made by `divided_state`."""

    operation = "merged ranks"
    options = ("share", "remainder")

    def __init__(self, dataset: AsyncIterable[object], share: ShardOptions, remainder: Remainder) -> None:
        self._share = [share.index, share.count]
        self._remainder = remainder
        super().__init__(Split(lambda: _Readers(dataset), share, remainder))


class _Readers(StreamOperation[object]):
    """The streams of several ranks, one sample of each in turn."""

    operation = "ranks"
    fields = ("world_size", "turn", "numbers", "ended")

    def __init__(self, dataset: AsyncIterable[object]) -> None:
        super().__init__(None)
        self._dataset = dataset
        self._world_size = 1
        self._turn = 0
        self._numbers: list[int] = []
        self._ended: list[bool] = []
        self._inner = []

    async def __anext__(self) -> object:
        while not all(self._ended):
            turn, following = self._turn, (self._turn + 1) % len(self._inner)
            if not self._ended[turn]:
                try:
                    sample = await anext(self._inner[turn])
                except StopAsyncIteration:
                    self._ended[turn] = True
                except Exception:  # of this sample; the next call reads that of the next rank
                    self._turn = following
                    raise
                else:
                    self._turn = following
                    return sample
            self._turn = following
        raise StopAsyncIteration

    def _open(self, number: int, state: State) -> ResumableIterator[Any]:
        dataset = self._dataset
        if self._inner and any(map(is_stateful, walk_datasets(dataset))):
            dataset = copy.deepcopy(dataset)  # users' datasets in it have a state, which is of one reader alone
        info = RankInfo(self._numbers[number], self._world_size, OF_STATE)  # as the old rank did
        return InContext(provided_rank(info), functools.partial(_start_for, dataset, state))
