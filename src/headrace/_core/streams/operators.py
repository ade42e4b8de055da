"""The operations on streams: take, equal length, concat, repeat, mix; split, shuffle and pipe, which hold samples.

Also the streams of other ranks, read on from their states.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import logging
import math
import operator
from collections import Counter, deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import numpy as np

from headrace._core.ranks.distributed import Remainder, ShardOptions, current_lane
from headrace._core.ranks.rankinfo import OF_STATE, RankInfo, bound, provided_rank
from headrace._core.seeding import batch_seed
from headrace._core.streams.epochs import Order, child_seeds, current_repetition, spawn_key
from headrace._core.streams.kinds import walk_datasets
from headrace._core.streams.resumable import (
    MAX_ERRORS_IN_A_ROW,
    NOTHING,
    InContext,
    Mark,
    ReplayOperation,
    ResumableIterator,
    State,
    StreamOperation,
    check_operation,
    close_all,
    expect,
    expect_same,
    is_stateful,
    load_copy,
    read_again,
    start_stream,
)
from headrace._core.text import function_name, shorten
from headrace.errors import ShortStreamError, StateError

T = TypeVar("T")
_BLOCK = 1024  # random numbers of a mix
Stop = Literal["first", "all", "once"]
_log = logging.getLogger("headrace")


class Take(StreamOperation[T]):
    operation = "take"
    options = ("count",)
    fields = ("left",)
    same_numbers = True

    def __init__(self, source: AsyncIterable[T], count: int) -> None:
        super().__init__(source)
        self._count = self._left = count

    async def __anext__(self) -> T:
        if self._left <= 0:
            await self.aclose()  # stops its read-ahead
            raise StopAsyncIteration
        sample: T = await anext(self._inner)
        self._left -= 1
        return sample


class EqualLength(StreamOperation[T]):
    """A given number of samples: truncated, or extended by the policy `remainder`.

    ``"pad"`` repeats the last sample, which is read again after a restore at the end; ``"repeat"`` starts again. They
    raise `ShortStreamError` if there is no sample, other policies if the iterator ends early.
    """

    operation = "equal length"
    options = ("length",)
    fields = ("left", "gave", "restarts")
    same_numbers = True

    def __init__(self, start: Callable[[], ResumableIterator[T]], length: int, remainder: Remainder) -> None:
        super().__init__(start())
        self._start = start
        self._length = self._left = length
        self._remainder = remainder
        self._gave = False  # whether the current inner iterator has given a sample
        self._restarts = 0
        self._last: T = NOTHING

    async def __anext__(self) -> T:
        if self._closed or self._left <= 0:
            await self.aclose()  # stops its read-ahead
            raise StopAsyncIteration
        try:
            sample: T = await anext(self._inner)
        except StopAsyncIteration:
            if not self._gave or self._remainder not in ("pad", "repeat"):
                given, self._left = self._length - self._left, 0
                remedy = "Correct the number, or set remainder='pad' or remainder='repeat'."
                if self._remainder in ("pad", "repeat"):
                    remedy = "It has no sample to repeat: use fewer ranks, write more shards, or set split='samples'."
                raise ShortStreamError(given=given, declared=self._length, remedy=remedy) from None
            if self._remainder == "repeat":
                await close_all(self._inner)
                self._gave = False  # without a sample it would be restarted for ever
                self._restarts += 1
                self._inner = self._start()
                self.same_numbers = False
                return await anext(self)
            if self._last is NOTHING:
                self._last = (await read_again(self._start(), None))[0]
            sample = self._last
        else:
            self._gave = True
            if self._remainder == "pad":
                self._last = sample
        self._left -= 1
        return sample


class Concat(StreamOperation[Any]):
    """Streams one after the other; `numbered` samples are pairs of the stream's number and its sample."""

    operation = "concat"
    options: ClassVar[tuple[str, ...]] = ("parts",)
    fields = ("begun", "gave")

    def __init__(self, datasets: Sequence[Any], *, numbered: bool = False) -> None:
        super().__init__(None)
        self._datasets = datasets
        self._parts = len(datasets)
        self._numbered = numbered
        self._begun = 0  # streams
        self._gave = True  # whether the current one has given a sample
        self._key = spawn_key()

    async def __anext__(self) -> Any:
        while not self._closed:
            if self._inner is None:
                if self._is_over():
                    break
                self._gave = False
                self._begun += 1
                self._inner = self._open()
            try:
                sample = await anext(self._inner)
            except StopAsyncIteration:
                inner, self._inner = self._inner, None
                await close_all(inner)
            else:
                self._gave = True
                return (self._begun - 1, sample) if self._numbered else sample
        raise StopAsyncIteration

    def _is_over(self) -> bool:
        return self._begun >= self._parts

    def _open(self, *_: object) -> ResumableIterator[object]:
        """Start the stream with the number `_begun`, from 1."""
        with child_seeds(self._key, self._begun - 1):
            return start_stream(self._datasets[self._begun - 1])


