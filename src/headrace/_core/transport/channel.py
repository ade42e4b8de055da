"""Channels between processes: a Unix socket that carries pickled messages as frames.

Both ends allocate slabs (recycled shared memory): a fetched sample's bytes for the worker, a batch's tensors for the
engine. Their descriptors are sent over a second socket, each before the first frame that refers to it.

The worker's end blocks (`BlockingChannel`); the engine's is an asyncio protocol (`EngineChannel`). A frame is a header,
a table, the pickle, and the region of its buffers (see `pickling`) unless that is in a slab::

    ┌ header:   pickle size u32 · number of buffers u32 · region size u64 · slab u32 · number of returned slabs u32
    │           · first descriptor u32 · number of descriptors u32
    ├ table:    for each buffer, offset u64 · size u64; then the numbers of the returned slabs, u32 each
    ├ pickle
    └ region:   the buffers, each at its offset; only if slab is 0
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from headrace._core.eventloop.waiting import wait_writable
from headrace._core.transport.log_records import Record
from headrace._core.transport.pickling import Message, dump_message, dump_plain, load_message
from headrace._core.transport.slabs import Allocator, Arena, Mapper, Slab

_HEADER = struct.Struct("<IIQIIII")
_EXTENT = struct.Struct("<QQ")
_NUMBER = struct.Struct("<I")
_JOINED = 16 * 1024  # bytes; a larger pickle is a piece of its own, and is not copied
_BUFFER_SIZE = 64 * 1024  # bytes; more than a region that goes without a slab, so that most frames come in one read
_IOV_MAX = 512  # buffers for one sendmsg; the kernel's limit is 1,024


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a channel: the socket for frames, and the one for descriptors of slabs."""

    frames: socket.socket
    descriptors: socket.socket

    def __post_init__(self) -> None:
        for end in (self.frames, self.descriptors):
            end.setblocking(True)  # whatever `socket.setdefaulttimeout` is

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        """Two connected ends; the first is this process's, and is closed in its forks.

        The other process sees the end only when no copy of the first one is open: not one in a worker that is forked
        for it, nor in those that are forked for other loaders or by the user.
        """
        frames = socket.socketpair()
        try:
            descriptors = socket.socketpair()
        except OSError:
            for end in frames:
                end.close()
            raise
        ours, theirs = cls(frames[0], descriptors[0]), cls(frames[1], descriptors[1])
        ours.keep_from_forks()
        return ours, theirs

    def keep_from_forks(self) -> None:
        """Close this end in forks of this process."""
        _not_for_forks.update((self.frames, self.descriptors))

    def close(self) -> None:
        self.frames.close()
        self.descriptors.close()


_not_for_forks: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_fork() -> None:
    for sock in list(_not_for_forks):
        with contextlib.suppress(OSError):  # it is closed already
            os.close(sock.detach())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


