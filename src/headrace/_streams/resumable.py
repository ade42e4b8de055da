"""Stream iterators with a position that can be saved and restored."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeGuard, TypeVar

from headrace._base.text import dataset_repr, error_message, warn_user
from headrace._ranks.rankinfo import bound
from headrace._streams.epochs import Order, keys_within, spawn_key, stream_seeds
from headrace._streams.kinds import DatasetKind, T_co, has_method, signature_of
from headrace.errors import StateError

T = TypeVar("T")
NOTHING: Any = type("NOTHING", (), {})  # a class, so identical in other processes
ORIGINS = 1024
_MOST_MARKS = 64

State = dict[str, Any]
"""JSON values, unless the state of a user's object adds other values."""


class Stateful(Protocol):
    """A user's dataset, iterator or sampler with a state.

    The methods are as for torchdata's `StatefulDataLoader`.
    """

    def state_dict(self) -> State: ...

    def load_state_dict(self, state_dict: State) -> None: ...


def is_stateful(part: object) -> TypeGuard[Stateful]:
    """Return whether a part has both methods of `Stateful`.

    A `state_dict` with required arguments, as in litdata, does not count.
    """
    named = has_method(part, "state_dict") and has_method(part, "load_state_dict")
    # mypy checks the `__hash__` of instances, not of the type.
    return named and _has_state_without_arguments(type(part))  # type: ignore[arg-type]


def copies_have_state(kind: DatasetKind, dataset: object) -> bool:
    """Return whether the copy of a torch dataset in each worker has a separate state."""
    return not kind.is_async and (kind.is_iterable or is_stateful(dataset))


@functools.lru_cache(maxsize=256)
def _has_state_without_arguments(kind: type) -> bool:
    # An instance attribute, a builtin.
    with contextlib.suppress(AttributeError, ValueError):
        try:
            signature_of(kind.state_dict).bind(None)  # type: ignore[attr-defined]
        except TypeError:
            return False
    return True


class ResumableIterator(AsyncIterator[T_co]):
    """An async iterator with a position that can be saved.

    The position is after the last sample or error from `anext`. Samples read ahead are read again
    after a restore. The position can also be saved after the end, after `aclose`, and after a
    cancelled `anext`.
    """

    @abstractmethod
    def state_dict(self) -> State:
        """Return the position.

        The size of the state grows with the number of open shards, not with the number of shards
        read.
        """

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Continue after the position of `state`.

        Called at most once, before the first `anext`.
        """

    def origin(self, number: int) -> Any:
        """Return the file and the line, or similar, of an outcome.

        Called after an error. `number` counts outcomes since the start.
        """
        return None

    async def aclose(self) -> None:
        """Stop reading."""


def start_stream(dataset: AsyncIterable[T]) -> ResumableIterator[T]:
    """Start to read a stream, in place of `aiter`.

    The position of the returned iterator can be saved and restored. A user's iterator is wrapped.
    The states of the iterator and of the dataset are saved if both, or either, are `Stateful`.
    Without a state, samples are counted, and a restored stream is read again from the start.
    """
    if isinstance(dataset, ResumableIterator):
        return dataset
    key = spawn_key()
    with keys_within(key) as seeds:
        iterator = aiter(dataset)
    if isinstance(iterator, ResumableIterator):
        return iterator
    return _UserIterator(dataset, iterator, key, seeds)


def passes_of(stream: Any) -> int:
    """Return the completed passes of a stream repeated without end.

    For a list of streams the smallest number counts. Returns 0 for other streams.
    """
    if type(stream) is list:
        return min(map(passes_of, stream), default=0)
    inner = getattr(stream, "_inner", None)
    return getattr(stream, "endless_passes", 0) or (
        0 if inner is None else passes_of(inner)
    )


async def close_all(*iterators: object) -> None:
    """Close all iterators, the last iterator first.

    All are closed, even if a close fails or is cancelled.
    """
    async with contextlib.AsyncExitStack() as stack:
        for iterator in iterators:
            if (close := getattr(iterator, "aclose", None)) is not None:
                stack.push_async_callback(close)


def user_state(dataset: object, iterator: object, read: int) -> State:
    """Return the state of a user's dataset and iterator after `read` samples.

    The iterator may be sync or async.
    """
    state: State = {"read": read}
    for name, part in (("dataset", dataset), ("iterator", iterator)):
        # A dataset may be the iterator itself, and may have a state only from `iter()` on.
        if is_stateful(part) and (name == "iterator" or part is not iterator):
            state[name] = copy.deepcopy(part.state_dict())
    if len(state) == 1 and read:
        state["read_again"] = name_of(dataset)
    return state


def restore_user(dataset: object, state: State, start: Callable[[], T]) -> tuple[T, int]:
    """Make an iterator with `start`, and restore the state of `user_state`.

    Returns:
        The iterator, and the number of samples to read again and drop.
    """
    check_operation(state, None, name_of(dataset))
    restore_dataset(dataset, state)
    # If the dataset was its own iterator, the dataset gets the iterator's state.
    if "iterator" in state and "dataset" not in state and is_stateful(dataset):
        # `__iter__` may need the state, and the state may need `__iter__`.
        with contextlib.suppress(Exception):
            load_copy(dataset, state["iterator"], name_of(dataset))
    iterator = start()
    if "iterator" in state:
        load_copy(iterator, state["iterator"], name_of(dataset))
    return iterator, 0 if "iterator" in state or "dataset" in state else state["read"]


def restore_dataset(dataset: object, state: State) -> None:
    """Restore only a user's dataset, if the state has a dataset."""
    if "dataset" in state:
        load_copy(dataset, state["dataset"], name_of(dataset))


