"""Channels between processes: a Unix socket that carries pickled messages as frames.

Both ends allocate slabs (recycled shared memory): a fetched sample's bytes for the worker, a
batch's tensors for the engine. Their descriptors are sent over a second socket, each before the
first frame that refers to it.

The worker's end blocks (`BlockingChannel`); the engine's is read on its event loop
(`EngineChannel`). A frame is a header, a table, the pickle, and the region of its buffers (see
`pickling`) unless that is in a slab::

    ┌ header:   pickle size u32 · number of buffers u32 · region size u64 · slab u32 · number of
    returned slabs u32 │           · first descriptor u32 · number of descriptors u32 ├ table:
    for each buffer, offset u64 · size u64; then the numbers of the returned slabs, u32 each ├
    pickle
    └ region:   the buffers, each at its offset; only if slab is 0
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
from typing import Any

import numpy as np

from headrace._core.eventloop.waiting import wait_writable
from headrace._core.transport.log_records import Record, unsent_records
from headrace._core.transport.pickling import Message, dump_message, load_message
from headrace._core.transport.slabs import ALIGNMENT, Allocator, Arena, Mapper, aligned

_HEADER = struct.Struct("<IIQIIII")
_EXTENT = struct.Struct("<QQ")
_NUMBER = struct.Struct("<I")
_JOINED = 16 * 1024  # bytes; a larger pickle is a piece of its own, and is not copied
_IOV_MAX = 512  # pieces for one sendmsg; the kernel's limit is 1,024
# bytes; more than a region that goes without a slab, so that most frames come in one read
_BUFFER_SIZE = 64 * 1024


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

        The other process sees the end only when no copy of the first one is open: not one in a
        worker that is forked for it, nor in those that are forked for other loaders or by the user.
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
        with suppress(OSError):  # it is closed already
            os.close(sock.detach())


os.register_at_fork(after_in_child=_close_in_fork)


class Disconnected(EOFError):
    """The other end of a channel is closed; no error of user code is one of these."""


class _Channel:
    """Messages to frames and back, for one end of a channel.

    Small frames are read together, into one buffer. An incomplete one gets memory of its own, so
    that a large region is read straight into the memory that its views will keep.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._socket = connection.frames
        self._allocator = Allocator(connection.descriptors)
        self._mapper = Mapper(connection.descriptors)
        # memory for the next message, so that sending it need not copy it
        self.arena = Arena(self._allocator)
        self._arrived: deque[object] = deque()  # objects, or the errors of unpickling them
        self._shared = memoryview(bytearray(_BUFFER_SIZE))
        self._memory = self._shared
        self._start = self._filled = 0  # the range of received bytes that are not yet parsed
        self._header: tuple[int, ...] | None = None  # of the frame whose rest is read
        self._size = _HEADER.size  # of the header, or the rest

    def _frame(self, message: Message) -> list[memoryview]:
        """The pieces of a frame, in order. Buffers are copied into a slab, except those that the arena has in its own.

        OSError if the descriptors of the object cannot be sent: then nothing of the frame may be
        sent.
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
        if slab is None:  # nothing was allocated in the arena, or more than it holds
            missing = list(zip(offsets, message.buffers, strict=True))
            slab = self._allocator.allocate(end)
        memory = np.empty(end, dtype=np.uint8).data if slab is None else slab.memory
        for offset, buffer in missing:
            memory[offset : offset + buffer.nbytes] = buffer
        if slab is not None:
            return self._preamble(message, slab.number, offsets, end)
        return [*self._preamble(message, 0, offsets, end), memory]

    def _preamble(
        self, message: Message, slab: int, offsets: Sequence[int], size: int
    ) -> list[memoryview]:
        """A frame up to its region; all of it if the region is in slab number `slab`. Raises as `_frame` does."""
        count = len(message.descriptors)
        first = self._allocator.send_descriptors(message.descriptors) if count else 0
        returned = self._mapper.returned()
        sizes = len(message.pickled), len(message.buffers), size
        head = [_HEADER.pack(*sizes, slab, len(returned), first, count)]
        for offset, buffer in zip(offsets, message.buffers, strict=True):
            head.append(_EXTENT.pack(offset, buffer.nbytes))
        head += map(_NUMBER.pack, returned)
        if len(message.pickled) <= _JOINED:
            return [memoryview(b"".join([*head, message.pickled]))]
        return [memoryview(b"".join(head)), memoryview(message.pickled)]

    def _write(self, pieces: list[memoryview]) -> None:
        """Send pieces, and remove from the list what is sent; BlockingIOError if the socket does not take all."""
        while pieces:
            sent = self._socket.sendmsg(pieces[:_IOV_MAX])
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]

    def _read(self, flags: int = 0) -> bool:
        """Read once, and parse; returns whether there may be more. Raises `Disconnected`."""
        buffer = self._memory[self._filled :]
        try:
            count = self._socket.recv_into(buffer, 0, flags)
        except ConnectionResetError:
            count = 0
        if not count:
            raise Disconnected("the other end has closed the channel")
        self._filled += count
        while self._filled - self._start >= self._size:
            part = self._memory[self._start : self._start + self._size]
            self._start += self._size
            if (header := self._header) is None:
                self._header = _HEADER.unpack(part)
                pickled, buffers, size, slab, returned, _, _ = self._header
                # where it begins
                self._region = buffers * _EXTENT.size + returned * _NUMBER.size + pickled
                self._size = self._region + (0 if slab else size)
            else:
                self._header, self._size = None, _HEADER.size
                region = part[self._region :]
                if self._memory is not self._shared:
                    self._memory, self._start, self._filled = self._shared, 0, 0
                elif region:  # its views outlive the next read; numpy does not clear it
                    region, shared = np.empty(len(region), dtype=np.uint8).data, region
                    region[:] = shared
                self._load(header, part[: self._region], region)
        # move an incomplete part to memory that has room for the rest of it
        if self._memory is self._shared:
            begun = self._memory[self._start : self._filled]
            if self._header is not None:
                padding = -self._region % ALIGNMENT
                self._memory = np.empty(padding + self._size, dtype=np.uint8).data[padding:]
            elif self._start:
                begun = memoryview(bytes(begun))  # it may overlap with where it goes
            self._memory[: len(begun)] = begun
            self._start, self._filled = 0, len(begun)
        return count == len(buffer)

    def _load(self, header: tuple[int, ...], body: memoryview, region: memoryview) -> None:
        """Unpickle the object in a frame; `region` is used if there is no slab."""
        _, buffers, size, slab, returned, first, count = header
        table = buffers * _EXTENT.size
        begin = table + returned * _NUMBER.size
        if returned:
            self._allocator.free(number for (number,) in _NUMBER.iter_unpack(body[table:begin]))
        try:
            if slab:
                region = self._mapper.view(slab, size)
            views = [
                region[offset : offset + length]
                for offset, length in _EXTENT.iter_unpack(body[:table])
            ]
            descriptors = self._mapper.take_descriptors(first, count) if count else ()
            obj = load_message(body[begin:], views, descriptors)
            if type(obj) is Record:
                obj.handle()
            else:
                self._arrived.append(obj)
        except BaseException as error:
            # user code: __setstate__ of a user's class; or no memory for a slab
            self._arrived.append(error)


class BlockingChannel(_Channel):
    """The worker's end: `send` and `receive` block."""

    def send(self, obj: object, *, plain: bool = False) -> None:
        """Pickle and send `obj`; errors of pickling are raised before anything is sent."""
        self.send_message(dump_message(obj, plain=plain))

    def send_message(self, message: Message) -> None:
        """Send a message, behind the log records of this process."""
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
                    # a wait on uvloop's loop has made the descriptor non-blocking
                    wait_writable(self._socket)
        except BaseException:
            # Ctrl-C, say: the other end must not take later messages for the rest of this one
            with suppress(OSError):  # it has closed the connection
                self._socket.shutdown(socket.SHUT_WR)
            raise

    def receive(self) -> Any:
        """The next object; raises `Disconnected`, or the error of unpickling it."""
        while not self._arrived:
            self._read()
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

    def close(self) -> None:
        """Close the channel; the socket for descriptors stays open while received slabs are in use."""
        self._socket.close()
        self._mapper.close()


