"""Channels between processes: sockets for pickled messages.

A channel carries messages as frames over a Unix socket. Both ends allocate slabs (recycled shared
memory): for the bytes of fetched samples on the way to a worker, and for the tensors of batches on
the way to the engine. A second socket carries the descriptors of slabs. A descriptor is sent before
the first frame that refers to the slab. Between machines, a channel is a TCP connection without
slabs.

The worker's end blocks (`BlockingChannel`). The engine's end is read on the event loop
(`EngineChannel`). The parts of a frame are::

    header:  pickle size u32, number of buffers u32, region size u64, slab u32,
             number of returned slabs u32, first descriptor u32, number of descriptors u32
    table:   offset u64 and size u64 of each buffer, then the u32 numbers of the returned slabs
    pickle
    region:  the buffers, each at the offset in the table; absent if `slab` is not 0

The region (see `pickling`) is in the slab if `slab` is not 0.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace._base.descriptors import Descriptor
from headrace._eventloop.waiting import wait_writable
from headrace._transport.log_records import Record, unsent_records
from headrace._transport.pickling import Message, dump_message, load_message
from headrace._transport.slabs import ALIGNMENT, Allocator, Arena, Mapper, aligned

_HEADER = struct.Struct("<IIQIIII")  # the fields of `_Header`
_EXTENT = struct.Struct("<QQ")
_NUMBER = struct.Struct("<I")
_JOINED = 16 * 1024  # bytes; a larger region is sent without a copy
_PADDING = memoryview(bytes(ALIGNMENT))
_IOV_MAX = 512  # number of pieces in a call of sendmsg; the kernel's limit is 1,024
# In bytes. Larger than a region without a slab: a single read then receives most frames.
_BUFFER_SIZE = 64 * 1024


# A machine that is silent for 25 s is lost. Small messages are sent without a delay.
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_NODELAY": 1,
}


@dataclass(frozen=True, slots=True)
class Connection:
    """An end of a channel: sockets for frames and for descriptors."""

    frames: socket.socket
    descriptors: socket.socket

    def __post_init__(self) -> None:
        for end in (self.frames, self.descriptors):
            end.setblocking(True)  # regardless of `socket.setdefaulttimeout`

    @classmethod
    def between_machines(cls, frames: socket.socket) -> Connection:
        """Return an end of a TCP connection. Descriptors cannot travel, so buffers are sent."""
        frames.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):
                frames.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return cls(frames, frames.dup())

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        """Return two connected ends, for this process and another process.

        Forks of this process close the first end. Otherwise an open copy in a fork would hide the
        closing of the first end from the other process. Such a fork may be a worker, started for
        this channel or for another loader, or a fork made by the user.
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
        _not_for_forks.update((self.frames, self.descriptors))

    def close(self) -> None:
        self.frames.close()
        self.descriptors.close()


_not_for_forks: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_fork() -> None:
    for sock in list(_not_for_forks):
        with suppress(OSError):  # already closed
            os.close(sock.detach())


os.register_at_fork(after_in_child=_close_in_fork)


class _Header(NamedTuple):
    pickled: int  # bytes
    buffers: int
    size: int  # bytes of the region
    slab: int
    returned: int  # number of returned slabs
    first: int  # first descriptor
    descriptors: int  # number of descriptors


class Disconnected(EOFError):
    """The other end of a channel is closed.

    User code never raises this class.
    """


