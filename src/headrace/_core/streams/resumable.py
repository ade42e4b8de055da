"""The position of a stream's iterator as a state that can be saved, and iterators that continue from one."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

from headrace._core.ranks.rankinfo import bound
from headrace._core.streams.epochs import Order, keys_within, spawn_key, stream_seeds
from headrace._core.streams.kinds import T_co, has_method, signature_of
from headrace._core.text import dataset_repr, error_message, warn_user
from headrace.errors import StateError

T = TypeVar("T")
NOTHING: Any = type("NOTHING", (), {})  # the same one in other processes
ORIGINS = 1024
_MOST_MARKS = 64

State = dict[str, Any]
"""JSON values, where no user's object adds others."""


@runtime_checkable
class Stateful(Protocol):
    """A user's dataset, iterator or sampler with a state of its own, as for torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state_dict: State) -> None: ...


def is_stateful(part: object) -> TypeGuard[Stateful]:
    """As `isinstance` with `Stateful`, which takes 2 µs; False for a `state_dict` with arguments, as litdata's."""
    named = has_method(part, "state_dict") and has_method(part, "load_state_dict")
    return named and _has_state_without_arguments(type(part))  # type: ignore[arg-type]  # mypy takes its __hash__


@functools.lru_cache(maxsize=256)
def _has_state_without_arguments(kind: type) -> bool:
    with contextlib.suppress(AttributeError, ValueError):  # an attribute of the instance, a builtin
        try:
            signature_of(kind.state_dict).bind(None)  # type: ignore[attr-defined]
        except TypeError:
            return False
    return True


class ResumableIterator(AsyncIterator[T_co]):
    """An async iterator whose position can be saved: after the last sample, or error, that `anext` gave.

    Samples read ahead are read again. It can be saved after the end, after `aclose`, and after a
    cancelled `anext` too.
    """

    @abstractmethod
    def state_dict(self) -> State:
        """The position; its size grows with the shards that are open, not with those read."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Continue after the position of `state`; called at most once, before the first `anext`."""

    def origin(self, number: int) -> Any:
        """The file and the line, or the like, of an outcome, by its number since the start; called after an error."""
        return None

    async def aclose(self) -> None:
        """Stop reading."""


def start_stream(dataset: AsyncIterable[T]) -> ResumableIterator[T]:
    """Start to read a stream, in place of `aiter`: the iterator's position can be saved and restored.

    An iterator of the user's is wrapped. Its state, and its dataset's, are asked for where they are
    `Stateful`; without one, samples are counted, and a restored stream is read again from its
    start.
    """
    if isinstance(dataset, ResumableIterator):
        return dataset
    key = spawn_key()
    with keys_within(key) as seeds:
        iterator = aiter(dataset)
    return (
        iterator
        if isinstance(iterator, ResumableIterator)
        else _UserIterator(dataset, iterator, key, seeds)
    )


def passes_of(stream: Any) -> int:
    """Completed passes of a stream that repeats without end, or of each in a list; else 0."""
    if type(stream) is list:
        return min(map(passes_of, stream), default=0)
    inner = getattr(stream, "_inner", None)
    return getattr(stream, "endless_passes", 0) or (0 if inner is None else passes_of(inner))


async def close_all(*iterators: object) -> None:
    """Close each, the last one first, even if the close of one fails or is cancelled."""
    async with contextlib.AsyncExitStack() as stack:
        for iterator in iterators:
            if (close := getattr(iterator, "aclose", None)) is not None:
                stack.push_async_callback(close)


def user_state(dataset: object, iterator: object, read: int) -> State:
    """The state of a user's dataset and of its iterator, sync or async, after `read` samples."""
    state: State = {"read": read}
    for name, part in (("dataset", dataset), ("iterator", iterator)):
        # A dataset that is its own iterator may have a state only from `iter()` on.
        if is_stateful(part) and (name == "iterator" or part is not iterator):
            state[name] = copy.deepcopy(part.state_dict())
    if len(state) == 1 and read:
        state["read_again"] = name_of(dataset)
    return state


