"""What is left of a reader's shuffle window, to be given by another reader."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace._core.interface.resumable import State, expect_int, expect_list, expect_state
from headrace._core.shards.redistribution import Readers
from headrace.errors import StateError


@dataclass(frozen=True, slots=True)
class WindowRest:
    """Samples of a shuffle window: it is read again as its reader did, permuted again, and these of it are given.

    Attributes:
        index: number of the reader that had the window.
        readers: the readers at that time.
        divisions: number of divisions of the stream before it.
        start: the first sample to give, in the permuted order.
        stop: the one after the last.
        shuffle: the state of the reader's shuffle buffer.
    """

    index: int
    readers: Readers
    divisions: int
    start: int
    stop: int
    shuffle: State

    @property
    def size(self) -> int:
        """Number of samples to give."""
        return self.stop - self.start

    def part(self, start: int, stop: int) -> WindowRest:
        """A range of these samples."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def to_state(self) -> State:
        """As JSON values."""
        return {
            "reader": [self.index, self.readers.count, self.readers.ranks],
            "divisions": self.divisions,
            "start": self.start,
            "stop": self.stop,
            "shuffle": self.shuffle,
        }

    @classmethod
    def from_state(cls, state: object) -> WindowRest:
        """The reverse of `to_state`.

        Raises:
            StateError: the state is damaged.
        """
        if not isinstance(state, dict):
            raise StateError(f"the state is damaged: {state!r} is no shuffle window")
        index, readers = reader_of(state)
        start, divisions = expect_int(state, "start"), expect_int(state, "divisions")
        return cls(
            index, readers, divisions, start, expect_int(state, "stop", least=start), expect_state(state, "shuffle")
        )


def reader_of(state: State) -> tuple[int, Readers]:
    """The reader of a state: its number, and how many there were.

    Raises:
        StateError: the state is damaged.
    """
    index, count, ranks = (expect_int({"reader": one}, "reader") for one in expect_list(state, "reader", length=3))
    if not index < count or not 0 < ranks <= count:
        raise StateError(f"the state is damaged: reader {index} of {count}, {ranks} ranks")
    return index, Readers(count, ranks)
