"""The position of a stream's iterator as a state that can be saved, and iterators that continue from one."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from typing import Protocol, TypeGuard, TypeVar, cast, runtime_checkable

from headrace._core.streams.kinds import has_method
from headrace._core.streams.order import StreamSeeds, seeds_of, spawn_key, stream_seeds
from headrace._core.text import add_note, dataset_repr, users_stacklevel
from headrace.errors import StateError

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

State = dict[str, object]
"""JSON values, where no user's object adds others."""


@runtime_checkable
class Stateful(Protocol):
    """A user's dataset, iterator or sampler with a state of its own, as for torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> State:
        """The state after the samples given out so far."""

    def load_state_dict(self, state_dict: State) -> None:
        """Continue from a state."""


def is_stateful(part: object) -> TypeGuard[Stateful]:
    """As `isinstance` with `Stateful`, which takes 2 µs; False for a `state_dict` with arguments, as litdata's."""
    if not (has_method(part, "state_dict") and has_method(part, "load_state_dict")):
        return False
    return not _needs_arguments(type(part))  # type: ignore[arg-type]  # mypy takes the __hash__ of the type's instances


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@functools.lru_cache(maxsize=256)
def _needs_arguments(kind: type) -> bool:
    try:
        _, *parameters = inspect.signature(kind.state_dict).parameters.values()  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):  # an attribute of the instance, a static method, a builtin
        return False
    return any(each.default is each.empty and each.kind not in _VARIADIC for each in parameters)


class ResumableIterator(AsyncIterator[T_co]):
    """An async iterator whose position can be saved and restored.

    The position is that after the last sample, or error, that `anext` gave; samples read ahead are read again. A
    `state_dict` also works after the end, after `aclose`, and after a cancelled `anext`.
    """

    @abstractmethod
    def state_dict(self) -> State:
        """The position, as JSON values; its size grows with the shards that are open, not with those read."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Continue after the position of `state`; called at most once, before the first `anext`.

        Raises:
            StateError: the state is of another stream, or damaged.
        """

    async def aclose(self) -> None:
        """Stop reading."""


def start_stream(dataset: AsyncIterable[T]) -> ResumableIterator[T]:
    """Start to read a stream, in place of `aiter`: the iterator's position can be saved and restored.

    An iterator of the user's is wrapped. Its state, and its dataset's, are asked for where they are `Stateful`; without
    one, samples are counted, and a restored stream is read again from its start.
    """
    if isinstance(dataset, ResumableIterator):
        return dataset
    key = spawn_key()
    seeds = None if key is None else StreamSeeds(key)
    with seeds_of(seeds):
        iterator = aiter(dataset)
    return iterator if isinstance(iterator, ResumableIterator) else _UserIterator(dataset, iterator, key, seeds)