def restore_user(dataset: object, state: State, start: Callable[[], T]) -> tuple[T, int]:
    """An iterator made by `start` from such a state, and the number of samples to read again and drop."""
    check_operation(state, None, name_of(dataset))
    restore_dataset(dataset, state)
    if (
        "iterator" in state and "dataset" not in state and is_stateful(dataset)
    ):  # the dataset was its own iterator
        with contextlib.suppress(
            Exception
        ):  # `__iter__` may need the state, and the state may need `__iter__`
            load_copy(dataset, state["iterator"], name_of(dataset))
    iterator = start()
    if "iterator" in state and not (
        iterator is dataset and _has_state(iterator, state["iterator"])
    ):
        load_copy(iterator, state["iterator"], name_of(dataset))
    return iterator, 0 if "iterator" in state or "dataset" in state else state["read"]


def _has_state(part: object, state: object) -> bool:
    try:
        return is_stateful(part) and pickle.dumps(copy.deepcopy(part.state_dict())) == pickle.dumps(
            state
        )
    except Exception:  # of a class that pickle does not know
        return False


def restore_dataset(dataset: object, state: State) -> None:
    """Restore a user's dataset alone, if the state has one of it."""
    if "dataset" in state:
        load_copy(dataset, state["dataset"], name_of(dataset))


def load_copy(part: object, state: Any, whose: str) -> None:
    if not is_stateful(part):
        raise StateError(f"the state has one of {whose}, which has no load_state_dict now")
    part.load_state_dict(copy.deepcopy(state))


def state_of_dataset(state: Mapping[str, Any]) -> State | None:
    """The state for the epoch after that of `state`, if the dataset has one that outlives its iterator."""
    stream = state.get("stream", state)
    if "dataset" not in stream:
        return None
    begun: State = {"read": 0, "errors": 0, "dataset": stream["dataset"]}
    return {"position": 0, "stream": begun} if "stream" in state else begun


def name_of(dataset: object) -> str:
    """The class of a user's dataset; the expression that made one of ours."""
    ours = type(dataset).__module__.startswith("headrace.")
    return dataset_repr(dataset) if ours else type(dataset).__name__


class Reread:
    """The samples and errors that are read again after a restore, and dropped.

    There are `count` of them, `errors` of which were errors; others would be new ones. The reader
    counts samples down.
    """

    def __init__(self, count: int = 0, errors: int = 0) -> None:
        self.left = self.count = count
        self._errors = errors
        self._failed: StateError | None = None

    def error(self, error: Exception, stream: str) -> None:
        """Count an error; raises `StateError` if there was a sample in its place, or if it is the end of the stream."""
        if isinstance(error, StateError):
            raise error
        if isinstance(error, StopIteration | StopAsyncIteration):
            self._failed = StateError(
                f"{stream} ended after {self.count - self.left} samples, but {self.count} had been read when the "
                f"state was saved: it is not the same stream, or not in the same order"
            )
        elif not self._errors:
            self._failed = StateError(
                f"a sample that was read before the state was saved cannot be read again, so the samples after it are "
                f"unknown: {type(error).__name__}: {error_message(error)}. Restore the state once more"
            )
        self.check()
        self._errors -= 1
        self.left -= 1

    def check(self) -> None:
        """Raise the `StateError` that was raised before: the samples that follow are unknown."""
        if self._failed is not None:
            raise self._failed