class Repeat(Concat):
    """A stream several times; with ``times=None`` until a repetition without a sample."""

    operation = "repeat"
    options = ("times",)
    same_by_lanes = True

    def __init__(self, dataset: Any, times: int | None) -> None:
        super().__init__([dataset])
        self._times = times
        self._repetition = current_repetition.get()  # of this iterator itself, if it is repeated

    def _is_over(self) -> bool:
        return not self._gave if self._times is None else self._begun == self._times

    def _open(self, *_: object) -> ResumableIterator[object]:
        start = functools.partial(start_stream, self._datasets[0])
        with child_seeds(self._key, self._begun):
            if self._begun == 1:
                return start()
            return InContext(bound(current_repetition, batch_seed(self._repetition, 0, self._begun)), start)


class Mix(StreamOperation[object]):
    """Samples drawn from several streams by weight.

    The weights are ascending pairs of the number of draws from which they hold, and a list; or a function of that
    number, called for each block of random numbers. A dataset that occurs in several streams has another order in each.
    """

    operation = "mix"
    options = ("names", "weights", "stop")
    fields = ("order", "drawn", "over", "gave", "left_out", "passes", "counts")

    def __init__(
        self,
        datasets: Sequence[Any],
        names: Sequence[str],
        weights: list[Any] | Callable[[int], Sequence[float]],
        stop: Stop,
        strict: bool,
        order: Order,
    ) -> None:
        super().__init__(None)
        count = len(datasets)
        self._datasets = datasets
        self._names = list(names)
        self._schedule = weights
        self._weights = function_name(weights) if callable(weights) else weights
        self._stop = stop
        self._strict = strict
        self._order = order
        self._drawn = 0  # numbers
        self._over = False
        self._gave = [False] * count  # whether the current pass of each has given a sample
        self._left_out = [False] * count  # streams from which nothing is drawn any more
        self._passes = [0] * count  # completed passes of each
        self._counts = [0] * count  # samples of each
        self._key = spawn_key()
        self._occurrences = [*_occurrences(datasets)]
        self._inner = [self._start(number) for number in range(count)]
        self._states: list[State | None] = [None] * count
        self._touched = {*range(count)}  # streams whose states are out of date
        self._block, self._numbers = -1, list[float]()  # random numbers, and the number of their block
        self._ends, self._last = list[float](), 0  # of the streams' ranges among the numbers; the last range
        self._weighed_until: float = 0  # draws

    def _start(self, number: int) -> ResumableIterator[Any]:
        passes, start = self._passes[number], functools.partial(start_stream, self._datasets[number])
        with child_seeds(self._key, passes * len(self._datasets) + number):
            if not (passes or self._occurrences[number]):
                return start()
            repetition = batch_seed(self._order.repetition, self._occurrences[number], passes)
            return InContext(bound(current_repetition, repetition), start)

    def _draw(self) -> float:
        """The random number at the position `_drawn`, from a block of them."""
        block, offset = divmod(self._drawn, _BLOCK)
        if block != self._block:
            generator = np.random.default_rng(batch_seed(self._order.key(), 0, block))
            self._block, self._numbers = block, generator.random(_BLOCK).tolist()
        return self._numbers[offset]

    def _weigh(self) -> None:
        """Set the ranges of the streams as of now."""
        if callable(self._schedule):
            block = self._drawn // _BLOCK
            weights = self._schedule(block * _BLOCK)
            self._weighed_until = (block + 1) * _BLOCK
        else:
            at = bisect.bisect_right(self._schedule, self._drawn, key=operator.itemgetter(0))
            weights = self._schedule[at - 1][1]
            self._weighed_until = self._schedule[at][0] if at < len(self._schedule) else math.inf
        kept = [0.0 if out else weight for weight, out in zip(weights, self._left_out, strict=True)]
        self._ends = list(itertools.accumulate(kept))
        self._last = bisect.bisect_left(self._ends, self._ends[-1])

    async def __anext__(self) -> object:
        while not (self._over or self._closed):
            if self._drawn >= self._weighed_until:
                self._weigh()
            if not self._ends[-1]:  # all that have a weight have ended
                await self._end()
                break
            chosen = bisect.bisect_right(self._ends, self._draw() * self._ends[-1], hi=self._last)
            self._touched.add(chosen)
            try:
                sample = await anext(self._inner[chosen])
            except StopAsyncIteration:
                await self._on_end(chosen)
            except Exception:  # of this sample; the next call draws anew
                self._drawn += 1
                raise
            else:
                self._drawn += 1
                self._gave[chosen] = True
                self._counts[chosen] += 1
                return sample
        raise StopAsyncIteration

    async def _on_end(self, chosen: int) -> None:
        again = self._gave[chosen] and self._stop != "once"  # one without a sample would be started again for ever
        ended_before = self._passes[chosen] > 0
        if again:
            self._passes[chosen] += 1
        else:
            self._left_out[chosen] = True
        all_ended = not ended_before and all(map(operator.or_, self._left_out, map(bool, self._passes)))
        if self._stop == "first" or all_ended:
            await self._end()
            return
        ended = self._inner[chosen]
        if again:
            self._inner[chosen] = self._start(chosen)
            self._gave[chosen] = False
        else:
            self._weighed_until = 0
        await close_all(ended)

    async def _end(self) -> None:
        self._over = True
        await self.aclose()

    def _inner_states(self) -> list[State | None]:
        for number in self._touched:
            self._states[number] = self._inner[number].state_dict()
        self._touched.clear()
        return self._states.copy()

    def load_state_dict(self, state: State) -> None:
        check_operation(state, self.operation)
        before, now = expect(state, "names", list), self._names
        changes = [f"{name!r} is new" for name in now if name not in before]
        changes += [f"{name!r} is gone" for name in before if name not in now]
        if not changes and before != now:
            changes.append("the order of the streams is another one")
        if (weights := state.get("weights")) != self._weights:
            changes.append(f"the weights were {shorten(repr(weights))}, and are {shorten(repr(self._weights))}")
        if changes:
            text = f"the streams of a mix have changed since the state was saved: {shorten('; '.join(changes), 500)}"
            if self._strict:
                raise StateError(f"{text}. To continue with those of now, set strict=False of hr.mix()")
            _log.warning("%s", text)
            state = {**state, "names": now, "weights": self._weights}
            for field, new in _OF_NEW.items():
                values = expect(state, field, list, length=len(before))
                state[field] = [values[before.index(name)] if name in before else new for name in now]
        super().load_state_dict(state)
        self._touched = {*range(len(now))}

    def _restored(self) -> None:
        self._weighed_until = 0
        for number, passes in enumerate(self._passes):
            if passes:
                self._inner[number] = self._start(number)