class EngineChannel(_Channel):
    """The engine's end, on the running event loop; owns the connection.

    `on_object` is called with each object that arrives, or with the error of unpickling it;
    `on_lost` once, when the other end closes or by `close`.
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
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._on_readable)

    def send(self, message: Message) -> None:
        """Send a message; what the other end has not room for is kept here."""
        if self._closed:
            return
        forwarded = self._allocator.forward(message.buffers) if message.buffers else None
        frame = self._frame(message) if forwarded is None else self._preamble(message, *forwarded)
        waits = bool(self._unsent)
        self._unsent += frame
        if not waits and not self._sent_all():
            self._loop.add_writer(self._socket, self._on_writable)

    def _sent_all(self) -> bool:
        try:
            self._write(self._unsent)
        except BlockingIOError:
            return False
        except OSError:  # the other end has ended, which is read after the objects that it has sent
            self._unsent.clear()
        return True

    def _on_writable(self) -> None:
        if self._sent_all():
            self._loop.remove_writer(self._socket)

    def receive_rest(self) -> None:
        """Receive what the other end has sent, which has ended."""
        while not self._closed and self._on_readable():
            pass

    def _on_readable(self) -> bool:
        """Read once; returns whether there may be more."""
        more = False
        try:
            more = self._read()
        except BlockingIOError:
            return False
        except Disconnected:
            self.close()
        while self._arrived:
            self._on_object(self._arrived.popleft())
        return more

    def close(self) -> None:
        """Close the connection: a waiting worker sees the end, and exits. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_writer(self._socket)
        self._loop.remove_reader(self._socket)
        self._unsent.clear()
        self._socket.close()
        descriptors = self._connection.descriptors
        if self._allocator.kept:
            # The other end may still use slabs of a third process. It closes its socket when it no
            # longer does.
            self._loop.add_reader(descriptors, self._on_views_collected)
        else:
            descriptors.close()
        self._on_lost()

    def _on_views_collected(self) -> None:
        self._loop.remove_reader(self._connection.descriptors)
        self._connection.descriptors.close()
        self._allocator.kept.clear()