def load_copy(part: object, state: Any, whose: str) -> None:
    if not is_stateful(part):
        raise StateError(
            f"the state has one of {whose}, which has no load_state_dict now"
        )
    part.load_state_dict(copy.deepcopy(state))


def state_of_dataset(state: Mapping[str, Any]) -> State | None:
    """Return the state for the epoch after the epoch of `state`.

    Returns None unless the dataset has a state that outlives the iterator.
    """
    stream = state.get("stream", state)
    if "dataset" not in stream:
        return None
    begun: State = {"read": 0, "errors": 0, "dataset": stream["dataset"]}
    return {"position": 0, "stream": begun} if "stream" in state else begun


def name_of(dataset: object) -> str:
    """Return the name of a dataset for messages.

    A user's dataset is named by the class, headrace's datasets by the expression.
    """
    ours = type(dataset).__module__.startswith("headrace.")
    return dataset_repr(dataset) if ours else type(dataset).__name__


class Reread:
    """Count of samples and errors to read again after a restore, and drop.

    `count` is the number of samples and errors, and `errors` the number of errors among `count`.
    Any further error is new. The reader counts samples down.
    """

    def __init__(self, count: int = 0, errors: int = 0) -> None:
        self.left = self.count = count
        self._errors = errors
        self._failed: StateError | None = None

    async def read(self, iterator: AsyncIterator[Any], stream: str) -> None:
        """Read the samples and errors again."""
        self.check()
        while self.left:
            try:
                await anext(iterator)
            except Exception as error:  # of user code, or the end
                self.error(error, stream)
            else:
                self.left -= 1

    def error(self, error: Exception, stream: str) -> None:
        """Count an error that was read again.

        Raises:
            StateError: the stream ended, or the error is new: before, a sample came instead.
        """
        if isinstance(error, StateError):
            raise error
        if isinstance(error, StopIteration | StopAsyncIteration):
            self._failed = StateError(
                f"{stream} ended after {self.count - self.left} samples, but {self.count} had been "
                f"read when the state was saved: it is not the same stream, or not in the same "
                f"order"
            )
        elif not self._errors:
            self._failed = StateError(
                f"a sample that was read before the state was saved cannot be read again, so the "
                f"samples after it are unknown: {type(error).__name__}: {error_message(error)}. "
                f"Restore the state once more"
            )
        self.check()
        self._errors -= 1
        self.left -= 1

    def check(self) -> None:
        """Raise an earlier `StateError` again: the following samples are unknown."""
        if self._failed is not None:
            raise self._failed


class _UserIterator(ResumableIterator[T]):
    def __init__(
        self,
        dataset: AsyncIterable[T],
        iterator: AsyncIterator[T],
        key: int,
        seeds: Iterator[int],
    ) -> None:
        self._dataset = dataset
        self._iterator = iterator
        self._key, self._seeds = key, seeds
        self._read = 0
        self._errors = 0  # errors among `_read`
        self._reread = Reread()

    async def __anext__(self) -> T:
        # A generator starts inner streams here. The context variable is not reset, because a reset
        # takes as long as reading a sample, and headrace's streams are started with other seeds.
        if stream_seeds.get() is not self._seeds:
            stream_seeds.set(self._seeds)
        if self._reread.left:
            await self._reread.read(self._iterator, name_of(self._dataset))
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

    def state_dict(self) -> State:
        return {
            **user_state(self._dataset, self._iterator, self._read),
            "errors": self._errors,
        }

    def load_state_dict(self, state: State) -> None:
        with keys_within(self._key) as self._seeds:
            self._iterator, count = restore_user(
                self._dataset, state, lambda: aiter(self._dataset)
            )
        self._read, self._errors = state["read"], state["errors"]
        self._reread = Reread(count, self._errors)

    async def aclose(self) -> None:
        await close_all(self._iterator)