async def close_iterator(iterator: object) -> None:
    """Call an iterator's `aclose`, if it has one."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


class UserState:
    """The state of a user's dataset and of its iterator, sync or async.

    Args:
        dataset: the dataset.
    """

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset

    @functools.cached_property
    def _name(self) -> str:
        return name_of(self._dataset)

    def of(self, iterator: object, read: int) -> State:
        """The state after `read` samples of `iterator`."""
        state: State = {"read": read}
        for name, part in (("dataset", self._dataset), ("iterator", iterator)):
            # A dataset that is its own iterator may have a state only from `iter()` on.
            if is_stateful(part) and (name == "iterator" or part is not iterator):
                state[name] = _copied(part.state_dict())
        if len(state) == 1 and read:
            state["read_again"] = self._name
        return state

    def restore(self, state: State, start: Callable[[], T]) -> tuple[T, int]:
        """An iterator made by `start` from a state, and the number of samples to read again and drop."""
        check_operation(state, None, self._name)
        read = expect_int(state, "read")
        saved = [name for name in ("dataset", "iterator") if name in state]
        self.restore_dataset(state)
        iterator = start()
        if "iterator" in saved:
            self._load(iterator, state["iterator"])
        return iterator, 0 if saved else read

    def restore_dataset(self, state: State) -> None:
        """Restore the dataset alone, if the state has one of it."""
        if "dataset" in state:
            self._load(self._dataset, state["dataset"])

    def _load(self, part: object, state: object) -> None:
        if not is_stateful(part):
            raise StateError(f"the state has one of {type(part).__name__}, which has no load_state_dict now")
        part.load_state_dict(cast(State, copy.deepcopy(state)))


_IMMUTABLE = frozenset({int, str, float, bool, bytes, type(None)})


def _copied(state: State) -> State:
    """A deep copy; 3 µs faster where there is little to copy."""
    plain = type(state) is dict and _IMMUTABLE.issuperset(map(type, state.values()))
    return state.copy() if plain else copy.deepcopy(state)


def state_of_dataset(state: Mapping[str, object]) -> State | None:
    """The state of a user's dataset for the epoch after that of `state`, which a reader or stream has saved.

    Returns:
        None if the dataset has none that outlives its iterator.
    """
    stream = state.get("stream", state)
    if not isinstance(stream, Mapping) or "dataset" not in stream:
        return None
    begun: State = {"read": 0, "errors": 0, "dataset": stream["dataset"]}
    return {"position": 0, "stream": begun} if "stream" in state else begun


def name_of(dataset: object) -> str:
    """The class of a user's dataset; the expression that made one of ours."""
    ours = type(dataset).__module__.startswith("headrace.")
    return dataset_repr(dataset) if ours else type(dataset).__name__


class Reread:
    """The samples and errors that are read again after a restore, and dropped.

    Args:
        count: their number.
        errors: how many of them were errors; others would be new ones.

    Attributes:
        left: how many are not read yet.
    """

    def __init__(self, count: int = 0, errors: int = 0) -> None:
        self.left = count
        self._count = count
        self._errors = errors
        self._failed: StateError | None = None

    def sample(self) -> None:
        """Count a sample that was read again."""
        self.left = max(0, self.left - 1)

    def error(self, error: Exception) -> None:
        """Count an error.

        Raises:
            StateError: there was a sample in its place.
        """
        if isinstance(error, StateError):
            raise error
        if not self._errors:
            self._failed = StateError(
                f"a sample that was read before the state was saved cannot be read again, so the samples after it are "
                f"unknown: {type(error).__name__}: {error}. Restore the state once more"
            )
            raise self._failed from error
        self._errors -= 1
        self.left -= 1

    def fail(self, stream: str) -> None:
        """Raise `StateError` for a stream that ended too early."""
        self._failed = StateError(
            f"{stream} ended after {self._count - self.left} samples, but {self._count} had been read when the state "
            f"was saved: it is not the same stream, or not in the same order"
        )
        raise self._failed

    def check(self) -> None:
        """Raise the `StateError` that was raised before: the samples that follow are unknown."""
        if self._failed is not None:
            raise self._failed


class _UserIterator(ResumableIterator[T]):
    def __init__(
        self, dataset: AsyncIterable[T], iterator: AsyncIterator[T], key: int | None, seeds: StreamSeeds | None
    ) -> None:
        self._dataset = dataset
        self._state = UserState(dataset)
        self._iterator = iterator
        self._key = key
        self._seeds = seeds
        self._read = 0
        self._errors = 0  # of those read
        self._reread = Reread()
        self._replaced: AsyncIterator[T] | None = None  # to be closed

    async def __anext__(self) -> T:
        # A generator starts inner streams here. Not reset, which takes as long as reading a sample: streams of ours are
        # started with seeds of their own.
        if self._seeds is not None and stream_seeds.get() is not self._seeds:
            stream_seeds.set(self._seeds)
        if self._replaced is not None or self._reread.left:
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
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            await close_iterator(replaced)
        self._reread.check()
        while self._reread.left:
            try:
                await anext(self._iterator)
            except StopAsyncIteration:
                self._reread.fail(name_of(self._dataset))
            except Exception as error:  # of user code
                self._reread.error(error)
            else:
                self._reread.sample()

    def state_dict(self) -> State:
        return {**self._state.of(self._iterator, self._read), "errors": self._errors}

    def load_state_dict(self, state: State) -> None:
        replaced = self._iterator
        self._seeds = None if self._key is None else StreamSeeds(self._key)
        with seeds_of(self._seeds):
            self._iterator, count = self._state.restore(state, lambda: aiter(self._dataset))
        self._errors = expect_int(state, "errors")
        self._reread = Reread(count, self._errors)
        self._replaced = replaced
        self._read = expect_int(state, "read")

    async def aclose(self) -> None:
        for iterator in (self._replaced, self._iterator):
            await close_iterator(iterator)


