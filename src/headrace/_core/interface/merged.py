"""The rest of an epoch that other ranks had begun: their streams are read on, divided among the ranks of now.

The samples that the ranks would have given out are numbered in turn, and number n goes to rank n mod world size, as for
a stream that is split by samples. A rank reads only the streams in which it has a share: with 2 ranks after 4, each
reads two of the four; with 8 after 4, two ranks share each, and both read all of it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast, get_args

from headrace._core.interface.distributed import Remainder, ShardOptions, current_lane
from headrace._core.interface.iterators import OperationIterator
from headrace._core.interface.shard_iterator import ShardIterator
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    close_iterator,
    expect_bool,
    expect_int,
    expect_list,
    expect_state,
    in_state_of,
    is_stateful,
    name_of,
    start_stream,
)
from headrace._core.interface.traversal import walk_datasets
from headrace._core.rankinfo import RankInfo, provided_rank
from headrace.errors import StateError

T = TypeVar("T")


def resume_stream(dataset: AsyncIterable[T], state: State) -> ResumableIterator[T]:
    """Start to read a stream from a state: its own, or one of several ranks.

    Raises:
        StateError: the state is of another stream, or damaged.
    """
    merged = isinstance(state, Mapping) and state.get("operation") == MergedIterator.operation
    iterator = cast(ResumableIterator[T], MergedIterator(dataset)) if merged else start_stream(dataset)
    iterator.load_state_dict(state)
    return iterator


def divided_state(states: Sequence[State], ranks: int, new: ShardOptions, remainder: Remainder) -> State:
    """The state from which one of the new readers (ranks, or lanes of ranks) continues.

    Args:
        states: of each old reader, in order: those of all ranks in their first lane, then in their second, ….
        ranks: the number of old ranks.
        new: the new reader's number, in the same order, and the number of new readers.
        remainder: policy for samples that cannot be divided equally among the new readers.
    """
    groups = math.gcd(len(states), new.count)
    group = new.index % groups
    return {
        "operation": MergedIterator.operation,
        "world_size": ranks,
        "lanes": len(states) // ranks,
        "share": [new.index // groups, new.count // groups],
        "remainder": "pad" if remainder == "repeat" else remainder,  # the first samples were given out before
        "turn": 0,
        "readers": [[old, False, states[old]] for old in range(group, len(states), groups)],
        "split": None,
    }


def remainder_of(dataset: object) -> Remainder:
    """The policy of a stream for ranks with unequal numbers of samples; ``"keep"`` if it has none."""
    for part in walk_datasets(dataset):
        remainder = getattr(part, "_remainder", None)
        if remainder in get_args(Remainder):
            return cast(Remainder, remainder)
    return "keep"


class MergedIterator(OperationIterator[object]):
    """One rank's share of the streams of other ranks, from a state made by `divided_state`."""

    operation = "merged ranks"

    def __init__(self, dataset: AsyncIterable[object]) -> None:
        self._dataset = dataset
        self._readers = _Readers(dataset)
        self._share = ShardOptions(0, 1)
        self._remainder: Remainder = "keep"
        self._stream: ResumableIterator[object] = self._readers

    async def __anext__(self) -> object:
        return await anext(self._stream)

    def _position(self) -> State:
        split = None if self._stream is self._readers else self._stream.state_dict()
        return {
            "share": [self._share.index, self._share.count],
            "remainder": self._remainder,
            **self._readers.state_dict(),
            "split": split,
        }

    def _restore(self, state: State) -> None:
        index, count = (expect_int({"share": number}, "share") for number in expect_list(state, "share", length=2))
        remainder = state.get("remainder")
        if remainder not in get_args(Remainder) or index >= count:
            raise StateError(f"the state is damaged: share {index} of {count} with remainder={remainder!r}")
        self._share, self._remainder = ShardOptions(index, count), cast(Remainder, remainder)
        split = state.get("split")
        if split is None:
            self._readers.load_state_dict(state)
        if count > 1:
            self._stream = ShardIterator(lambda: self._readers, self._share, self._remainder)
            if split is not None:
                self._stream.load_state_dict(expect_state(state, "split"))

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Readers(ResumableIterator[object]):
    """The streams of several ranks, one sample of each in turn."""

    def __init__(self, dataset: AsyncIterable[object]) -> None:
        self._dataset = dataset
        self._world_size = self._lanes = 1
        self._numbers: list[int] = []
        self._streams: list[ResumableIterator[object]] = []
        self._ended: list[bool] = []
        self._turn = 0

    async def __anext__(self) -> object:
        while not all(self._ended):
            turn = self._turn
            if not self._ended[turn]:
                try:
                    with self._as_reader(turn):  # a generator starts its inner streams here
                        sample = await anext(self._streams[turn])
                except StopAsyncIteration:
                    self._ended[turn] = True
                except Exception:  # of this sample; the next call reads that of the next rank
                    self._advance()
                    raise
                else:
                    self._advance()
                    return sample
            self._advance()
        raise StopAsyncIteration

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % len(self._streams)

    @contextlib.contextmanager
    def _as_reader(self, turn: int) -> Iterator[None]:
        """Start and read a stream as the old rank did, in the old lane."""
        lane, rank = divmod(self._numbers[turn], self._world_size)
        token = current_lane.set(ShardOptions(lane, self._lanes) if self._lanes > 1 else None)
        try:
            with provided_rank(RankInfo(rank, self._world_size, "a state of several ranks")):
                yield
        finally:
            current_lane.reset(token)

    def state_dict(self) -> State:
        readers = [
            [number, ended, stream.state_dict()]
            for number, ended, stream in zip(self._numbers, self._ended, self._streams, strict=True)
        ]
        return {"world_size": self._world_size, "lanes": self._lanes, "turn": self._turn, "readers": readers}

    def load_state_dict(self, state: State) -> None:
        self._world_size = expect_int(state, "world_size", least=1)
        self._lanes = expect_int(state, "lanes", least=1)
        for entry in expect_list(state, "readers"):
            dataset = _copied(self._dataset) if self._streams else self._dataset
            number, ended, inner = expect_list({"readers": entry}, "readers", length=3)
            self._numbers.append(expect_int({"reader": number}, "reader", most=self._world_size * self._lanes - 1))
            self._ended.append(expect_bool({"ended": ended}, "ended"))
            with self._as_reader(-1), in_state_of(f"reader {number}"):
                self._streams.append(resume_stream(dataset, expect_state({"inner": inner}, "inner")))
        self._turn = expect_int(state, "turn", most=max(len(self._streams) - 1, 0))

    async def aclose(self) -> None:
        for stream in self._streams:
            await close_iterator(stream)


def _copied(dataset: AsyncIterable[T]) -> AsyncIterable[T]:
    """The dataset for one more reader: a copy, if users' datasets in it have a state, which is of one reader alone."""
    stateful = next(filter(is_stateful, walk_datasets(dataset)), None)
    if stateful is None:
        return dataset
    try:
        return copy.deepcopy(dataset)
    except Exception as error:  # user code
        raise StateError(
            f"{name_of(stateful)} has a state_dict, so that the streams of several ranks are read from copies of it; "
            f"but it cannot be copied: {error!r}. Give state_dict and load_state_dict to its iterator instead."
        ) from error