class _Frames:
    """Messages to frames and back, for one end of a channel: to read, fill `buffer`, then call `advance`.

    Small frames are read together, into one buffer. An incomplete part gets memory of its own, so that a large
    region is read straight into the memory that its views will keep.
    """

    def __init__(self, descriptors: socket.socket) -> None:
        self.allocator = Allocator(descriptors)
        self.mapper = Mapper(descriptors)
        self._shared = memoryview(bytearray(_BUFFER_SIZE))
        self._memory = self._shared
        self._start = self._filled = 0  # the range of received bytes that are not yet parsed
        self._part, self._size = "header", _HEADER.size

    def frame(self, packed: Message, slab: Slab | None) -> list[bytes | memoryview]:
        """The pieces of a frame, in order, padding included; the region is copied into `slab` if there is one.

        Raises:
            OSError: the descriptors of the object cannot be sent; nothing of the frame may be sent.
        """
        if slab is not None:
            memory = slab.memory
            for offset, buffer, placed in zip(packed.offsets, packed.buffers, packed.placed, strict=True):
                if not placed:
                    memory[offset : offset + buffer.nbytes] = buffer
            return self.preamble(packed, slab.number)
        pieces = self.preamble(packed, 0)
        if packed.size:
            end = 0
            # If an arena was used and did not suffice, its buffers' offsets are not in the order of the buffers.
            for offset, buffer in sorted(
                zip(packed.offsets, packed.buffers, strict=True), key=lambda extent: extent[0]
            ):
                if offset > end:
                    pieces.append(bytes(offset - end))
                pieces.append(buffer)
                end = offset + buffer.nbytes
            if packed.size > end:
                pieces.append(bytes(packed.size - end))
        return pieces

    def preamble(self, packed: Message, number: int) -> list[bytes | memoryview]:
        """A frame up to its region; all of it if the region is in slab `number`. Raises as `frame` does."""
        count = len(packed.descriptors)
        first = self.allocator.send_descriptors(packed.descriptors) if count else 0
        returned = self.mapper.returned()
        sizes = len(packed.pickled), len(packed.buffers), packed.size
        head = [_HEADER.pack(*sizes, number, len(returned), first, count)]
        for offset, buffer in zip(packed.offsets, packed.buffers, strict=True):
            head.append(_EXTENT.pack(offset, buffer.nbytes))
        head += map(_NUMBER.pack, returned)
        if len(packed.pickled) <= _JOINED:
            return [b"".join([*head, packed.pickled])]
        return [b"".join(head), packed.pickled]

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
                self._header = _HEADER.unpack(part)
                pickled, buffers, region, slab, returned, _, _ = self._header
                self._part = "body"
                self._size = buffers * _EXTENT.size + returned * _NUMBER.size + pickled
                self._in_band = 0 if slab else region
            elif self._part == "body":
                self._body = part
                self._part, self._size = "region", self._in_band
            else:
                self._part, self._size = "header", _HEADER.size
                try:
                    obj = self._parse(self._body, part)
                    if type(obj) is Record:
                        obj.handle()
                        continue
                except BaseException as error:  # user code: __setstate__ of a user's class; or no memory for a slab
                    obj = error
                yield obj
        if self._memory is self._shared:  # move an incomplete part to memory that has room for the rest of it
            begun = self._memory[self._start : self._filled]
            if self._part != "header":
                self._memory = np.empty(self._size, dtype=np.uint8).data
            elif self._start:
                begun = memoryview(bytes(begun))  # it may overlap with where it goes
            self._memory[: len(begun)] = begun
            self._start, self._filled = 0, len(begun)

    def _taken(self) -> memoryview:
        """The part that is complete. A region is copied out of the shared buffer: its views outlive the next read."""
        part = self._memory[self._start : self._start + self._size]
        self._start += self._size
        if self._memory is not self._shared:
            self._memory, self._start, self._filled = self._shared, 0, 0
        elif self._part == "region":
            part, shared = np.empty(self._size, dtype=np.uint8).data, part  # numpy does not clear it
            part[:] = shared
        return part

    def _parse(self, body: memoryview, region: memoryview) -> object:
        """The object in a frame; `region` is used if there is no slab."""
        _, buffers, size, slab, returned, first, count = self._header
        table = buffers * _EXTENT.size
        begin = table + returned * _NUMBER.size
        if returned:
            self.allocator.free(number for (number,) in _NUMBER.iter_unpack(body[table:begin]))
        if slab:
            region = self.mapper.view(slab, size)
        views = [region[offset : offset + length] for offset, length in _EXTENT.iter_unpack(body[:table])]
        descriptors = self.mapper.take_descriptors(first, count) if count else ()
        return load_message(body[begin:], views, descriptors)


class Disconnected(EOFError):
    """The other end of a channel is closed; no error of user code is one of these."""


