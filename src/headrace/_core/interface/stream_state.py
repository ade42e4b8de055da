"""The position of a stream's iterator as a state that can be saved, and iterators that continue from one."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from typing import Protocol, TypeGuard, TypeVar, cast, runtime_checkable

from headrace._core.interface.kinds import has_method
from headrace._core.interface.reprs import dataset_repr
from headrace._core.interface.reread import Reread
from headrace._core.interface.stream_seeds import StreamSeeds, seeds_of, spawn_key, stream_seeds
from headrace._core.notes import add_note
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
    key = spawn_key()
    seeds = None if key is None else StreamSeeds(key)
    with seeds_of(seeds):
        iterator = aiter(dataset)
    return iterator if isinstance(iterator, ResumableIterator) else _UserIterator(dataset, iterator, key, seeds)


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
        if isinstance(state, Mapping) and "operation" in state:
            raise StateError(
                f"the state was saved of {state['operation']!r}, but the stream is {self._name} now: restore it with "
                f"the same operations in the same order"
            )
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
        try:
            if self._replaced is not None or self._reread.left:
                await self._read_again()
            sample = await anext(self._iterator)
        except StopAsyncIteration:
            raise
        except Exception:  # of user code; the error takes the place of a sample
            if not self._reread.left:
                self._read += 1
                self._errors += 1
            raise
        self._read += 1
        return sample

    async def _read_again(self) -> None:
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            await close_iterator(replaced)
        await self._reread.drop(lambda: anext(self._iterator), name_of(self._dataset))

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


def snapshot(iterator: ResumableIterator[object]) -> Callable[[], State]:
    """The position of an iterator now; an error of a user's `state_dict` is raised when the position is asked for."""
    try:
        state = iterator.state_dict()
    except Exception as error:  # user code; reading goes on
        failure = error

        def failed() -> State:
            raise failure

        return failed
    return lambda: state


async def close_iterator(iterator: object) -> None:
    """Call an iterator's `aclose`, if it has one."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


@contextlib.contextmanager
def in_state_of(part: str) -> Iterator[None]:
    """Name a part of a composition in the note of a `StateError`."""
    try:
        yield
    except StateError as error:
        add_note(error, f"headrace: in the state of {part}")
        raise


def expect_int(state: Mapping[str, object], name: str, *, least: int = 0, most: int | None = None) -> int:
    """The int `name` of a state.

    Raises:
        StateError: it is missing, no int, less than `least`, or more than `most`.
    """
    value = state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or value < least:
        raise StateError(f"the state is damaged: {name!r} must be an int of at least {least}, but is {value!r}")
    if most is not None and value > most:
        raise StateError(f"the state is damaged: {name!r} must be at most {most}, but is {value}")
    return value


def expect_ints(
    state: Mapping[str, object], name: str, *, most: int | None = None, length: int | None = None
) -> list[int]:
    """The list `name` of ints from 0 to `most`, of a given length.

    Raises:
        StateError: it is missing, or another value.
    """
    return [expect_int({name: value}, name, most=most) for value in expect_list(state, name, length=length)]


def expect_state(state: Mapping[str, object], name: str) -> State:
    """The nested state `name` of a state.

    Raises:
        StateError: it is missing, or no dict.
    """
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, dict):
        raise StateError(f"the state is damaged: {name!r} must be a dict, but is {value!r}")
    return value


def expect_list(state: Mapping[str, object], name: str, *, length: int | None = None) -> list[object]:
    """The list `name` of a state, of a given length.

    Raises:
        StateError: it is missing, no list, or of another length: the stream had another number of parts.
    """
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, list):
        raise StateError(f"the state is damaged: {name!r} must be a list, but is {value!r}")
    if length is not None and len(value) != length:
        raise StateError(f"the state has {len(value)} {name}, but there are {length} now")
    return value


def expect_bool(state: Mapping[str, object], name: str) -> bool:
    """The bool `name` of a state.

    Raises:
        StateError: it is missing, or no bool.
    """
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, bool):
        raise StateError(f"the state is damaged: {name!r} must be true or false, but is {value!r}")
    return value


def expect_same(state: Mapping[str, object], name: str, now: object) -> None:
    """Check that `name` had the same value when the state was saved.

    Raises:
        StateError: it had another.
    """
    value = state.get(name) if isinstance(state, Mapping) else None
    if value != now:
        raise StateError(f"the state was saved with {name}={value!r}, but now there is {name}={now!r}")