class _UserIterator(ResumableIterator[T]):
    def __init__(
        self, dataset: AsyncIterable[T], iterator: AsyncIterator[T], key: int, seeds: Iterator[int]
    ) -> None:
        self._dataset = dataset
        self._iterator = iterator
        self._key, self._seeds = key, seeds
        self._read = 0
        self._errors = 0  # of those read
        self._reread = Reread()

    async def __anext__(self) -> T:
        # A generator starts inner streams here. Not reset, which takes as long as reading a sample:
        # streams of ours are started with seeds of their own.
        if stream_seeds.get() is not self._seeds:
            stream_seeds.set(self._seeds)
        if self._reread.left:
            await self._read_again()
        try:
            sample = await anext(self._iterator)
        except StopAsyncIteration:
            raise
        except Exception:  # of user code; the error takes the place of a sample
            self._read += 1
            self._errors += 1
            raise
        self._read += 1
        return sample

    async def _read_again(self) -> None:
        again = self._reread
        again.check()
        while again.left:
            try:
                await anext(self._iterator)
            except Exception as error:  # of user code, or the end
                again.error(error, name_of(self._dataset))
            else:
                again.left -= 1

    def state_dict(self) -> State:
        return {**user_state(self._dataset, self._iterator, self._read), "errors": self._errors}

    def load_state_dict(self, state: State) -> None:
        with keys_within(self._key) as self._seeds:
            self._iterator, count = restore_user(self._dataset, state, lambda: aiter(self._dataset))
        self._read, self._errors = state["read"], state["errors"]
        self._reread = Reread(count, self._errors)

    async def aclose(self) -> None:
        await close_all(self._iterator)


def warn_of_rereading(state: object) -> None:
    """Warn of each stream without a state of its own that will be read again from its start.

    Called in the consumer's process, since warnings of other processes do not get there, with a
    state, or several in dicts and lists.
    """
    name = None
    if isinstance(state, Mapping):
        name, read = state.get("read_again"), state.get("read")
        state = [] if state.get("ended") is True else [*state.values()]
    if isinstance(name, str):
        warn_user(
            f"{name} has no state_dict: to continue after {read} samples, it is read again from its start, and "
            f"those samples are dropped; they must be the same, in the same order. Give {name}, or the iterator that "
            f"it returns, state_dict() and load_state_dict(state)."
        )
    elif isinstance(state, list):
        for part in state:
            warn_of_rereading(part)


# Checks of whether a state is that of the stream, which raise `StateError`. The checksum of a
# loader's state excludes any other difference.


def check_operation(state: State, expected: str | None, stream: str | None = None) -> None:
    """Check that a state was saved of an operation; for None, of a `stream` without operations."""
    found = state.get("operation")
    if found != expected:
        saved = "a stream without operations" if found is None else repr(found)
        raise StateError(
            f"the state was saved of {saved}, but the stream is {stream or repr(expected)} now: restore it with the "
            f"same operations in the same order"
        )


def expect_same(state: State, name: str, now: object) -> None:
    value = state.get(name)
    if value != now:
        raise StateError(
            f"the state was saved with {name}={value!r}, but now there is {name}={now!r}"
        )


# Operations


