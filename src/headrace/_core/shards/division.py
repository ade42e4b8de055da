"""Positions in the parts (shards, row groups) of a stream, and what its readers had left, divided among others.

A merged state has the positions of all readers. Each new reader computes its share from them and the order of the
epoch, by pure functions, so that all compute the same. Parts are dealt whole, in turn; where readers must give equal
numbers of samples, and those of the parts are known, by ranges of samples.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from headrace._core.ranks.distributed import Remainder
from headrace._core.shards.discovery import Shard
from headrace._core.store.head import Head, same_tag
from headrace._core.streams.resumable import State, expect
from headrace.errors import StateError

_SAME = ("of", "epoch", "repetition", "divisions")
_ALL = 1 << 53  # more parts than a reader can have: it has read all of its own


@dataclass(frozen=True, slots=True)
class PartPosition:
    """Where a part is read on."""

    part: int  # its number in the user's list
    given: int = 0  # number of its samples that were given out
    drop: int = 0  # how many of them come again after the place where the decoder starts
    decoder: State | None = None  # ``{"offset": …}`` in unpacked bytes; None at the start of the part
    size: int | None = None  # bytes of the object, if known
    etag: str | None = None  # its version, if known
    stop: int | None = None  # the reader stops when so many of its samples were given out; None at its end

    def after(self, count: int) -> PartPosition:
        """The position `count` samples later, from the same place."""
        return replace(self, given=self.given + count, drop=self.drop + count)

    def to_state(self, taken: int = 0, head: Head | None = None) -> State:
        """The position `taken` samples later, from the same place, as JSON values; `head` is of the object."""
        state: State = {"part": self.part, "given": self.given + taken, "drop": self.drop + taken}
        if self.decoder is not None:
            state["decoder"] = self.decoder
        size, etag = (self.size, self.etag) if head is None else (head.size, head.etag)
        if size is not None:
            state["size"], state["etag"] = size, etag
        if self.stop is not None:
            state["stop"] = self.stop
        return state

    @classmethod
    def from_state(cls, state: object, parts: int | None = None) -> PartPosition:
        """The reverse of `to_state`, for a stream of `parts` parts, if that is known; checked."""
        state = expect({"position": state}, "position", dict)
        values = {name: expect(state, name, int) for name in ("part", "given", "drop")}
        for name in ("size", "stop"):
            if name in state:
                values[name] = expect(state, name, int)
        decoder = expect(state, "decoder", dict) if "decoder" in state else None
        etag = state.get("etag")
        if (etag is not None and not isinstance(etag, str)) or (parts is not None and values["part"] >= parts):
            raise StateError(f"the state is damaged: {state} is a position in none of {parts} parts")
        position = cls(**values, decoder=decoder, etag=etag)
        if position.drop > position.given or position.given > values.get("stop", position.given):
            raise StateError(f"the state is damaged: {state} is no position")
        return position

    def version_of(self, shard: Shard) -> Shard:
        """`shard` in the version of which the position is; raises `StateError` if it is another now."""
        if self.size is None or not shard.store.if_match:
            return shard
        head = shard.head
        if head is None:
            return replace(shard, head=Head(shard.key, self.size, self.etag))
        if head.size != self.size or not same_tag(self.etag, head.etag):
            raise StateError(
                f"{shard.name} has changed since the state was saved: it had {self.size} bytes and the version "
                f"{self.etag}, and has {head.size} bytes and the version {head.etag}. Start this epoch again, or put "
                f"back the old version"
            )
        return shard


Part = int | PartPosition
"""A part to read: its number for all of it, else a position in it."""


def position_in(part: Part) -> PartPosition:
    """Where the reading of a part starts."""
    return PartPosition(part) if isinstance(part, int) else part


def opened_parts(state: State, count: int | None = None) -> tuple[int, list[PartPosition]]:
    """The number of parts that the reader of a state has opened, and the positions in those that are open."""
    opened = expect(state, "opened", int)
    positions = [PartPosition.from_state(one, count) for one in expect(state, "open", list)]
    if len(positions) > opened:
        raise StateError(f"the state is damaged: {len(positions)} parts are open of {opened} opened")
    return opened, positions


def names_digest(names: Iterable[str]) -> str:
    """Number and short hash of names, to see whether a list of parts is still the same."""
    digest = hashlib.blake2b(digest_size=8)
    count = 0
    for name in names:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
        count += 1
    return f"{count} ({digest.hexdigest()})"


class Readers(NamedTuple):
    """The readers of a stream: its ranks, each of them divided among its workers in a torch loader."""

    number: int
    ranks: int

    def name(self, index: int) -> str:
        if self.number == self.ranks:
            return f"rank {index} of {self.ranks}"
        return f"reader {index} of {self.number}, the workers of {self.ranks} ranks"


@dataclass(frozen=True, slots=True)
class Division:
    """The positions of all readers when what they had left was dealt anew."""

    readers: Readers  # those that were stopped
    opened: tuple[int, ...]  # for each of them, how many of its parts it had opened
    rests: tuple[PartPosition, ...]  # the positions in those that were open

    def to_state(self) -> State:
        rests = [rest.to_state() for rest in self.rests]
        return {"readers": list(self.readers), "opened": list(self.opened), "rests": rests}

    @classmethod
    def from_state(cls, state: object, parts: int) -> Division:
        """The reverse of `to_state`, for a stream of `parts` parts; checked."""
        state = expect({"division": state}, "division", dict)
        readers = Readers(*_ints(state, "readers", length=2))
        if not 0 < readers.ranks <= readers.number:
            raise StateError(f"the state is damaged: {readers}")
        opened = _ints(state, "opened", length=readers.number)
        rests = [PartPosition.from_state(rest, parts) for rest in expect(state, "rests", list)]
        return cls(readers, tuple(opened), tuple(rests))


class Dealt(NamedTuple):
    """What one reader reads."""

    parts: Sequence[Part]  # its parts, in order
    length: int | None  # the number of samples that it must give; None for all that it reads


def deal_parts(
    order: Sequence[int],
    counts: Sequence[int] | None,
    remainder: Remainder,
    divisions: Sequence[Division],
    readers: Readers,
) -> list[Dealt]:
    """What each of `readers` reads after one division or several in succession.

    `order` has the numbers of all parts in the order of the epoch, and `counts` those of the samples in each part.
    """
    place = {part: position for position, part in enumerate(order)}

    def in_order(part: Part) -> tuple[int, int]:
        position = position_in(part)
        return place[position.part], position.given

    first = divisions[0].readers.number
    dealt = [Dealt(order[index::first], None) for index in range(first)]
    for number, division in enumerate(divisions):
        after = divisions[number + 1].readers if number + 1 < len(divisions) else readers
        untouched = [part for own, opened in zip(dealt, division.opened, strict=True) for part in own.parts[opened:]]
        left = [*division.rests, *sorted(untouched, key=in_order)]
        if after.ranks > 1 and remainder != "keep" and counts is not None:
            dealt = list(_deal_samples(left, counts, after.number))
        else:
            dealt = [Dealt(left[index :: after.number], None) for index in range(after.number)]
    return dealt


def _deal_samples(left: Sequence[Part], counts: Sequence[int], readers: int) -> Iterator[Dealt]:
    """Deal ranges of samples of equal length; a part at the border of two ranges is read by both readers.

    The last samples are left out: they are the last reader's, which does not come to them, so that they are there to be
    dealt when the stream is divided again.
    """
    positions = [position_in(part) for part in left]
    sizes = [max(0, (counts[one.part] if one.stop is None else one.stop) - one.given) for one in positions]
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    length = total // readers
    for index in range(readers):
        start = index * length
        stop = total if index == readers - 1 else start + length
        parts: list[Part] = []
        for number in range(bisect_right(ends, start), len(left)):
            size, before = sizes[number], ends[number] - sizes[number]
            first, last = max(0, start - before), min(size, stop - before)
            if first < last:
                cut = replace(positions[number].after(first), stop=positions[number].given + last)
                parts.append(left[number] if (first, last) == (0, size) else cut)
            if ends[number] >= stop:
                break
        yield Dealt(parts, length)


def is_part_state(state: Any) -> bool:
    """Whether a state is that of a reader of a stream of parts."""
    return isinstance(state, Mapping) and state.keys() >= {"of", "divisions"} and state.get("reader") is not None


def reader_of(state: State) -> tuple[int, Readers]:
    """The reader of a state: its number, and how many there were; checked."""
    index, count, ranks = _ints(state, "reader", length=3)
    if not index < count or not 0 < ranks <= count:
        raise StateError(f"the state is damaged: reader {index} of {count}, {ranks} ranks")
    return index, Readers(count, ranks)


def merge_part_states(states: Sequence[State | None]) -> State:
    """Merge the states of the readers of a stream: each reader that loads it continues with its share of what is left.

    The states are of the iterators of all readers at the same time, in order, None where nothing is left; the result is
    the same for each new one. What was in a shuffle buffer is read again from the start of the buffer's window, so that
    up to a buffer of samples of each reader is given again.
    """
    first = next(state for state in states if state is not None)
    of, divisions = expect(first, "of", dict), expect(first, "divisions", list)
    _, readers = reader_of(first)
    for index, state in enumerate(states):
        if state is None:
            continue
        if reader_of(state) != (index, readers._replace(number=len(states))):
            raise StateError(
                f"state {index} of {len(states)} is of reader {state.get('reader')}: merge those of all ranks"
            )
        different = [name for name in _SAME if state.get(name) != first.get(name)]
        if different:
            what = f"{different[0]!r} is {first.get(different[0])!r} and {state.get(different[0])!r}"
            raise StateError(f"the states are not of one stream in one epoch: {what}")
    opened: list[int] = []
    rests: list[PartPosition] = []
    for state in states:
        count, positions = _ALL, list[PartPosition]()
        if state is not None:
            stream = expect(state, "stream", dict)
            if stream.get("operation") == "shuffle":
                stream = expect(stream, "inner", dict)
            if stream.get("operation") == "equal length":
                stream = expect(stream, "inner", dict)
            count, positions = opened_parts(stream)
        opened.append(count)
        rests += positions
    return {
        "of": of,
        "epoch": expect(first, "epoch", int),
        "repetition": expect(first, "repetition", int),
        "divisions": [*divisions, Division(readers, tuple(opened), tuple(rests)).to_state()],
        "reader": None,
    }


def _ints(state: State, name: str, length: int) -> list[int]:
    return [expect({name: value}, name, int) for value in expect(state, name, list, length=length)]
