"""The wire between the engine and one worker: a Unix socket that carries packed objects as frames.

A frame is a header, a table, the skeleton, and the region (see `packing`) unless that went into a slab::

    ┌ header:   skeleton size u32 · number of buffers u32 · region size u64 · slab u32 · number of returned slabs u32
    ├ table:    for each buffer, offset u64 · size u64; then the numbers of the returned slabs, u32 each
    ├ skeleton
    └ region:   the buffers, each at its offset; only where slab is 0

Slabs go both ways: a fetched sample's bytes to the worker, a batch's tensors to the engine. Their descriptors travel
over a second socket, each before the first frame that speaks of it.

The worker's side is blocking (`BlockingChannel`), the engine's an asyncio protocol (`EngineChannel`) that reads a
region straight into the memory the batch will live in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from headrace.pool.arena import Arena
from headrace.pool.packing import Packed, pack, unpack
from headrace.pool.slabs import Borrower, Lender, Slab

__all__ = ["BlockingChannel", "EngineChannel", "FrameReader", "Header", "Line"]

_HEADER = struct.Struct("<IIQII")
_EXTENT = struct.Struct("<QQ")
_NUMBER = struct.Struct("<I")
_TOGETHER = 64 * 1024  # bytes; more than a region that goes without a slab, so that most frames come in one read
_IOV_MAX = 512  # buffers for one sendmsg; the kernel's limit is 1,024


@dataclass(frozen=True, slots=True)
class Line:
    """One end of a channel: the socket for frames, and the one for descriptors of slabs."""

    frames: socket.socket
    descriptors: socket.socket

    @classmethod
    def pair(cls) -> tuple[Line, Line]:
        """Two connected ends."""
        frames, descriptors = socket.socketpair(), socket.socketpair()
        return cls(frames[0], descriptors[0]), cls(frames[1], descriptors[1])

    def close(self) -> None:
        """Close both sockets."""
        self.frames.close()
        self.descriptors.close()


class _End:
    """What both ends do alike: writing frames, and reading them apart."""

    def __init__(self, line: Line) -> None:
        self.lender = Lender(line.descriptors)
        self.borrower = Borrower(line.descriptors)

    def frame(self, packed: Packed, slab: Slab | None) -> Iterator[bytes | memoryview]:
        """The pieces of a frame, in order, padding included; the region is copied into `slab`, where there is one."""
        if slab is not None:
            _fill(slab, packed)
        yield from self.preamble(packed, 0 if slab is None else slab.number)
        if slab is None:
            yield from _region_pieces(packed)

    def preamble(self, packed: Packed, number: int) -> Iterator[bytes]:
        """A frame up to its region; all of it where the region is in slab `number`."""
        returned = self.borrower.returned()
        yield _HEADER.pack(len(packed.skeleton), len(packed.buffers), packed.size, number, len(returned))
        extents = zip(packed.offsets, packed.buffers, strict=True)
        yield b"".join(
            [
                *(_EXTENT.pack(offset, buffer.nbytes) for offset, buffer in extents),
                *map(_NUMBER.pack, returned),
            ]
        )
        yield packed.skeleton

    def parse(self, header: Header, body: memoryview, region: memoryview) -> Any:
        """The object in a frame; `region` is looked at where there is no slab."""
        table = header.buffers * _EXTENT.size
        returned = table + header.returned * _NUMBER.size
        self.lender.take_back(number for (number,) in _NUMBER.iter_unpack(body[table:returned]))
        if header.slab:
            region = self.borrower.view(header.slab, header.region)
        buffers = [region[offset : offset + size] for offset, size in _EXTENT.iter_unpack(body[:table])]
        return unpack(body[returned:], buffers)


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed beginning of a frame."""

    skeleton: int
    buffers: int
    region: int
    slab: int
    returned: int

    @property
    def body(self) -> int:
        """The size of table and skeleton, in bytes."""
        return self.buffers * _EXTENT.size + self.returned * _NUMBER.size + self.skeleton

    @property
    def in_band(self) -> int:
        """The size of the region that follows on the socket, in bytes."""
        return 0 if self.slab else self.region


def _region_pieces(packed: Packed) -> Iterator[bytes | memoryview]:
    end = 0
    # Where an arena was in use and did not suffice, its buffers' offsets are not in the order of the buffers.
    for offset, buffer in sorted(zip(packed.offsets, packed.buffers, strict=True), key=lambda extent: extent[0]):
        yield bytes(offset - end)
        yield buffer
        end = offset + buffer.nbytes
    yield bytes(packed.size - end)


def _fill(slab: Slab, packed: Packed) -> None:
    for offset, buffer, placed in zip(packed.offsets, packed.buffers, packed.placed, strict=True):
        if not placed:
            slab.memory[offset : offset + buffer.nbytes] = buffer


def _region(size: int) -> memoryview:
    return np.empty(size, dtype=np.uint8).data  # numpy does not clear it; bytearray would


