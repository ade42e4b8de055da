"""Channels between processes: a Unix socket that carries pickled messages as frames (see `frames`).

Both ends allocate slabs (recycled shared memory): a fetched sample's bytes for the worker, a batch's tensors for the
engine. Their descriptors are sent over a second socket, each before the first frame that refers to it.

The worker's end blocks (`BlockingChannel`); the engine's is an asyncio protocol (`EngineChannel`) that reads a region
straight into the memory of the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from headrace._core.eventloop.waiting import wait_writable
from headrace._core.transport.allocator import Allocator, Slab
from headrace._core.transport.arena import Arena
from headrace._core.transport.frames import FrameReader, FrameWriter
from headrace._core.transport.mapper import Mapper
from headrace._core.transport.pickling import Message, dump_message, dump_plain

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
        _not_for_forks.update((frames[0], descriptors[0]))
        return cls(frames[0], descriptors[0]), cls(frames[1], descriptors[1])

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


class Disconnected(EOFError):
    """The other end of a channel is closed; no error of user code is one of these."""


class BlockingChannel:
    """The worker's end: `send` and `receive` block.

    Attributes:
        arena: memory for the next message, so that `send` need not copy it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._allocator = Allocator(connection.descriptors)
        self._mapper = Mapper(connection.descriptors)
        self._reader = FrameReader(self._allocator, self._mapper)
        self._writer = FrameWriter(self._allocator, self._mapper)
        self._arrived: deque[object] = deque()
        self._sending = threading.Lock()
        self._between: deque[object] = deque()  # small messages of any thread
        self.arena = Arena(self._allocator)

    def send(self, obj: object) -> None:
        """Pickle and send `obj`; errors of pickling are raised before anything is sent."""
        self.send_message(dump_message(obj, self.arena))

    def send_message(self, packed: Message) -> None:
        slab = self.arena.finish(packed.size) if packed.size else None
        if slab is None:  # nothing was allocated in the arena, or more than it holds
            packed.placed[:] = [False] * len(packed.placed)
            slab = self._allocator.allocate(packed.size)
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
            pieces = [memoryview(piece).cast("B") for piece in self._writer.frame(packed, slab)]
            for first in range(0, len(pieces), _IOV_MAX):
                self._send_all(pieces[first : first + _IOV_MAX])
        except BaseException:  # Ctrl-C, say: the other end must not take later messages for the rest of this one
            with contextlib.suppress(OSError):  # it has closed the connection
                self._connection.frames.shutdown(socket.SHUT_WR)
            raise

    def _send_all(self, pieces: list[memoryview]) -> None:
        while pieces:
            try:
                sent = self._connection.frames.sendmsg(pieces)
            except BlockingIOError:  # full; a wait on uvloop's loop has made the descriptor non-blocking
                wait_writable(self._connection.frames)
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
        buffer = self._reader.buffer
        try:
            count = self._connection.frames.recv_into(buffer, 0, flags)
        except ConnectionResetError:
            count = 0
        if not count:
            raise Disconnected("the other end has closed the channel")
        self._arrived.extend(self._reader.advance(count))
        return count == len(buffer)

    def close(self) -> None:
        """Close the channel; the socket for descriptors stays open while received slabs are in use."""
        self._connection.frames.close()
        self._mapper.close()


class EngineChannel(asyncio.BufferedProtocol):
    """The engine's end; owns the connection once connected.

    Args:
        connection: the two sockets.
        on_object: called on the loop with each object that arrives, or with the error of unpickling it.
        on_lost: called once, when the other end closes or after `close`.
    """

    def __init__(
        self, connection: Connection, on_object: Callable[[object], None], on_lost: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._allocator = Allocator(connection.descriptors)
        mapper = Mapper(connection.descriptors)
        self._reader = FrameReader(self._allocator, mapper)
        self._writer = FrameWriter(self._allocator, mapper)
        self._on_object = on_object
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(
        cls, connection: Connection, on_object: Callable[[object], None], on_lost: Callable[[], None]
    ) -> EngineChannel:
        """A channel on `connection`, on the running loop."""
        connection.frames.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(
            lambda: cls(connection, on_object, on_lost), sock=connection.frames
        )
        return channel

    def send(self, packed: Message) -> None:
        """Send a message; the transport buffers what the worker has not yet read."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        forwarded = self._allocator.forward(packed.buffers) if packed.size else None
        if forwarded is None:
            frame = self._writer.frame(packed, self._allocator.allocate(packed.size))
        else:
            number, offsets = forwarded
            ends = (offset + buffer.nbytes for offset, buffer in zip(offsets, packed.buffers, strict=True))
            frame = self._writer.preamble(packed._replace(offsets=offsets, size=max(ends)), number)
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
        if self._allocator.has_forwarded:
            # The other end may still use slabs of a third process. It closes its socket when it no longer does.
            asyncio.get_running_loop().add_reader(self._connection.descriptors, self._on_views_collected)
        else:
            self._connection.descriptors.close()
        self._on_lost()

    def _on_views_collected(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.descriptors)
        self._connection.descriptors.close()
        self._allocator.release()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer

    def buffer_updated(self, nbytes: int) -> None:
        for obj in self._reader.advance(nbytes):
            self._on_object(obj)