class StreamOperation(ResumableIterator[T]):
    """An operation on one stream or several, which it owns and closes.

    A class names its `operation`, the `options` that must be the same where a state is loaded, and
    the `fields` that change while it reads; they are attributes of the same name after an
    underscore. `_inner` is the stream that it reads, None if none is read now. Saving, restoring
    and checking are written here, once.

    Operations are classes, not generators: an error of one sample is raised by `anext`, and the
    next call continues after it. A generator would have ended, and with it the rest of the epoch.
    """

    operation: ClassVar[str]  # its name in states
    options: ClassVar[tuple[str, ...]] = ()
    fields: ClassVar[tuple[str, ...]] = ()  # ints, bools, lists of them, `Order`s
    works_on_parts: ClassVar[bool] = (
        False  # whether each worker may apply it to its own part of the shards
    )
    ranks_differ: ClassVar[bool] = False  # whether equal numbers of samples may become unequal

    def __init__(self, source: AsyncIterable[Any] | None) -> None:
        self._inner: Any = None if source is None else start_stream(source)
        self._closed = False

    async def __anext__(self) -> T:
        sample: T = await anext(self._inner)
        return sample

    def _open(self) -> ResumableIterator[Any]:
        """Start the stream that a state is in the midst of; the fields are restored already."""
        raise NotImplementedError  # not called where the stream is started with the operation

    def _restored(self) -> None:
        """Derive other attributes from the restored fields, before streams are restored."""

    def _options(self) -> State:
        """What must be the same where a state is loaded."""
        return {name: getattr(self, f"_{name}") for name in self.options}

    def state_dict(self) -> State:
        state: State = {"operation": self.operation, **self._options()}
        for name in self.fields:
            value = getattr(self, f"_{name}")
            if isinstance(value, Order):
                value = value._asdict()
            state[name] = value.copy() if type(value) is list else value
        return {**state, "inner": self._inner_state()}

    def _inner_state(self) -> object:
        return None if self._inner is None else self._inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        check_operation(state, self.operation)
        for name, now in self._options().items():
            expect_same(state, name, now)
        for name in self.fields:
            value, present = copy.copy(state[name]), getattr(self, f"_{name}")
            if isinstance(present, Order):
                expect_same(value, "seed", present.seed)
                value = present._replace(**value)
            setattr(self, f"_{name}", value)
        self._restored()
        self._restore_inner(state)

    def _restore_inner(self, state: State) -> None:
        if state["inner"] is not None:
            self._inner = self._inner or self._open()
            self._inner.load_state_dict(state["inner"])

    async def aclose(self) -> None:
        self._closed = True
        await close_all(self._inner)


class Origins(deque[tuple[int, Callable[[int], Any] | None]]):
    """From which of an iterator's outcomes on a function gives their origins; the last ones."""

    def of(self, number: int) -> Any:
        for first, origin in reversed(list(self)):  # a copy, which another thread cannot change
            if first <= number:
                with contextlib.suppress(LookupError):  # an error came before it was read again
                    return origin and origin(number - first)
                break
        return None


class Mark(NamedTuple):
    """A position that can be saved; with the numbers of samples and errors, and of errors, given before it."""

    given: int
    errors: int
    position: State