class BlockingChannel:
    """The worker's end: `send` and `receive` block.

    Attributes:
        arena: memory for the next message, so that `send` need not copy it.
    """

    def __init__(self, connection: Connection) -> None:
        self._socket = connection.frames
        self._frames = _Frames(connection.descriptors)
        self._arrived: deque[object] = deque()
        self._sending = threading.Lock()
        self._between: deque[object] = deque()  # small messages of any thread
        self.arena = Arena(self._frames.allocator)

    def send(self, obj: object, *, plain: bool = False) -> None:
        """Pickle and send `obj`; errors of pickling are raised before anything is sent."""
        self.send_message(dump_message(obj, self.arena, plain=plain))

    def send_message(self, packed: Message) -> None:
        slab = self.arena.finish(packed.size) if packed.size else None
        if slab is None:  # nothing was allocated in the arena, or more than it holds
            packed.placed[:] = [False] * len(packed.placed)
            slab = self._frames.allocator.allocate(packed.size)
        with self._sending:
            self._send_frame(packed, slab)
        self.arena.abandon()
        if self._between:
            self._send_those_between()

    def send_between(self, obj: object) -> None:
        """Send an object of plain values ahead of the next message, or after the one that is being sent.

        From any thread, also from a finalizer that interrupts `send`.
        """
        self._between.append(obj)
        self._send_those_between()

    def _send_those_between(self) -> None:
        while self._between and self._sending.acquire(blocking=False):
            try:
                while self._between:
                    self._send_frame(dump_plain(self._between.popleft()), None)
            except OSError:  # the other end has ended
                self._between.clear()
            finally:
                self._sending.release()

    def _send_frame(self, packed: Message, slab: Slab | None) -> None:
        try:
            pieces = [memoryview(piece).cast("B") for piece in self._frames.frame(packed, slab)]
            for first in range(0, len(pieces), _IOV_MAX):
                self._send_all(pieces[first : first + _IOV_MAX])
        except BaseException:  # Ctrl-C, say: the other end must not take later messages for the rest of this one
            with contextlib.suppress(OSError):  # it has closed the connection
                self._socket.shutdown(socket.SHUT_WR)
            raise

    def _send_all(self, pieces: list[memoryview]) -> None:
        while pieces:
            try:
                sent = self._socket.sendmsg(pieces)
            except BlockingIOError:  # full; a wait on uvloop's loop has made the descriptor non-blocking
                wait_writable(self._socket)
                continue
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]

    def receive(self) -> Any:
        """The next object.

        Raises:
            Disconnected: the other end has closed the channel.
            Exception: the error of unpickling it.
        """
        while not self._arrived:
            self._read(0)
        obj = self._arrived.popleft()
        if isinstance(obj, BaseException):
            raise obj
        return obj

    def receive_ready(self) -> Iterator[Any]:
        """The objects that have arrived, or the errors of unpickling them; does not block."""
        more = True
        while more:
            try:
                more = self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                more = False
            while self._arrived:  # before the next read, which may find the end
                yield self._arrived.popleft()

    def _read(self, flags: int) -> bool:
        """Read once; returns whether there may be more."""
        buffer = self._frames.buffer
        try:
            count = self._socket.recv_into(buffer, 0, flags)
        except ConnectionResetError:
            count = 0
        if not count:
            raise Disconnected("the other end has closed the channel")
        self._arrived.extend(self._frames.advance(count))
        return count == len(buffer)

    def close(self) -> None:
        """Close the channel; the socket for descriptors stays open while received slabs are in use."""
        self._socket.close()
        self._frames.mapper.close()


class EngineChannel(asyncio.BufferedProtocol):
    """The engine's end; owns the connection once connected.

    Args:
        on_object: called on the loop with each object that arrives, or with the error of unpickling it.
        on_lost: called once, when the other end closes or after `close`.
    """

    def __init__(
        self, connection: Connection, on_object: Callable[[object], None], on_lost: Callable[[], None]
    ) -> None:
        connection.keep_from_forks()
        self._connection = connection
        self._frames = _Frames(connection.descriptors)
        self._on_object = on_object
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None

    async def connect(self) -> None:
        """Connect on the running loop."""
        self._connection.frames.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self._connection.frames)

    def send(self, packed: Message) -> None:
        """Send a message; the transport buffers what the worker has not yet read."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        allocator = self._frames.allocator
        forwarded = allocator.forward(packed.buffers) if packed.size else None
        if forwarded is None:
            frame = self._frames.frame(packed, allocator.allocate(packed.size))
        else:
            number, offsets = forwarded
            ends = (offset + buffer.nbytes for offset, buffer in zip(offsets, packed.buffers, strict=True))
            frame = self._frames.preamble(packed._replace(offsets=offsets, size=max(ends)), number)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # of its descriptors: the worker has ended
            self._transport.writelines(frame)

    def close(self) -> None:
        """Close the connection; a waiting worker sees the end and exits."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's protocol interface, called by the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses of asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        if self._frames.allocator.has_forwarded:
            # The other end may still use slabs of a third process. It closes its socket when it no longer does.
            asyncio.get_running_loop().add_reader(self._connection.descriptors, self._on_views_collected)
        else:
            self._connection.descriptors.close()
        self._on_lost()

    def _on_views_collected(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.descriptors)
        self._connection.descriptors.close()
        self._frames.allocator.release()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.buffer

    def buffer_updated(self, nbytes: int) -> None:
        for obj in self._frames.advance(nbytes):
            self._on_object(obj)