class _Channel:
    """Messages to frames and back, for an end of a channel.

    Small frames are read together into a shared buffer. An incomplete frame gets separate memory: a
    large region is then read straight into the memory of the later views.

    Attributes:
        catch: errors of unpickling that are received in place of the object.
    """

    catch: type[BaseException] = BaseException

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._socket = connection.frames
        self._allocator = Allocator(connection.descriptors)
        self._mapper = Mapper(connection.descriptors)
        # Memory for the next message. Data made in the arena need no copy for sending.
        self.arena = Arena(self._allocator)
        # Received objects, or errors of unpickling.
        self._arrived: deque[object] = deque()
        self._shared = memoryview(bytearray(_BUFFER_SIZE))
        self._memory = self._shared
        self._start = self._filled = 0  # range of received bytes, not yet parsed
        self._header: _Header | None = None  # header of the frame being read
        self._size = _HEADER.size  # size of the header, or of the rest of the frame
        self._closed = False

    def _frame(self, message: Message) -> list[memoryview]:
        """Return the pieces of a frame, in order.

        Buffers are copied into a slab. Buffers in the slab of the arena need no copy.

        Raises:
            OSError: The descriptors of the message cannot be sent. The caller may then send no
                piece of the frame.
        """
        if not message.buffers:
            return self._preamble(message, 0, (), 0)
        arena, end = self.arena, self.arena.used
        offsets, missing = [], []
        for buffer in message.buffers:
            if (offset := arena.offset_of(buffer)) is None:
                offset, end = end, end + aligned(buffer.nbytes)
                missing.append((offset, buffer))
            offsets.append(offset)
        slab = arena.finish(end)
        if slab is None:  # the arena has no slab, or the buffers exceed the slab
            missing = list(zip(offsets, message.buffers, strict=True))
            slab = self._allocator.allocate(end)
        if slab is None:
            return self._whole_frame(message)
        for offset, buffer in missing:
            slab.memory[offset : offset + buffer.nbytes] = buffer
        return self._preamble(message, slab.number, offsets, end)

    def _whole_frame(self, message: Message) -> list[memoryview]:
        """Return the pieces of a frame with the region.

        Large buffers are not copied.
        """
        offsets, end = [], 0
        region: list[memoryview] = []
        for buffer in message.buffers:
            offsets.append(end)
            end += aligned(buffer.nbytes)
            padding = _PADDING[: aligned(buffer.nbytes) - buffer.nbytes]
            region += [piece for piece in (buffer, padding) if piece.nbytes]
        if end <= _JOINED:
            region = [memoryview(b"".join(region))]
        return [*self._preamble(message, 0, offsets, end), *region]

    def _preamble(
        self, message: Message, slab: int, offsets: Sequence[int], size: int
    ) -> list[memoryview]:
        """Return the pieces of a frame before the region.

        If the region is in the slab number `slab`, the pieces are the whole frame. Raises the same
        errors as `_frame`.
        """
        count = len(message.descriptors)
        first = self._allocator.send_descriptors(message.descriptors) if count else 0
        returned = self._mapper.returned()
        sizes = len(message.pickled), len(message.buffers), size
        head = [_HEADER.pack(*sizes, slab, len(returned), first, count)]
        for offset, buffer in zip(offsets, message.buffers, strict=True):
            head.append(_EXTENT.pack(offset, buffer.nbytes))
        head += map(_NUMBER.pack, returned)
        return [memoryview(b"".join(head)), memoryview(message.pickled)]

    def _write(self, pieces: list[memoryview]) -> None:
        """Send pieces, and remove sent pieces from the list.

        Raises:
            BlockingIOError: The socket has no room for the rest.
        """
        while pieces:
            sent = self._socket.sendmsg(pieces[:_IOV_MAX])
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]

    def _read(self, flags: int = 0) -> bool:
        """Read once, and parse the received bytes.

        Returns:
            Whether there may be more to read.

        Raises:
            Disconnected: The other end is closed.
        """
        buffer = self._memory[self._filled :]
        try:
            count = self._socket.recv_into(buffer, 0, flags)
        except (ConnectionResetError, TimeoutError):  # TimeoutError: of a silent machine
            count = 0
        if not count:
            raise Disconnected("the other end has closed the channel")
        self._filled += count
        while self._filled - self._start >= self._size:
            part = self._memory[self._start : self._start + self._size]
            self._start += self._size
            if (header := self._header) is None:
                header = self._header = _Header._make(_HEADER.unpack(part))
                table = header.buffers * _EXTENT.size + header.returned * _NUMBER.size
                # The offset of the region in the frame, after the header.
                self._region = table + header.pickled
                self._size = self._region + (0 if header.slab else header.size)
            else:
                self._header, self._size = None, _HEADER.size
                region = part[self._region :]
                if self._memory is not self._shared:
                    self._memory, self._start, self._filled = self._shared, 0, 0
                elif region:
                    # Views outlive the next read; unlike bytearray, numpy does not clear.
                    region, shared = np.empty(len(region), dtype=np.uint8).data, region
                    region[:] = shared
                self._load(header, part[: self._region], region)
        # Move an incomplete frame to memory with room for the rest of the frame.
        if self._memory is self._shared:
            begun = self._memory[self._start : self._filled]
            if self._header is not None:
                padding = -self._region % ALIGNMENT
                self._memory = np.empty(padding + self._size, dtype=np.uint8).data[
                    padding:
                ]
            elif self._start:
                begun = memoryview(bytes(begun))  # source and destination may overlap
            self._memory[: len(begun)] = begun
            self._start, self._filled = 0, len(begun)
        return count == len(buffer)

    def receive_ready(self) -> Iterator[Any]:
        """Yield the objects received so far, without blocking.

        An error of unpickling is yielded in place of the object.
        """
        more = True
        while more and not self._closed:
            try:
                more = self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                more = False
            while self._arrived:  # before the next read, because the next read may raise
                yield self._arrived.popleft()

    def _load(self, header: _Header, body: memoryview, region: memoryview) -> None:
        """Unpickle the object in a frame.

        `region` is used if there is no slab.
        """
        table = header.buffers * _EXTENT.size
        begin = table + header.returned * _NUMBER.size
        if header.returned:
            self._allocator.free(
                number for (number,) in _NUMBER.iter_unpack(body[table:begin])
            )
        try:
            if header.slab:
                region = self._mapper.view(header.slab, header.size)
            views = [
                region[offset : offset + length]
                for offset, length in _EXTENT.iter_unpack(body[:table])
            ]
            descriptors: Sequence[Descriptor] = ()
            if header.descriptors:
                descriptors = self._mapper.take_descriptors(
                    header.first, header.descriptors
                )
            obj = load_message(body[begin:], views, descriptors)
            if type(obj) is Record:
                obj.handle()
            else:
                self._arrived.append(obj)
        except self.catch as error:
            # user code: __setstate__ of a user's class; or there is no memory for a slab
            self._arrived.append(error)


