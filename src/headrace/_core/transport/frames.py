"""Frames: messages as bytes on a socket.

A frame is a header, a table, the pickle, and the region of its buffers (see `pickling`) unless that is in a slab::

    ┌ header:   pickle size u32 · number of buffers u32 · region size u64 · slab u32 · number of returned slabs u32
    │           · first descriptor u32 · number of descriptors u32
    ├ table:    for each buffer, offset u64 · size u64; then the numbers of the returned slabs, u32 each
    ├ pickle
    └ region:   the buffers, each at its offset; only if slab is 0
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from headrace._core.transport.allocator import SLABS, SMALLEST, Allocator, Slab
from headrace._core.transport.log_records import Record
from headrace._core.transport.mapper import Mapper
from headrace._core.transport.pickling import Message, load_message

_HEADER = struct.Struct("<IIQIIII")
_EXTENT = struct.Struct("<QQ")
_NUMBER = struct.Struct("<I")
_KEPT = SLABS // 2  # slabs in use here, with which a region without one is for want of a slab
_JOINED = 16 * 1024  # bytes; a larger pickle is a piece of its own, and is not copied
_BUFFER_SIZE = 64 * 1024  # bytes; more than a region that goes without a slab, so that most frames come in one read


class Header(NamedTuple):
    pickled: int
    buffers: int
    region: int
    slab: int
    returned: int
    first_descriptor: int
    descriptors: int

    @property
    def body(self) -> int:
        """The size of table and pickle, in bytes."""
        return self.buffers * _EXTENT.size + self.returned * _NUMBER.size + self.pickled

    @property
    def in_band(self) -> int:
        """The size of the region that follows on the socket, in bytes."""
        return 0 if self.slab else self.region


class RegionError(OSError):
    """An object has arrived without its region, which could not be mapped."""

    def __init__(self, error: OSError, pickled: bytes, buffers: int) -> None:
        super().__init__(error.errno, error.strerror)
        self._pickled = pickled
        self._buffers = buffers

    def __reduce__(self) -> tuple[object, ...]:
        return OSError, self.args

    def obj(self) -> Any:
        """The object, with empty buffers."""
        return load_message(self._pickled, [memoryview(b"")] * self._buffers)


class FrameWriter:
    """Writes frames, and with each the numbers of the slabs that are returned."""

    def __init__(self, allocator: Allocator, mapper: Mapper) -> None:
        self._allocator = allocator
        self._mapper = mapper

    def frame(self, packed: Message, slab: Slab | None) -> list[bytes | memoryview]:
        """The pieces of a frame, in order, padding included; the region is copied into `slab` if there is one.

        Raises:
            OSError: the descriptors of the object cannot be sent; nothing of the frame may be sent.
        """
        if slab is not None:
            _fill(slab, packed)
            return self.preamble(packed, slab.number)
        return [*self.preamble(packed, 0), *_region_pieces(packed)]

    def preamble(self, packed: Message, number: int) -> list[bytes | memoryview]:
        """A frame up to its region; all of it if the region is in slab `number`. Raises as `frame` does."""
        count = len(packed.descriptors)
        first = self._allocator.send_descriptors(packed.descriptors) if count else 0
        returned = self._mapper.returned()
        sizes = len(packed.pickled), len(packed.buffers), packed.size
        extents = zip(packed.offsets, packed.buffers, strict=True)
        head = [
            _HEADER.pack(*sizes, number, len(returned), first, count),
            *(_EXTENT.pack(offset, buffer.nbytes) for offset, buffer in extents),
            *map(_NUMBER.pack, returned),
        ]
        if len(packed.pickled) <= _JOINED:
            return [b"".join([*head, packed.pickled])]
        return [b"".join(head), packed.pickled]


def _region_pieces(packed: Message) -> Iterator[bytes | memoryview]:
    if not packed.size:
        return
    end = 0
    # If an arena was used and did not suffice, its buffers' offsets are not in the order of the buffers.
    for offset, buffer in sorted(zip(packed.offsets, packed.buffers, strict=True), key=lambda extent: extent[0]):
        if offset > end:
            yield bytes(offset - end)
        yield buffer
        end = offset + buffer.nbytes
    if packed.size > end:
        yield bytes(packed.size - end)


def _fill(slab: Slab, packed: Message) -> None:
    for offset, buffer, placed in zip(packed.offsets, packed.buffers, packed.placed, strict=True):
        if not placed:
            slab.memory[offset : offset + buffer.nbytes] = buffer


class SlabShortages:
    """How often, in this process, bytes came without a slab since all were in use here."""

    count = 0


shortages = SlabShortages()


def _region(size: int) -> memoryview:
    return np.empty(size, dtype=np.uint8).data  # numpy does not clear it; bytearray would


class FrameReader:
    """Parses frames from a stream of bytes: fill `buffer`, then call `advance`.

    Small frames are read together, into one buffer. An incomplete part gets memory of its own, so that a large
    region is read straight into the memory that its views will keep.
    """

    def __init__(self, allocator: Allocator, mapper: Mapper) -> None:
        self._allocator = allocator
        self._mapper = mapper
        self._shared = memoryview(bytearray(_BUFFER_SIZE))
        self._memory = self._shared
        self._start = self._filled = 0  # the range of received bytes that are not yet parsed
        self._part, self._size = "header", _HEADER.size

    @property
    def buffer(self) -> memoryview:
        """Memory for the next bytes; never empty."""
        return self._memory[self._filled :]

    def advance(self, count: int) -> Iterator[Any]:
        """Parse `count` more bytes; yields the objects they complete, or the errors of unpickling them."""
        self._filled += count
        while self._filled - self._start >= self._size:
            part = self._taken()
            if self._part == "header":
                self._header = Header(*_HEADER.unpack(part))
                self._part, self._size = "body", self._header.body
            elif self._part == "body":
                self._body = part
                self._part, self._size = "region", self._header.in_band
            else:
                self._part, self._size = "header", _HEADER.size
                try:
                    obj = self._parse(self._header, self._body, part)
                    if type(obj) is Record:
                        obj.handle()
                        continue
                except BaseException as error:  # user code: __setstate__ of a user's class
                    obj = error
                yield obj
        if self._memory is self._shared:
            self._make_room()

    def _taken(self) -> memoryview:
        """The part that is complete. A region is copied out of the shared buffer: its views outlive the next read."""
        part = self._memory[self._start : self._start + self._size]
        self._start += self._size
        if self._memory is not self._shared:
            self._memory, self._start, self._filled = self._shared, 0, 0
        elif self._part == "region":
            part, shared = _region(self._size), part
            part[:] = shared
        return part

    def _make_room(self) -> None:
        """Move an incomplete part to memory that has room for the rest of it."""
        begun = self._memory[self._start : self._filled]
        if self._part != "header":
            self._memory = _region(self._size)
        elif self._start:
            begun = memoryview(bytes(begun))  # it may overlap with where it goes
        self._memory[: len(begun)] = begun
        self._start, self._filled = 0, len(begun)

    def _parse(self, header: Header, body: memoryview, region: memoryview) -> object:
        """The object in a frame; `region` is used if there is no slab."""
        table = header.buffers * _EXTENT.size
        returned = table + header.returned * _NUMBER.size
        self._allocator.free(number for (number,) in _NUMBER.iter_unpack(body[table:returned]))
        if header.slab:
            try:
                region = self._mapper.view(header.slab, header.region)
            except OSError as error:
                raise RegionError(error, bytes(body[returned:]), header.buffers) from None
        elif header.region >= SMALLEST and self._mapper.in_use >= _KEPT:
            shortages.count += 1
        buffers = [region[offset : offset + size] for offset, size in _EXTENT.iter_unpack(body[:table])]
        count = header.descriptors
        descriptors = self._mapper.take_descriptors(header.first_descriptor, count) if count else ()
        return load_message(body[returned:], buffers, descriptors)