def warn_of_rereading(state: object) -> None:
    """Warn of streams without a state, to be read again from the start.

    Call this function in the consumer's process, because warnings of other processes do not get
    there. `state` is a state, or several states in dicts and lists.
    """
    name = None
    if isinstance(state, Mapping):
        name, read = state.get("read_again"), state.get("read")
        state = [] if state.get("ended") is True else [*state.values()]
    if isinstance(name, str):
        warn_user(
            f"{name} has no state_dict: to continue after {read} samples, it is read again from "
            f"its start, and those samples are dropped; they must be the same, in the same order. "
            f"Give {name}, or the iterator that it returns, state_dict() and "
            f"load_state_dict(state)."
        )
    elif isinstance(state, list):
        for part in state:
            warn_of_rereading(part)


# Checks whether a state belongs to a stream. The checks raise `StateError`. The checksum of a
# loader's state excludes any other difference.


def check_operation(
    state: State, expected: str | None, stream: str | None = None
) -> None:
    """Check that a state was saved from the operation `expected`.

    If `expected` is None, the state must be from a `stream` without operations.
    """
    found = state.get("operation")
    if found != expected:
        saved = "a stream without operations" if found is None else repr(found)
        raise StateError(
            f"the state was saved of {saved}, but the stream is {stream or repr(expected)} now: "
            f"restore it with the same operations in the same order"
        )


def expect_same(state: State, name: str, now: object) -> None:
    value = state.get(name)
    if value != now:
        raise StateError(
            f"the state was saved with {name}={value!r}, but now there is {name}={now!r}"
        )


# Operations


class BadRecord(NamedTuple):
    """Placeholder of a sample that cannot be made.

    The reader continues after the placeholder. The error is raised in the sample's place.
    """

    error: Exception


def raised_or(sample: Any) -> Any:
    """Return a sample, or raise the error in place of the sample."""
    if type(sample) is BadRecord:
        raise sample.error
    return sample


class StreamOperation(ResumableIterator[T]):
    """An operation that owns and closes a stream, or several streams.

    A class names the `operation`, the `options` that must be equal when a state is loaded, and the
    `fields` that change during reading. Options and fields are attributes of the same name after an
    underscore. `_inner` is the stream being read, or None. The base class saves, restores and
    checks states.

    Operations are classes, not generators. If a sample fails, `anext` raises the error, and the
    next call continues after the error. A generator would have ended, and with the generator the
    rest of the epoch.
    """

    operation: ClassVar[str]  # name in states
    options: ClassVar[tuple[str, ...]] = ()
    fields: ClassVar[tuple[str, ...]] = ()  # ints, bools, lists of both, `Order`s
    reads_ahead: ClassVar[bool] = False
    # Equal numbers of samples on ranks may become unequal.
    ranks_differ: ClassVar[bool] = False

    def __init__(self, source: AsyncIterable[Any] | None) -> None:
        self._inner: Any = None if source is None else start_stream(source)
        self._closed = False

    async def __anext__(self) -> T:
        sample: T = await anext(self._inner)
        return sample

    def _open(self) -> ResumableIterator[Any]:
        """Start the current stream of a state. The fields are restored before."""
        raise NotImplementedError  # not called if the stream starts with the operation

    def _restored(self) -> None:
        """Derive other attributes from restored fields, before restoring streams."""

    def _options(self) -> State:
        """Return the values that must be equal when a state is loaded."""
        return {name: getattr(self, f"_{name}") for name in self.options}

    def state_dict(self) -> State:
        state: State = {"operation": self.operation, **self._options()}
        for name in self.fields:
            value = getattr(self, f"_{name}")
            if isinstance(value, Order):
                value = value._asdict()
            state[name] = value.copy() if type(value) is list else value
        return {**state, "inner": self._inner_state()}

    def _inner_state(self) -> Any:
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
    """Origins of an iterator's latest outcomes.

    An entry has the number of the first outcome, and a function from the offset of an outcome to
    the origin. The function is None if the origin is unknown.
    """

    def of(self, number: int) -> Any:
        for first, origin in reversed(list(self)):  # a copy: another thread may append
            if first <= number:
                # The outcome is not read again yet.
                with contextlib.suppress(LookupError):
                    return origin and origin(number - first)
                break
        return None


