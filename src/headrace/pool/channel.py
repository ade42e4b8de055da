"""The wire between the engine and one worker: a Unix socket that carries packed objects as frames.

A frame is a header, the table of buffer extents, the skeleton and the region (see `packing`)::

    ┌ header: skeleton size u32 · number of buffers u32 · region size u64
    ├ table:  for each buffer, offset u64 · size u64
    ├ skeleton
    └ region: the buffers, each at its offset

The worker's side is blocking (`BlockingChannel`), the engine's an asyncio protocol (`EngineChannel`) that reads each
region straight into the memory the batch will live in.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from headrace.pool.packing import Packed, pack, unpack

__all__ = ["BlockingChannel", "EngineChannel"]

_HEADER = struct.Struct("<IIQ")
_EXTENT = struct.Struct("<QQ")
_IOV_MAX = 512  # buffers for one sendmsg; the kernel's limit is 1,024


def _frame(packed: Packed) -> Iterator[bytes | memoryview]:
    """The pieces of a frame, in order, padding included."""
    yield _HEADER.pack(len(packed.skeleton), len(packed.buffers), packed.size)
    yield b"".join(
        _EXTENT.pack(offset, buffer.nbytes) for offset, buffer in zip(packed.offsets, packed.buffers, strict=True)
    )
    yield packed.skeleton
    extents = itertools.pairwise([*packed.offsets, packed.size])
    for (start, end), buffer in zip(extents, packed.buffers, strict=True):
        yield buffer
        yield bytes(end - start - buffer.nbytes)


def _region(size: int) -> memoryview:
    return np.empty(size, dtype=np.uint8).data  # numpy does not clear it; bytearray would


def _parse(body: memoryview, buffer_count: int, region: memoryview) -> Any:
    table = body[: buffer_count * _EXTENT.size]
    buffers = [region[offset : offset + size] for offset, size in _EXTENT.iter_unpack(table)]
    return unpack(body[len(table) :], buffers)


class BlockingChannel:
    """The worker's end: `send` and `receive` block, and `receive` raises EOFError when the engine has gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, obj: Any) -> None:
        """Pack and send `obj`; raises whatever pickling raises before anything is sent."""
        packed = pack(obj)
        pieces = (memoryview(piece).cast("B") for piece in _frame(packed) if len(piece))
        while chunk := list(itertools.islice(pieces, _IOV_MAX)):
            self._send_all(chunk)

    def _send_all(self, pieces: list[memoryview]) -> None:
        while pieces:
            sent = self._sock.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]

    def receive(self) -> Any:
        """The next object."""
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header))
        skeleton_size, buffer_count, region_size = _HEADER.unpack(header)
        body = memoryview(bytearray(buffer_count * _EXTENT.size + skeleton_size))
        self._fill(body)
        region = _region(region_size)
        self._fill(region)
        return _parse(body, buffer_count, region)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            received = self._sock.recv_into(view)
            if not received:
                raise EOFError("the engine has closed the channel")
            view = view[received:]

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class EngineChannel(asyncio.BufferedProtocol):
    """The engine's end; owns the socket once connected.

    Args:
        on_object: called on the loop with each object that arrives, or with the exception that unpacking it raised.
        on_lost: called once, when the worker's end is gone or `close` was called.
    """

    def __init__(self, on_object: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_object = on_object
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._expect_header()

    @classmethod
    async def connect(
        cls, sock: socket.socket, on_object: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> EngineChannel:
        """Take over `sock` on the running loop."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_object, on_lost), sock=sock)
        return channel

    def send(self, packed: Packed) -> None:
        """Send a packed object; the transport buffers what the worker has not yet taken."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.writelines(_frame(packed))

    def close(self) -> None:
        """Close the socket; a waiting worker sees the end and exits."""
        if self._transport is not None:
            self._transport.abort()

    # What follows is asyncio's protocol interface: the loop calls it.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses of asyncio's

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._on_lost()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: D102
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:  # noqa: D102
        self._filled += nbytes
        # A region of no bytes is complete at once, so one update may complete more than one part.
        while self._filled == len(self._target):
            self._advance()

    def _expect_header(self) -> None:
        self._part = "header"
        self._target = memoryview(bytearray(_HEADER.size))
        self._filled = 0

    def _advance(self) -> None:
        if self._part == "header":
            skeleton_size, self._buffer_count, self._region_size = _HEADER.unpack(self._target)
            self._part = "body"
            self._target = memoryview(bytearray(self._buffer_count * _EXTENT.size + skeleton_size))
            self._filled = 0
        elif self._part == "body":
            self._body = self._target
            self._part = "region"
            self._target = _region(self._region_size)
            self._filled = 0
        else:
            body, region = self._body, self._target
            self._expect_header()
            try:
                obj = _parse(body, self._buffer_count, region)
            except BaseException as error:  # user code: __setstate__ of a user's class
                obj = error
            self._on_object(obj)
