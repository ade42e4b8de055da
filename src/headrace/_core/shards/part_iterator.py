"""The iterator of one pass over a stream of parts, whose state says which stream, reader and epoch it is of."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from headrace._core.interface.resumable import (
    ResumableIterator,
    State,
    close_iterator,
    expect_int,
    expect_list,
    expect_state,
)
from headrace._core.shards.redistribution import Division, Readers
from headrace._core.shards.windows import WindowRest, reader_of
from headrace.errors import StateError

T_co = TypeVar("T_co", covariant=True)


class Occasion(NamedTuple):
    """When a stream is read: its order depends on it."""

    epoch: int
    repetition: int


class PartReader(Protocol[T_co]):
    """One reader of a stream of parts.

    Attributes:
        name: of the stream, in errors.
        index: the reader's number.
        readers: all readers.
        parts: number of all parts.
        alike: whether the states of all readers are the same, so that any reader can load any of them.
    """

    name: str
    index: int
    readers: Readers
    parts: int
    alike: bool

    def options(self) -> Mapping[str, object]:
        """What must be the same where a state is loaded."""

    def start(
        self, occasion: Occasion, divisions: Sequence[Division], leaf: State | None = None
    ) -> ResumableIterator[T_co]:
        """Start to read; nothing is read before the first `anext`. `leaf` is a position of readers that read all."""

    def start_window(
        self, occasion: Occasion, divisions: Sequence[Division], window: WindowRest
    ) -> ResumableIterator[T_co]:
        """Start to read what is left of another reader's shuffle window."""

    def own_windows(
        self, occasion: Occasion, divisions: Sequence[Division], windows: Sequence[WindowRest]
    ) -> list[WindowRest]:
        """The reader's share of windows, of which each reader has given none."""


class PartIterator(ResumableIterator[T_co]):
    """The samples of one reader in one epoch.

    The state of another epoch can be loaded: the iterator then continues in that epoch's order.

    Args:
        reader: the reader.
        occasion: the epoch.
    """

    def __init__(self, reader: PartReader[T_co], occasion: Occasion) -> None:
        self._reader = reader
        self._occasion = occasion
        self._divisions: list[Division] = []
        self._windows: deque[tuple[WindowRest, ResumableIterator[T_co]]] = deque()  # given before the others
        self._given = 0  # samples of the first
        self._stream = reader.start(occasion, ())
        self._fixed: State | None = None  # the part of the state that stays the same

    def __anext__(self) -> Awaitable[T_co]:
        return self._from_windows() if self._windows else self._stream.__anext__()

    async def _from_windows(self) -> T_co:
        while self._windows:
            rest, samples = self._windows[0]
            if self._given < rest.size:
                sample = await anext(samples)
                self._given += 1
                return sample
            await close_iterator(samples)
            self._windows.popleft()
            self._given = 0
        return await anext(self._stream)

    def state_dict(self) -> State:
        if self._fixed is None:
            readers = self._reader.readers
            self._fixed = {
                "of": dict(self._reader.options()),
                "reader": [self._reader.index, readers.count, readers.ranks],
                **self._occasion._asdict(),
                "divisions": [division.to_state() for division in self._divisions],
            }
        windows = [rest for rest, _ in self._windows]
        if self._given:
            windows[0] = windows[0].part(self._given, windows[0].size)
        return {**self._fixed, "windows": [one.to_state() for one in windows], "stream": self._stream.state_dict()}

    def load_state_dict(self, state: State) -> None:
        reader = self._reader
        self._check(expect_state(state, "of"), reader.options())
        occasion = Occasion(expect_int(state, "epoch"), expect_int(state, "repetition"))
        divisions = [Division.from_state(one, reader.parts) for one in expect_list(state, "divisions")]
        windows = [WindowRest.from_state(one) for one in expect_list(state, "windows")]
        if state.get("reader") is None:  # merged of all readers
            leaf = None if state.get("stream") is None else expect_state(state, "stream")
            windows = reader.own_windows(occasion, divisions, windows)
            stream = reader.start(occasion, divisions, leaf)
        else:
            self._check_reader(*reader_of(state))
            stream = reader.start(occasion, divisions)
            stream.load_state_dict(expect_state(state, "stream"))
        self._windows = deque((one, reader.start_window(occasion, divisions, one)) for one in windows)
        self._occasion, self._divisions, self._stream, self._fixed = occasion, divisions, stream, None

    async def aclose(self) -> None:
        for _, samples in self._windows:
            await close_iterator(samples)
        await self._stream.aclose()

    def _check(self, saved: State, present: Mapping[str, object]) -> None:
        different = [name for name in {**present, **saved} if saved.get(name) != present.get(name)]
        if different:
            listed = "; ".join(f"{name} was {saved.get(name)!r}, and is {present.get(name)!r}" for name in different)
            raise StateError(f"the state does not fit this {self._reader.name}: {listed}")

    def _check_reader(self, index: int, readers: Readers) -> None:
        now = self._reader
        if not now.alike and (index, readers) != (now.index, now.readers):
            raise StateError(
                f"the state does not fit this {now.name}: it was saved by reader {index} of {readers.count} "
                f"({readers.ranks} ranks), and this is reader {now.index} of {now.readers.count} ({now.readers.ranks} "
                f"ranks). Readers are ranks, or the workers of ranks in a torch loader. For another number of them, "
                f"merge the states of all ranks by headrace.merge_states"
            )
