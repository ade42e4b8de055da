"""The position of a stream's iterator as a state that can be saved, and iterators that continue from one."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from typing import Protocol, TypeVar, cast, runtime_checkable

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


class ResumableIterator(AsyncIterator[T_co]):
    """An async iterator whose position can be saved and restored.

    The position is that after the last sample, or error, that `anext` gave; samples read ahead are read again.
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
    iterator = aiter(dataset)
    return iterator if isinstance(iterator, ResumableIterator) else _UserIterator(dataset, iterator)


class UserState:
    """The state of a user's dataset and of its iterator, sync or async.

    Args:
        dataset: the dataset.
    """

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset

    def of(self, iterator: object, read: int) -> State:
        """The state after `read` samples of `iterator`."""
        state: State = {"read": read}
        for name, part in (("dataset", self._dataset), ("iterator", iterator)):
            if isinstance(part, Stateful):
                state[name] = copy.deepcopy(part.state_dict())
        if len(state) == 1 and read:
            state["read_again"] = type(self._dataset).__name__
        return state

    def restore(self, state: State, start: Callable[[], T]) -> tuple[T, int]:
        """An iterator made by `start` from a state, and the number of samples to read again and drop."""
        read = expect_int(state, "read")
        saved = [name for name in ("dataset", "iterator") if name in state]
        if "dataset" in saved:
            self._load(self._dataset, state["dataset"])
        iterator = start()
        if "iterator" in saved:
            self._load(iterator, state["iterator"])
        return iterator, 0 if saved else read

    def _load(self, part: object, state: object) -> None:
        if not isinstance(part, Stateful):
            raise StateError(f"the state has one of {type(part).__name__}, which has no load_state_dict now")
        part.load_state_dict(cast(State, copy.deepcopy(state)))

    def check_read(self, read: int, expected: int) -> None:
        """Raise `StateError` for a stream that ended while samples were read again."""
        raise StateError(
            f"{type(self._dataset).__name__} ended after {read} samples, but {expected} had been read when the state "
            f"was saved: it is not the same stream, or not in the same order"
        )


def warn_of_rereading(state: object, *, stacklevel: int) -> None:
    """Warn of each stream without a state of its own that will be read again from its start.

    Called in the consumer's process, since warnings of other processes do not get there.

    Args:
        state: a state, or several in dicts and lists, that streams will be restored from.
        stacklevel: as of `warnings.warn`, from the caller's frame.
    """
    samples: Counter[str] = Counter()
    _count_read_again(state, samples)
    for name, read in samples.items():
        warnings.warn(
            f"{name} has no state_dict: to continue after {read} samples, it is read again from its start, and "
            f"those samples are dropped. Give {name}, or the iterator that it returns, state_dict() and "
            f"load_state_dict(state).",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def _count_read_again(state: object, samples: Counter[str]) -> None:
    if isinstance(state, Mapping):
        name, read = state.get("read_again"), state.get("read")
        if isinstance(name, str) and isinstance(read, int):
            samples[name] += read
        elif "read" not in state and state.get("ended") is not True:
            _count_read_again([*state.values()], samples)
    elif isinstance(state, list):
        for part in state:
            _count_read_again(part, samples)


class _UserIterator(ResumableIterator[T]):
    def __init__(self, dataset: AsyncIterable[T], iterator: AsyncIterator[T]) -> None:
        self._dataset = dataset
        self._state = UserState(dataset)
        self._iterator = iterator
        self._read = 0
        self._drop = 0  # samples to read again before the next
        self._replaced: AsyncIterator[T] | None = None  # to be closed

    async def __anext__(self) -> T:
        if self._replaced is not None:
            replaced, self._replaced = self._replaced, None
            await close_iterator(replaced)
        if self._drop:
            await self._skip()
        try:
            sample = await anext(self._iterator)
        except StopAsyncIteration:
            raise
        except Exception:
            self._read += 1
            raise
        self._read += 1
        return sample

    async def _skip(self) -> None:
        expected = self._drop
        while self._drop:
            try:
                await anext(self._iterator)
            except StopAsyncIteration:
                read, self._drop = expected - self._drop, 0
                self._state.check_read(read, expected)
            except Exception:  # it was raised before the state was saved
                pass
            self._drop -= 1

    def state_dict(self) -> State:
        return self._state.of(self._iterator, self._read)

    def load_state_dict(self, state: State) -> None:
        self._replaced = self._iterator
        self._iterator, self._drop = self._state.restore(state, lambda: aiter(self._dataset))
        self._read = expect_int(state, "read")

    async def aclose(self) -> None:
        for iterator in (self._replaced, self._iterator):
            await close_iterator(iterator)


async def close_iterator(iterator: object) -> None:
    """Call an iterator's `aclose`, if it has one."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


def expect_int(state: Mapping[str, object], name: str, *, least: int = 0) -> int:
    """The int `name` of a state.

    Raises:
        StateError: it is missing, no int, or less than `least`.
    """
    value = state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or value < least:
        raise StateError(f"the state is damaged: {name!r} must be an int of at least {least}, but is {value!r}")
    return value


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
