"""The parts that readers had left when they were stopped, dealt anew to another number of readers.

Pure functions of the order of the epoch and of states, so that every reader computes the same. Parts are dealt whole in
turn; where readers must give equal numbers of samples and the numbers in the parts are known, by ranges of samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from headrace._core.interface.distributed import Remainder
from headrace._core.interface.resumable import State, expect_int, expect_list
from headrace._core.shards.positions import Part, PartPosition, position_in
from headrace.errors import StateError


@dataclass(frozen=True, slots=True)
class Readers:
    """The readers of a stream: its ranks, each of them divided among its workers in a torch loader."""

    count: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Division:
    """The positions of all readers when what they had left was dealt anew.

    Attributes:
        readers: those that were stopped.
        opened: for each of them, how many of its parts it had opened.
        rests: the positions in those that were open.
        left: samples that they were still to give together, if `samples_per_rank` was declared.
        windows: samples that were left in their shuffle windows.
    """

    readers: Readers
    opened: tuple[int, ...]
    rests: tuple[PartPosition, ...]
    left: int | None
    windows: int

    def to_state(self) -> State:
        """As JSON values."""
        return {
            "readers": self.readers.count,
            "ranks": self.readers.ranks,
            "opened": list(self.opened),
            "rests": [rest.to_state() for rest in self.rests],
            "left": self.left,
            "windows": self.windows,
        }

    @classmethod
    def from_state(cls, state: object, parts: int) -> Division:
        """The reverse of `to_state`, for a stream of `parts` parts.

        Raises:
            StateError: the state is damaged.
        """
        if not isinstance(state, dict):
            raise StateError(f"the state is damaged: {state!r} is no division of a stream")
        readers = Readers(expect_int(state, "readers", least=1), expect_int(state, "ranks", least=1))
        opened = [expect_int({"opened": one}, "opened") for one in expect_list(state, "opened", length=readers.count)]
        rests = [PartPosition.from_state(rest, parts) for rest in expect_list(state, "rests")]
        left = None if state.get("left") is None else expect_int(state, "left")
        return cls(readers, tuple(opened), tuple(rests), left, expect_int(state, "windows"))


@dataclass(frozen=True, slots=True)
class Dealing:
    """How parts are dealt.

    Attributes:
        order: the numbers of all parts in the order of the epoch.
        counts: number of samples in each part, by its number; None if unknown.
        remainder: policy for readers with unequal numbers of samples.
    """

    order: Sequence[int]
    counts: Sequence[int] | None
    remainder: Remainder


@dataclass(frozen=True, slots=True)
class Dealt:
    """What one reader reads.

    Attributes:
        parts: its parts, in order.
        windows: the number of each shuffle window of which it gives samples, the first of them, the one after the last.
        length: the number of samples that it must give after those; None for all that it reads.
    """

    parts: Sequence[Part]
    windows: Sequence[tuple[int, int, int]] = ()
    length: int | None = None


def deal_parts(
    dealing: Dealing, divisions: Sequence[Division], readers: Readers, windows: Sequence[int] | None = None
) -> list[Dealt]:
    """What each of `readers` reads after `divisions`.

    Args:
        dealing: how parts are dealt.
        divisions: one after the other.
        readers: those for which the last division is made.
        windows: samples left in each window then; None if only parts are asked for.
    """
    if not divisions:
        return [Dealt(dealing.order[index :: readers.count]) for index in range(readers.count)]
    first = divisions[0].readers.count
    lists: list[Sequence[Part]] = [dealing.order[index::first] for index in range(first)]
    place = {part: position for position, part in enumerate(dealing.order)}
    dealt: list[Dealt] = []
    following = [division.readers for division in divisions[1:]] + [readers]
    for division, after in zip(divisions, following, strict=True):
        untouched = [
            part for parts, opened in zip(lists, division.opened, strict=True) for part in list(parts)[opened:]
        ]
        untouched.sort(key=lambda part: (place[part], 0) if isinstance(part, int) else (place[part.part], part.given))
        sizes = windows if windows is not None and division is divisions[-1] else (division.windows,)
        dealt = _deal(dealing, [*division.rests, *untouched], sizes, division.left, after)
        lists = [one.parts for one in dealt]
    return dealt


def _deal_windows(windows: Sequence[int], readers: Readers, remainder: Remainder) -> list[list[tuple[int, int, int]]]:
    """For each reader, the ranges of the samples left in windows that it gives."""
    policy = remainder if readers.ranks > 1 else "keep"
    ends = list(accumulate(windows))
    return [list(_cut(ends, *span)) for span in _spans(sum(windows), readers.count, policy)]


def _deal(
    dealing: Dealing, left: Sequence[Part], windows: Sequence[int], declared: int | None, readers: Readers
) -> list[Dealt]:
    equal = readers.ranks > 1 and dealing.remainder != "keep"
    if equal and declared is None and dealing.counts is not None:
        return _deal_samples(dealing.counts, left, windows, readers.count, dealing.remainder)
    lengths: list[int | None] = [None] * readers.count
    dealt_windows = _deal_windows(windows, readers, dealing.remainder)
    if declared is not None:
        total = declared + sum(windows)
        each = total // readers.count if dealing.remainder in ("drop", "keep") else -(-total // readers.count)
        lengths = [each - sum(stop - start for _, start, stop in one) for one in dealt_windows]
    return [Dealt(left[index :: readers.count], dealt_windows[index], lengths[index]) for index in range(readers.count)]


def _deal_samples(
    counts: Sequence[int], left: Sequence[Part], windows: Sequence[int], readers: int, remainder: Remainder
) -> list[Dealt]:
    """Deal ranges of samples, those in windows first; a part at the border of two ranges is read by both readers.

    What ``"drop"`` leaves over at the end is the last reader's, which does not come to it: it is there to be dealt
    when the stream is divided again.
    """
    sizes = [counts[part] if isinstance(part, int) else _size(part, counts) for part in left]
    ends, window_ends = list(accumulate(sizes)), list(accumulate(windows))
    in_windows = sum(windows)
    total = in_windows + sum(sizes)
    dealt: list[Dealt] = []
    for start, stop in _spans(total, readers, remainder):
        first, last = max(0, start - in_windows), max(0, stop - in_windows)
        end = total - in_windows if len(dealt) == readers - 1 else last
        parts = [
            left[number] if (a, b) == (0, sizes[number]) else _range(position_in(left[number]), a, b)
            for number, a, b in _cut(ends, first, end)
        ]
        own = _cut(window_ends, min(start, in_windows), min(stop, in_windows))
        dealt.append(Dealt(parts, list(own), last - first))
    return dealt


def _size(position: PartPosition, counts: Sequence[int]) -> int:
    stop = counts[position.part] if position.stop is None else position.stop
    return max(0, stop - position.given)


def _range(position: PartPosition, start: int, stop: int) -> PartPosition:
    return replace(position.after(start), stop=position.given + stop)


def _spans(total: int, readers: int, remainder: Remainder) -> list[tuple[int, int]]:
    """Ranges of `total` samples, one for each reader.

    Of equal length for ``"drop"``, which leaves out the last samples, and for ``"pad"`` and ``"repeat"``, whose last
    ranges overlap; for ``"keep"`` they may differ by one.
    """
    if remainder == "keep":
        return [(index * total // readers, (index + 1) * total // readers) for index in range(readers)]
    length = total // readers if remainder == "drop" else -(-total // readers)
    starts = (min(index * length, total - length) for index in range(readers))
    return [(start, start + length) for start in starts]


def _cut(ends: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The ranges of items, which end at `ends` one after the other, that make up the range from `start` to `stop`."""
    for number in range(bisect_right(ends, start), len(ends)):
        begin = ends[number - 1] if number else 0
        if begin >= stop:
            return
        first, last = max(start, begin) - begin, min(stop, ends[number]) - begin
        if first < last:
            yield number, first, last
