"""The mix of several streams by weights and schedules."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from headrace._random.seeding import batch_seed
from headrace._ranks.distributed import RankChoice
from headrace._ranks.rankinfo import bound
from headrace._streams.epochs import Order, child_seeds, current_repetition, spawn_key
from headrace._streams.kinds import walk_datasets
from headrace._streams.resumable import (
    InContext,
    ResumableIterator,
    State,
    StreamOperation,
    close_all,
    start_stream,
)

_BLOCK = 1024  # random numbers drawn at once
Stop = Literal["first", "all", "once"]


class Mix(StreamOperation[object]):
    """Samples drawn from several streams by weight.

    `weights` is a schedule of ascending pairs: a number of draws, and the list of weights from this
    number on. A dataset in several streams has another order in each stream. Each rank draws
    separately, so a step of many ranks has samples of all streams.
    """

    operation = "mix"
    options = ("names", "weights", "stop")
    fields = ("order", "rank", "drawn", "over", "gave", "left_out", "passes")
    ranks_differ = True

    def __init__(
        self,
        datasets: Sequence[Any],
        names: Sequence[str],
        weights: list[Any],
        stop: Stop,
        order: Order,
        ranks: RankChoice,
    ) -> None:
        super().__init__(None)
        count = len(datasets)
        self._datasets = datasets
        self._names = list(names)
        self._weights = weights
        self._stop = stop
        self._order = order
        # 0 if the mix is divided after reading.
        self._rank = ranks.shard().in_worker().index
        self._drawn = 0  # random numbers used so far
        self._over = False
        # For each stream: the current pass has given a sample.
        self._gave = [False] * count
        self._left_out = [False] * count  # for each stream: no longer drawn from
        self._passes = [0] * count  # for each stream: completed passes
        self._key = spawn_key()
        self._occurrences = [*_occurrences(datasets)]
        self._inner = [self._start(number) for number in range(count)]
        # Number of the current block of random numbers, and the random numbers.
        self._block, self._numbers = -1, list[float]()
        # Ends of the streams' ranges among the random numbers, and the last non-empty range.
        self._ends, self._last = list[float](), 0
        self._weighed_until: float = 0  # `_drawn` at the next change of weights

    def _start(self, number: int) -> ResumableIterator[Any]:
        passes, dataset = self._passes[number], self._datasets[number]
        with child_seeds(self._key, passes * len(self._datasets) + number):
            if not (passes or self._occurrences[number]):
                return start_stream(dataset)
            repetition = batch_seed(
                self._order.repetition, self._occurrences[number], passes
            )
            return InContext(bound(current_repetition, repetition), dataset)

    def _draw(self) -> float:
        block, offset = divmod(self._drawn, _BLOCK)
        if block != self._block:
            generator = np.random.default_rng(
                batch_seed(self._order.key(), self._rank, block)
            )
            self._block, self._numbers = block, generator.random(_BLOCK).tolist()
        return self._numbers[offset]

    def _weigh(self) -> None:
        """Set the ranges of the streams by the current weights."""
        (_, weights), *later = self._weights[self._entry() :]
        self._weighed_until = later[0][0] if later else math.inf
        kept = [
            0.0 if out else weight
            for weight, out in zip(weights, self._left_out, strict=True)
        ]
        largest = max(kept) or 1.0  # sums of weight / largest neither overflow nor vanish
        self._ends = list(itertools.accumulate(weight / largest for weight in kept))
        self._last = bisect.bisect_left(self._ends, self._ends[-1])

    async def __anext__(self) -> object:
        while not (self._over or self._closed):
            if self._drawn >= self._weighed_until:
                self._weigh()
            if not self._ends[-1]:  # all streams with a weight have ended
                await self._end()
                break
            chosen = bisect.bisect_right(
                self._ends, self._draw() * self._ends[-1], hi=self._last
            )
            try:
                sample = await anext(self._inner[chosen])
            except StopAsyncIteration:
                await self._on_end(chosen)
            except Exception:  # the error of a sample; the next call draws again
                self._drawn += 1
                raise
            else:
                self._drawn += 1
                self._gave[chosen] = True
                return sample
        raise StopAsyncIteration

    async def _on_end(self, chosen: int) -> None:
        # A stream without a sample would be started again without end.
        again = self._gave[chosen] and self._stop != "once"
        if again:
            self._passes[chosen] += 1
        else:
            self._left_out[chosen] = True
        if self._stop == "first" or not any(
            map(self._is_awaited, range(len(self._names)))
        ):
            await self._end()
            return
        ended = self._inner[chosen]
        if again:
            self._inner[chosen] = self._start(chosen)
            self._gave[chosen] = False
        else:
            self._weighed_until = 0
        await close_all(ended)

    def _is_awaited(self, number: int) -> bool:
        """Return whether the mix still waits for the end of a stream.

        The stream has not ended yet, and has a weight now or later.
        """
        if self._left_out[number] or self._passes[number]:
            return False
        return any(weights[number] for _, weights in self._weights[self._entry() :])

    def _entry(self) -> int:
        """Return the position of the current entry of the schedule."""
        return (
            bisect.bisect_right(self._weights, self._drawn, key=operator.itemgetter(0))
            - 1
        )

    async def _end(self) -> None:
        self._over = True
        await self.aclose()

    def _inner_state(self) -> list[State]:
        return [stream.state_dict() for stream in self._inner]

    def _restore_inner(self, state: State) -> None:
        for stream, saved in zip(self._inner, state["inner"], strict=True):
            stream.load_state_dict(saved)

    async def aclose(self) -> None:
        self._closed = True
        await close_all(*self._inner)

    def _restored(self) -> None:
        for number, passes in enumerate(self._passes):
            if passes:
                self._inner[number] = self._start(number)


def _occurrences(datasets: Sequence[object]) -> Iterator[int]:
    """Yield for each dataset the number of earlier occurrences.

    For each part of the dataset, the earlier datasets with the same part are counted. The largest
    count is the number of occurrences.
    """
    seen = Counter[int]()
    for dataset in datasets:
        parts = {id(part) for part in walk_datasets(dataset)}
        yield max(map(seen.__getitem__, parts), default=0)
        seen.update(parts)