def warn_of_rereading(state: object) -> None:
    """Warn of each stream without a state of its own that will be read again from its start.

    Called in the consumer's process, since warnings of other processes do not get there.

    Args:
        state: a state, or several in dicts and lists, that streams will be restored from.
    """
    samples: Counter[str] = Counter()
    _count_read_again(state, samples)
    for name, read in samples.items():
        warnings.warn(
            f"{name} has no state_dict: to continue after {read} samples, it is read again from its start, and "
            f"those samples are dropped; they must be the same, in the same order. Give {name}, or the iterator that "
            f"it returns, state_dict() and load_state_dict(state).",
            UserWarning,
            stacklevel=users_stacklevel(),
        )


def _count_read_again(state: object, samples: Counter[str]) -> None:
    if isinstance(state, Mapping):
        name, read = state.get("read_again"), state.get("given", state.get("read"))
        if isinstance(name, str) and isinstance(read, int):
            samples[name] += read
        elif not ("dataset" in state or "iterator" in state or state.get("ended") is True):
            _count_read_again([*state.values()], samples)
    elif isinstance(state, list):
        for part in state:
            _count_read_again(part, samples)


# Checks of states. Each of them raises `StateError`.


@contextlib.contextmanager
def in_state_of(part: str) -> Iterator[None]:
    """Name a part of a composition in the note of a `StateError`."""
    try:
        yield
    except StateError as error:
        add_note(error, f"headrace: in the state of {part}")
        raise


def check_operation(state: object, expected: str | None, stream: str) -> None:
    """Check that a state was saved of an operation; of a stream without operations for None."""
    found = state.get("operation") if isinstance(state, Mapping) else None
    if found != expected:
        saved = "a stream without operations" if found is None else repr(found)
        raise StateError(
            f"the state was saved of {saved}, but the stream is {stream} now: restore it with the same operations in "
            f"the same order"
        )


def _expect(state: Mapping[str, object], name: str, kind: type, what: str) -> object:
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise StateError(f"the state is damaged: {name!r} must be {what}, but is {value!r}")
    return value


def expect_int(state: Mapping[str, object], name: str, *, least: int = 0, most: int | None = None) -> int:
    """The int `name` of a state, from `least` to `most`."""
    value = cast(int, _expect(state, name, int, f"an int of at least {least}"))
    if value < least or (most is not None and value > most):
        bounds = f"an int of at least {least}" if value < least else f"at most {most}"
        raise StateError(f"the state is damaged: {name!r} must be {bounds}, but is {value!r}")
    return value


def expect_bool(state: Mapping[str, object], name: str) -> bool:
    """The bool `name` of a state."""
    return cast(bool, _expect(state, name, bool, "true or false"))


def expect_state(state: Mapping[str, object], name: str) -> State:
    """The nested state `name` of a state."""
    return cast(State, _expect(state, name, dict, "a dict"))


def expect_list(state: Mapping[str, object], name: str, *, length: int | None = None) -> list[object]:
    """The list `name` of a state, of a given length."""
    value = cast("list[object]", _expect(state, name, list, "a list"))
    if length is not None and len(value) != length:
        raise StateError(f"the state has {len(value)} {name}, but there are {length} now")
    return value


def expect_same(state: Mapping[str, object], name: str, now: object) -> None:
    """Check that `name` had the same value when the state was saved."""
    value = state.get(name) if isinstance(state, Mapping) else None
    if value != now:
        raise StateError(f"the state was saved with {name}={value!r}, but now there is {name}={now!r}")