class BlockingChannel:
    """The worker's end: `send` and `receive` block, and `receive` raises EOFError when the engine has gone.

    Attributes:
        arena: where the next answer may be made, so that `send` need not copy it.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._end = _End(line)
        self._reader = FrameReader(self._end)
        self._arrived: deque[Any] = deque()
        self.arena = Arena(self._end.lender)

    def send(self, obj: Any) -> None:
        """Pack and send `obj`; raises whatever pickling raises before anything is sent."""
        self.send_packed(pack(obj, self.arena))

    def send_packed(self, packed: Packed) -> None:
        """Send a packed object."""
        slab = self.arena.finish(packed.size) if packed.size else None
        if slab is None:  # nothing was made in the arena, or more than it holds
            packed.placed[:] = [False] * len(packed.placed)
            slab = self._end.lender.lend(packed.size)
        pieces = (memoryview(piece).cast("B") for piece in self._end.frame(packed, slab) if len(piece))
        while chunk := list(itertools.islice(pieces, _IOV_MAX)):
            self._send_all(chunk)
        self.arena.abandon()

    def _send_all(self, pieces: list[memoryview]) -> None:
        while pieces:
            sent = self._line.frames.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]

    def receive(self) -> Any:
        """The next object; raises what unpacking it raises."""
        while not self._arrived:
            self._read(0)
        obj = self._arrived.popleft()
        if isinstance(obj, BaseException):
            raise obj
        return obj

    def receive_ready(self) -> Iterator[Any]:
        """The objects that have arrived, without waiting, or what unpacking one raised; EOFError as `receive`."""
        with contextlib.suppress(BlockingIOError):
            while self._read(socket.MSG_DONTWAIT):
                pass
        while self._arrived:
            yield self._arrived.popleft()

    def _read(self, flags: int) -> bool:
        """Read once; whether there may be more."""
        buffer = self._reader.buffer
        count = self._line.frames.recv_into(buffer, 0, flags)
        if not count:
            raise EOFError("the engine has closed the channel")
        self._arrived.extend(self._reader.advance(count))
        return count == len(buffer)

    def close(self) -> None:
        """Close the channel; the socket for descriptors stays open as long as what came in slabs is in use."""
        self._line.frames.close()
        self._end.borrower.close()


class FrameReader:
    """Reads frames apart as bytes come in, however they come: fill `buffer`, then call `advance`.

    Small frames are read together, into one buffer. A part that has not come in whole gets memory of its own, so that a
    large region is read straight into the memory that its views will keep.

    Args:
        end: this end of the channel.
    """

    def __init__(self, end: _End) -> None:
        self._end = end
        self._together = memoryview(bytearray(_TOGETHER))
        self._memory = self._together
        self._start = self._filled = 0  # what has come in and was not looked at
        self._part, self._size = "header", _HEADER.size

    @property
    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._memory[self._filled :]

    def advance(self, count: int) -> Iterator[Any]:
        """Take note of `count` bytes in the buffer; gives the objects they complete, or what unpacking one raised."""
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
                    obj = self._end.parse(self._header, self._body, part)
                except BaseException as error:  # user code: __setstate__ of a user's class
                    obj = error
                yield obj
        if self._memory is self._together:
            self._make_room()

    def _taken(self) -> memoryview:
        """The part that is complete. Views of a region live on, so it may not stay where other frames will be read."""
        part = self._memory[self._start : self._start + self._size]
        self._start += self._size
        if self._memory is not self._together:
            self._memory, self._start, self._filled = self._together, 0, 0
        elif self._part == "region":
            part, shared = _region(self._size), part
            part[:] = shared
        return part

    def _make_room(self) -> None:
        """Move what has come of the next part to where there is room for the rest of it."""
        begun = self._memory[self._start : self._filled]
        if self._part != "header":
            self._memory = _region(self._size)
        elif self._start:
            begun = memoryview(bytes(begun))  # it may overlap with where it goes
        self._memory[: len(begun)] = begun
        self._start, self._filled = 0, len(begun)


class EngineChannel(asyncio.BufferedProtocol):
    """The engine's end; owns the line once connected.

    Args:
        line: the two sockets.
        on_object: called on the loop with each object that arrives, or with the exception that unpacking it raised.
        on_lost: called once, when the worker's end is gone or `close` was called.
    """

    def __init__(self, line: Line, on_object: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._line = line
        self._end = _End(line)
        self._on_object = on_object
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(self._end)

    @classmethod
    async def connect(cls, line: Line, on_object: Callable[[Any], None], on_lost: Callable[[], None]) -> EngineChannel:
        """Take over `line` on the running loop."""
        line.frames.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(line, on_object, on_lost), sock=line.frames)
        return channel

    def send(self, packed: Packed) -> None:
        """Send a packed object; the transport buffers what the worker has not yet taken."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        lender = self._end.lender
        passed_on = lender.pass_on(packed.buffers) if packed.size else None
        if passed_on is None:
            self._transport.writelines(self._end.frame(packed, lender.lend(packed.size)))
        else:
            number, offsets = passed_on
            ends = (offset + buffer.nbytes for offset, buffer in zip(offsets, packed.buffers, strict=True))
            self._transport.writelines(self._end.preamble(replace(packed, offsets=offsets, size=max(ends)), number))

    def close(self) -> None:
        """Close the line; a waiting worker sees the end and exits."""
        if self._transport is not None:
            self._transport.abort()

    # What follows is asyncio's protocol interface: the loop calls it.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses of asyncio's

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        if self._end.lender.passes_on:
            # The other end may still look at slabs that are not ours. It closes its socket when it no longer does.
            asyncio.get_running_loop().add_reader(self._line.descriptors, self._on_views_dead)
        else:
            self._line.descriptors.close()
        self._on_lost()

    def _on_views_dead(self) -> None:
        asyncio.get_running_loop().remove_reader(self._line.descriptors)
        self._line.descriptors.close()
        self._end.lender.release()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: D102
        return self._reader.buffer

    def buffer_updated(self, nbytes: int) -> None:  # noqa: D102
        for obj in self._reader.advance(nbytes):
            self._on_object(obj)