class Mark(NamedTuple):
    """A position that can be saved."""

    given: int  # samples and errors given before the position
    errors: int  # errors given before the position
    position: State
    read: int = 0  # samples and errors read before the position


class ReplayOperation(StreamOperation[T]):
    """An operation with held samples: not every position can be saved.

    The state is an earlier position, the mark, and the number of samples and errors given since the
    mark. After a restore, samples and errors given since the mark are read again and dropped.

    Each sample of the stream is passed to `_put`. After the end of the stream, `_rest` gives the
    held samples. Samples in `_ready` are given before the stream is read further.
    """

    # Number of samples dropped in a row after which passes of a repeated stream are counted. A
    # random function that keeps 1 of 1,000 samples drops 10,000 in a row once in 20,000 times.
    most_dropped: ClassVar[int] = 10_000

    def __init__(self, source: AsyncIterable[Any]) -> None:
        super().__init__(source)
        self._ended = False
        self._ready: deque[Any] = deque()
        self._read = 0  # samples and errors read from the stream
        # Samples and errors given since the start or the restored position.
        self._given = 0
        self._errors = 0  # errors among `_given`
        self._dropped = 0  # samples dropped in a row
        # Passes of a repeated stream when `_dropped` reached `most_dropped`.
        self._passes = 0
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
                    except Exception:  # of user code, in place of a sample
                        self._read += 1
                        self._origins.append((self._given, None))
                        raise
                    self._read += 1
                    sample = self._put(sample)
                    if sample is NOTHING:
                        continue
            except Exception as error:
                if type(error) is not StopAsyncIteration:  # in place of a sample
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
        """Count dropped samples.

        Raises:
            ValueError: nothing is left of a stream repeated without end.
        """
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
        mark = self._mark = self._latest_mark()
        counts = {"given": self._given - mark.given, "errors": self._errors - mark.errors}
        return {**mark.position, **counts}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._reread = Reread(state["given"], state["errors"])
        self._saved = state
        self._mark = Mark(0, 0, state)

    def origin(self, number: int) -> Any:
        return self._origins.of(number + self._reread.count)

    def _new_mark(self) -> Mark:
        return Mark(self._given, self._errors, self._exact_state(), self._read)

    def _exact_state(self) -> State:
        """Return the state at the current position, without held samples."""
        return super().state_dict()

    def _latest_mark(self) -> Mark:
        """Return the latest mark before all held samples.

        From this mark the held samples can be read again. Before the first sample, the mark is the
        start.
        """
        raise NotImplementedError

    def _put(self, sample: Any) -> Any:
        """Take the next sample of the stream.

        Returns the sample to give, or `NOTHING`.
        """
        raise NotImplementedError  # not called if `_rest` reads the stream

    async def _rest(self) -> T:
        """Return the next sample after the end of the stream."""
        raise StopAsyncIteration


class MarkingOperation(ReplayOperation[T]):
    """An operation that holds samples for different lengths of time.

    A mark is made whenever a state is requested. The mark of a state is the latest mark before the
    oldest held sample. The longer a sample is held, the more samples are read again after a
    restore.
    """

    def __init__(self, source: AsyncIterable[Any]) -> None:
        super().__init__(source)
        self._marks: deque[Mark] = deque()

    def _oldest(self) -> int:
        """Return the number of the read with the oldest held sample.

        Returns `_read` if no sample is held.
        """
        raise NotImplementedError

    def _latest_mark(self) -> Mark:
        marks = self._marks
        if not marks and self._mark is not None:
            marks.append(self._mark)
        marks.append(self._new_mark())
        oldest = self._oldest()
        while len(marks) > 1 and marks[1].read <= oldest:
            marks.popleft()
        if len(marks) > _MOST_MARKS:  # drop every second mark
            self._marks = deque((*itertools.islice(marks, 0, _MOST_MARKS, 2), marks[-1]))
        return self._marks[0]


class InContext(ResumableIterator[T]):
    """A stream started, read and restored within a context.

    A generator starts inner streams late, so the context must also be set during reading.
    """

    def __init__(self, context: bound, dataset: AsyncIterable[T]) -> None:
        self._context = context
        with context:
            self._inner = start_stream(dataset)

    async def __anext__(self) -> T:
        with self._context:
            return await anext(self._inner)

    def state_dict(self) -> State:
        return self._inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        with self._context:
            self._inner.load_state_dict(state)

    def origin(self, number: int) -> Any:
        return self._inner.origin(number)

    async def aclose(self) -> None:
        await self._inner.aclose()