_OF_NEW: State = {"gave": False, "left_out": False, "passes": 0, "counts": 0, "inner": None}


def _occurrences(datasets: Sequence[object]) -> Iterator[int]:
    """For each dataset, how many times one of its parts occurs in those before it."""
    seen = Counter[int]()
    for dataset in datasets:
        parts = {id(part) for part in walk_datasets(dataset)}
        yield max(map(seen.__getitem__, parts), default=0)
        seen.update(parts)


def drawn_of_mixes(state: object) -> Counter[str]:
    """The samples of each stream of the mixes in a state, or in several in dicts and lists."""
    found = Counter[str]()
    if isinstance(state, Mapping) and state.get("operation") == Mix.operation:
        found.update(dict(zip(expect(state, "names", list), expect(state, "counts", list), strict=True)))
    for part in state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ():
        found += drawn_of_mixes(part)
    return found


class Split(ReplayOperation[T]):
    """Every n-th sample of a stream that is the same in all shards; every shard gets the same number.

    A group is one sample for each shard. Samples are returned when their group is complete, so that no shard is ahead
    of another by more than the time to read a group. Its states between groups are the same for all shards, and can be
    restored with another number of shards. ``"pad"`` completes the last group with its last sample, ``"repeat"`` with
    the first samples of all, for which the stream is started again if it was restored.
    """

    operation = "split"
    fields = ("world_size", "ended")

    def __init__(self, start: Callable[[], ResumableIterator[T]], shard: ShardOptions, remainder: Remainder) -> None:
        self._key = spawn_key()
        self._start = start
        super().__init__(self._started())
        self._index, self._count = shard.index, shard.count
        self._world_size = shard.count  # of the state, while one is restored
        self._remainder = remainder
        # The first group, for "repeat"; None until it is read, empty if it was before the state was saved.
        self._first: list[T] | None = None if remainder == "repeat" else []
        self._group: list[T] = []
        self._origins.append((0, lambda number: self._inner.origin(number * shard.count + shard.index)))

    def _started(self) -> ResumableIterator[T]:
        with child_seeds(self._key, 0):
            return self._start()

    def _put(self, sample: T) -> Any:
        group = self._group
        group.append(sample)
        if len(group) < self._world_size:
            return NOTHING
        if self._first is None:
            self._first = group
        self._group = []
        return group[self._index]

    async def _rest(self) -> T:
        last, index = self._group, self._index
        if last and index >= len(last) and self._remainder == "repeat":
            first = last if self._first is None else self._first
            first = first or await read_again(self._started(), self._world_size) or last
            last = [*last, *(first[number % len(first)] for number in range(index + 1 - len(last)))]
        self._group = []
        if not last or self._remainder == "drop" or (self._remainder == "keep" and index >= len(last)):
            raise StopAsyncIteration
        return last[min(index, len(last) - 1)]

    def _is_exact(self) -> bool:
        return not self._group

    def _restored(self) -> None:
        if self._reread.left:
            expect_same({"world_size": self._world_size}, "world_size", self._count)
        self._world_size = self._count
        self._first = []