class BlockingChannel(_Channel):
    """The worker's end: `send` and `receive` block."""

    def send(self, obj: object) -> None:
        """Pickle and send `obj`.

        Pickling errors are raised before anything is sent.
        """
        self.send_message(dump_message(obj))

    def send_message(self, message: Message) -> None:
        """Send the log records of this process, then a message."""
        for record in unsent_records():
            self._send_whole(dump_message(record, plain=True))
        self._send_whole(message)
        self.arena.abandon()

    def _send_whole(self, message: Message) -> None:
        try:
            pieces = self._frame(message)
            while pieces:
                try:
                    self._write(pieces)
                except BlockingIOError:
                    # A wait on an event loop of uvloop has made the descriptor non-blocking.
                    wait_writable(self._socket)
        except BaseException:
            # For example Ctrl-C. The other end must not take a later message for the rest of this
            # frame.
            with suppress(OSError):  # the other end has closed the connection
                self._socket.shutdown(socket.SHUT_WR)
            raise

    def receive(self) -> Any:
        """Return the next object.

        Raises:
            Disconnected: The other end is closed.
            Exception: The object cannot be unpickled.
        """
        while not self._arrived:
            self._read()
        obj = self._arrived.popleft()
        if isinstance(obj, BaseException):
            raise obj
        return obj

    def close(self) -> None:
        """Close the channel.

        The socket for descriptors stays open while received slabs are in use.
        """
        self._socket.close()
        self._mapper.close()


class EngineChannel(_Channel):
    """The engine's end, on the running event loop.

    The channel owns the connection.

    Args:
        connection: The connection.
        on_object: Called with each received object, or with the error of unpickling it.
        on_lost: Called once, after the other end has closed the channel.
    """

    def __init__(
        self,
        connection: Connection,
        on_object: Callable[[object], None],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(connection)
        connection.keep_from_forks()
        self._socket.setblocking(False)
        self._on_object = on_object
        self._on_lost = on_lost
        self._unsent: list[memoryview] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self.receive)

    def send(self, message: Message) -> None:
        """Send a message.

        Bytes without room in the socket are kept and sent later.
        """
        if self._closed:
            return
        forwarded = self._allocator.forward(message.buffers) if message.buffers else None
        frame = (
            self._frame(message)
            if forwarded is None
            else self._preamble(message, *forwarded)
        )
        waits = bool(self._unsent)
        self._unsent += frame
        if not waits and not self._sent_all():
            self._loop.add_writer(self._socket, self._on_writable)

    def _sent_all(self) -> bool:
        try:
            self._write(self._unsent)
        except BlockingIOError:
            return False
        except OSError:
            # The other end has closed; a later read finds the end after all objects.
            self._unsent.clear()
        return True

    def _on_writable(self) -> None:
        if self._sent_all():
            self._loop.remove_writer(self._socket)

    def receive(self) -> None:
        """Receive the objects that have arrived."""
        try:
            for obj in self.receive_ready():
                self._on_object(obj)
        except Disconnected:
            self.close()
            self._on_lost()

    def close(self) -> None:
        """Close the connection.

        A waiting worker reads the end and exits. Further calls do nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_writer(self._socket)
        self._loop.remove_reader(self._socket)
        self._unsent.clear()
        self._socket.close()
        descriptors = self._connection.descriptors
        if self._allocator.kept:
            # The other end may still use forwarded slabs of a third process. Afterwards the other
            # end closes the socket for descriptors.
            self._loop.add_reader(descriptors, self._on_views_collected)
        else:
            descriptors.close()

    def _on_views_collected(self) -> None:
        self._loop.remove_reader(self._connection.descriptors)
        self._connection.descriptors.close()
        self._allocator.kept.clear()
