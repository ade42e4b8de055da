"""The processes of `ObjectServer`: each serves a bucket on a port, controlled by the program that started it.

`ObjectServer` starts this file by its path, not with ``-m``, so that the process imports aiohttp
and nothing of headrace: it starts in half a second, where importing torch alone takes seconds.
Hence no imports from headrace here, and `s3.py` (the bucket) and `misbehaving.py` (the faults) are
loaded by their paths. This process forks one for each server that is asked for, and ends when its
control socket is closed.

A server's stdin: one line of JSON with the settings, then the objects, each as two little-endian
lengths, key and body. Its stdout: a line with its process id, and one with the port. It ends when
stdin does, because the program closed it or died.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from aiohttp import web

try:
    from uvloop import run
except ImportError:  # asyncio is slower
    from asyncio import run  # type: ignore[assignment]

if TYPE_CHECKING:
    from object_server.s3 import Bucket

__all__ = ["Handler", "Listener", "main", "read_objects", "serve"]

LENGTHS = struct.Struct("<QQ")
CONTROL = "/_"  # no bucket's name begins with an underscore

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Listener:
    """Serves a bucket on a port of the loopback interface; can restart."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._misbehaviour = _sibling("misbehaving").Misbehaviour(bucket.name, bucket.put)
        self._handle: Handler = self._misbehaviour.layer(bucket.handle)
        self._restarting: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, after a restart on the same port."""
        # Not 0, which aiohttp takes for no limit.
        runner = web.ServerRunner(
            web.Server(self._route, access_log=None), shutdown_timeout=0.01
        )
        await runner.setup()
        # Hundreds of fetchers connect at once; the stock backlog of 128 would drop some, for a
        # second each.
        site = web.TCPSite(
            runner, "127.0.0.1", self.port, backlog=4096, reuse_address=True
        )
        await site.start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """Close all connections and stop listening."""
        await self._runner.cleanup()

    async def _restart(self, seconds: float) -> None:
        await asyncio.sleep(0.05)  # until the response to this request is sent
        await self.stop()
        await asyncio.sleep(seconds)
        await self.start()

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.raw_path.startswith(CONTROL):
            return await self._handle(request)
        if request.raw_path == "/_faults" and request.method == "PUT":
            self._misbehaviour.set(json.loads(await request.text()))
            return web.Response(status=204)
        if request.raw_path == "/_seen":
            return web.json_response(list(self._misbehaviour.seen))
        if request.raw_path == "/_restart" and request.method == "PUT":
            self._restarting = asyncio.ensure_future(
                self._restart(float(await request.text()))
            )
            return web.Response(status=204)
        return await self._bucket.control(request)


@functools.cache
def _sibling(name: str) -> Any:
    """Load a module from the folder of this file, by its path."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def serve(bucket: Bucket, until: Coroutine[Any, object, object]) -> None:
    """Serve on a free port of the loopback interface until `until` returns; prints the port."""
    listener = Listener(bucket)
    await listener.start()
    print(listener.port, flush=True)
    await until
    await listener.stop()


def read_objects(source: BinaryIO, count: int) -> Iterator[tuple[str, bytes]]:
    """Read keys and bodies from the parent."""
    for _ in range(count):
        key_length, length = LENGTHS.unpack(source.read(LENGTHS.size))
        yield source.read(key_length).decode(), source.read(length)


async def _end_of(stream: BinaryIO) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), stream
    )
    await reader.read()


def main() -> None:
    """Fork a server for each request on the control socket; returns in the forks, and when the socket is closed."""
    _sibling("s3"), _sibling("misbehaving")
    # Ctrl-C reaches every process of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Servers that have ended are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not request:
                return
            forked = os.fork() == 0
            for number, descriptor in enumerate(descriptors):
                if forked:
                    os.dup2(descriptor, number)
                os.close(descriptor)
            if forked:
                break
    print(os.getpid(), flush=True)
    _serve_bucket()


def _serve_bucket() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    bucket: Bucket = _sibling("s3").Bucket(settings["bucket"], settings["latency"])
    for key, data in read_objects(sys.stdin.buffer, settings["objects"]):
        bucket.put(key, data)
    run(serve(bucket, _end_of(sys.stdin.buffer)))


if __name__ == "__main__":
    main()