class ShuffleBuffer(ReplayOperation[T]):
    """Another order: each window of `buffer_size` samples is permuted.

    In TensorFlow's `Dataset.shuffle`, each sample that enters the buffer replaces one drawn at
    random, so that the samples in the buffer can be from anywhere in the stream: its state would be the samples
    themselves. Here it is the position before the window, from which the window is read again, and the number of
    samples given of it.
    """

    operation = "shuffle"
    options = ("size",)
    same_by_lanes = True
    fields = ("order", "window")

    def __init__(self, source: AsyncIterable[T], buffer_size: int, order: Order) -> None:
        super().__init__(source)
        self._size = buffer_size
        self._order = order
        self._window = 0  # number of the window that is read
        self._ahead: list[T] = []  # its samples
        self._errors_before = 0  # errors given before them
        self._ahead_position: State | None = None  # before it; None before the first: that of the mark
        self._read_before = 0  # samples and errors that were read before them
        self._samples: list[T] = []  # left of the window that is given, the next one last

    def _put(self, sample: T) -> Any:
        self._ahead.append(sample)
        if not self._samples:
            if len(self._ahead) < self._size:
                return NOTHING
            self._begin_window()
        return self._samples.pop()

    async def _rest(self) -> T:
        if not self._samples:
            if not self._ahead:
                raise StopAsyncIteration
            self._begin_window()
        return self._samples.pop()

    def _begin_window(self) -> None:
        self._mark = self._latest_mark()
        ahead, first = self._ahead, self._read_before
        order = functools.partial(_order, batch_seed(self._order.key(), 0, self._window), len(ahead))
        without_errors = self._read - first == len(ahead)
        origin = (lambda place: self._inner.origin(first + order()[place])) if without_errors else None
        self._origins.append((self._given, origin))
        self._read_before = self._read
        self._window += 1
        self._samples = [ahead[place] for place in reversed(order())]
        self._ahead, self._errors_before = [], self._errors
        self._ahead_position = self._exact_state()

    def _latest_mark(self) -> Mark:
        """The position before the current window; where that ends, that before the next, with the errors in it."""
        mark = self._mark or self._new_mark()
        if self._samples:
            return mark
        errors = self._errors - self._errors_before
        return Mark(self._given - errors, self._errors - errors, self._ahead_position or mark.position)


def _order(seed: int, size: int) -> list[int]:
    """The order of a window's samples."""
    order: list[int] = np.random.default_rng(seed).permutation(size).tolist()
    return order