class ReplayOperation(StreamOperation[T]):
    """An operation whose samples depend on some that it holds: not every position of it can be saved as such.

    The state is then an earlier position, a mark, and how many samples and errors have been given
    since. They are read again, and dropped.

    Each sample of the stream is passed to `_put`; after the end, `_rest` gives those that are held.
    Samples in `_ready` are given before the stream is read on.
    """

    # Dropped samples in a row, from which on the passes of a repeated stream are counted.
    # A random function that keeps 1 of 1,000 samples drops 10,000 in a row once in 20,000 times.
    most_dropped: ClassVar[int] = 10_000

    def __init__(self, source: AsyncIterable[Any]) -> None:
        super().__init__(source)
        self._ended = False
        self._ready: deque[Any] = deque()
        self._read = 0  # samples and errors of the stream
        self._given = 0  # samples and errors, since the start or the restored position
        self._errors = 0  # of those
        self._dropped = 0  # samples in a row that were read for nothing
        self._passes = 0  # of a repeated stream, when they became too many
        self._mark: Mark | None = None
        self._reread = Reread()
        self._saved: State = {}  # the state while samples are read again
        self._origins = Origins(maxlen=ORIGINS)  # by `_given`

    async def __anext__(self) -> T:
        reread = self._reread
        if self._closed:
            raise StopAsyncIteration
        if self._mark is None:
            self._mark = self._new_mark()
        if reread.left:
            reread.check()
        while True:
            sample: Any
            try:
                if self._ready:
                    sample = self._ready.popleft()
                elif self._ended:
                    sample = await self._rest()
                else:
                    try:
                        sample = await anext(self._inner)
                    except StopAsyncIteration:
                        self._ended = True
                        continue
                    except Exception:  # of user code; in place of a sample
                        self._read += 1
                        self._origins.append((self._given, None))
                        raise
                    self._read += 1
                    sample = self._put(sample)
                    if sample is NOTHING:
                        continue
            except Exception as error:
                if type(error) is not StopAsyncIteration:  # it stands in place of a sample
                    self._given += 1
                    self._errors += 1
                if not reread.left:
                    raise
                reread.error(error, self.operation)
            else:
                self._given += 1
                self._dropped = 0
                if not reread.left:
                    given: T = sample
                    return given
                reread.left -= 1

    def _drop(self, count: int) -> None:
        """Count dropped samples; raise if nothing is left of a stream that repeats without end."""
        self._dropped += count
        if self._dropped < self.most_dropped:
            return
        passes = passes_of(self._inner)
        if self._dropped - count < self.most_dropped:
            self._passes = passes
        elif passes > self._passes + 1:
            raise ValueError(
                f"{self.operation}: nothing is left of {self._dropped:,} samples in a row. "
                f"The stream is repeated without end, and every sample of it is dropped: "
                f"correct the function, or apply repeat() after it"
            )

    def state_dict(self) -> State:
        if self._reread.left:
            return self._saved
        self._mark = self._latest_mark()
        given, errors, position = self._mark
        return {**position, "given": self._given - given, "errors": self._errors - errors}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._reread = Reread(state["given"], state["errors"])
        self._saved = state
        self._mark = Mark(0, 0, state)

    def origin(self, number: int) -> Any:
        return self._origins.of(number + self._reread.count)

    def _new_mark(self) -> Mark:
        return Mark(self._given, self._errors, self._exact_state())

    def _exact_state(self) -> State:
        """The state at the current position, without what is held."""
        return super().state_dict()

    def _latest_mark(self) -> Mark:
        """The latest position from which what is held now can be read again; at the start, the start."""
        raise NotImplementedError  # each operation has its own

    def _put(self, sample: Any) -> Any:
        """Take the stream's next sample; returns the one to give, or `NOTHING`."""
        raise NotImplementedError  # not called where `_rest` reads the stream

    async def _rest(self) -> T:
        """The next sample after the end of the stream."""
        raise StopAsyncIteration


class MarkingOperation(ReplayOperation[T]):
    """An operation that holds samples for different times: its mark is the latest before the oldest of them.

    Marks are the positions that were asked for. A sample that is held for long makes more to be
    read again.
    """

    def __init__(self, source: AsyncIterable[Any]) -> None:
        super().__init__(source)
        self._marks: deque[tuple[int, Mark]] = deque()  # with the number read before them

    def _oldest(self) -> int:
        """The number of the read that gave the oldest sample that is held, `_read` if there is none."""
        raise NotImplementedError  # each operation has its own

    def _latest_mark(self) -> Mark:
        marks = self._marks
        if not marks and self._mark is not None:
            marks.append((0, self._mark))
        marks.append((self._read, self._new_mark()))
        oldest = self._oldest()
        while len(marks) > 1 and marks[1][0] <= oldest:
            marks.popleft()
        if len(marks) > _MOST_MARKS:  # then every second is dropped
            self._marks = deque((*itertools.islice(marks, 0, _MOST_MARKS, 2), marks[-1]))
        return self._marks[0][1]


class InContext(ResumableIterator[T]):
    """A stream that is started, read and restored within a context, since a generator starts its inner streams late."""

    def __init__(self, context: bound, dataset: AsyncIterable[T]) -> None:
        self._context = context
        with context:
            self._inner = start_stream(dataset)

    async def __anext__(self) -> T:
        token = self._context.variable.set(
            self._context.value
        )  # for each sample: a third of the time of `with`
        try:
            return await anext(self._inner)
        finally:
            self._context.variable.reset(token)

    def state_dict(self) -> State:
        return self._inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        with self._context:
            self._inner.load_state_dict(state)

    def origin(self, number: int) -> Any:
        return self._inner.origin(number)

    async def aclose(self) -> None:
        await self._inner.aclose()