class Pipe(ReplayOperation[T]):
    """The samples that an async generator function yields for those of a stream.

    After a restore the stream is read again from its start, or from the last error of the function.
    """

    operation = "pipe"
    fields = ("over", "exhausted", "taken")

    def __init__(
        self, source: AsyncIterable[object], function: Callable[[AsyncIterator[Any]], AsyncIterator[T]]
    ) -> None:
        super().__init__(source)
        self._ended = True  # the function reads the stream
        self._function = function
        self._output: AsyncIterator[T] | None = None
        self._pending: Any = NOTHING  # a sample to return after the errors that came before it
        self._source_errors: deque[Exception] = deque()  # not yet reported
        self._over = False  # the function has ended
        self._exhausted = False  # the stream has ended
        self._taken = 0  # samples that the function has read since its last error

    async def _rest(self) -> T:
        if self._pending is NOTHING and not (self._over or self._source_errors):
            try:
                if self._output is None:
                    self._output = aiter(self._function(_Source(self)))
                self._pending = await anext(self._output)
            except StopAsyncIteration:
                self._over = True
            except Exception as error:
                self._source_errors.append(error)
                output, self._output = self._output, None
                await close_all(output)
                # A function that fails without reading would fail for ever.
                self._over = self._exhausted or not self._taken
                self._taken = 0
        if self._source_errors:
            raise self._source_errors.popleft()
        if self._pending is NOTHING:
            await self.aclose()
            raise StopAsyncIteration
        sample: T = self._pending
        self._pending = NOTHING
        return sample

    def _is_exact(self) -> bool:
        if self._pending is not NOTHING or self._source_errors:
            return False
        return self._over or self._output is None or is_stateful(self._output)

    def _exact_state(self) -> State:
        state = super()._exact_state()
        state["function"] = copy.deepcopy(self._output.state_dict()) if is_stateful(self._output) else None
        return state

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "read_again": function_name(self._function)} if state["given"] else state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if state.get("function") is not None:
            self._output = aiter(self._function(_Source(self)))
            load_copy(self._output, expect(state, "function", dict), function_name(self._function))

    async def aclose(self) -> None:
        self._closed = True
        await close_all(self._inner, self._output)


class _Source(AsyncIterator[object]):
    """The stream that a function reads; errors are collected instead of raised."""

    def __init__(self, pipe: Pipe[Any]) -> None:
        self._pipe = pipe

    async def __anext__(self) -> object:
        pipe = self._pipe
        for _ in range(MAX_ERRORS_IN_A_ROW):
            try:
                sample = await anext(pipe._inner)
            except StopAsyncIteration:
                pipe._exhausted = True
                raise
            except Exception as error:
                pipe._source_errors.append(error)
            else:
                pipe._taken += 1
                return sample
        return await anext(pipe._inner)


# The rest of an epoch that other ranks had begun: the samples that they would have given out are numbered in turn, and
# number n goes to rank n mod world size, as for a stream that is split by samples. A rank reads only the streams in
# which it has a share: with 2 ranks after 4, each reads two; with 8 after 4, two share each.


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
        "lanes": len(states) // ranks,
        "turn": 0,
        "numbers": numbers,
        "ended": ["ended" in states[number] for number in numbers],
        "inner": [states[number]["stream"] for number in numbers],
    }
    inner: State = {"operation": Split.operation, "world_size": share[1], "ended": False, "inner": readers}
    policy = "pad" if remainder == "repeat" else remainder  # the first samples were given out before
    inner |= {"given": 0, "errors": 0}
    return {"operation": Merged.operation, "share": share, "remainder": policy, "inner": inner}


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
    fields = ("world_size", "lanes", "turn", "numbers", "ended")

    def __init__(self, dataset: AsyncIterable[object]) -> None:
        super().__init__(None)
        self._dataset = dataset
        self._world_size = self._lanes = 1
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
        # As the old rank did, in the old lane.
        lane, rank = divmod(self._numbers[number], self._world_size)
        part = ShardOptions(lane, self._lanes) if self._lanes > 1 else None
        info = RankInfo(rank, self._world_size, OF_STATE)
        start = functools.partial(_start_for, dataset, state)
        return InContext(provided_rank(info), lambda: InContext(bound(current_lane, part), start))
