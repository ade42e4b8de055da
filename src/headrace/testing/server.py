"""The process behind `ObjectServer`: serves `s3.py`'s bucket on a port, and does what its parent says.

`ObjectServer` starts this file by its path, not with ``-m``, so that the process imports aiohttp and nothing of
headrace: a server is up in a quarter of a second, where importing torch alone takes seconds. Hence no imports from
headrace here, and its two neighbours are loaded by their paths: `s3.py` answers, `misbehaving.py` stands before it.

On stdin comes one line of JSON with the settings, then the objects, each as two little-endian lengths and two
strings of bytes. On stdout goes one line with the port. When stdin ends, because the parent closed it or died, so
does the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import struct
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from aiohttp import web

if TYPE_CHECKING:
    from headrace.testing.s3 import Storehouse

__all__ = ["Handler", "Listener", "main", "read_objects", "serve"]

LENGTHS = struct.Struct("<QQ")
CONTROL = "/_"  # no bucket's name begins with an underscore

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Listener:
    """Listens on a port of the loopback interface, and can go away for a while as a server that is restarted does.

    Args:
        storehouse: what is served.
    """

    def __init__(self, storehouse: Storehouse) -> None:
        self._storehouse = storehouse
        self._misbehaviour = _sibling("misbehaving").Misbehaviour(storehouse.bucket, storehouse.put)
        self._handle: Handler = self._misbehaviour.layer(storehouse.handle)
        self._coming_back: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, on the same port as before."""
        runner = web.ServerRunner(
            web.Server(self._route, access_log=None), shutdown_timeout=0.01
        )  # of zero, aiohttp makes no limit at all
        await runner.setup()
        # Hundreds of fetchers connect at once; the stock backlog of 128 would drop some, for a second each.
        site = web.TCPSite(runner, "127.0.0.1", self.port, backlog=4096, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """End every connection, and listen no more."""
        await self._runner.cleanup()

    async def _go_away(self, seconds: float) -> None:
        await asyncio.sleep(0.05)  # for the answer to whoever asked for this
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
            self._coming_back = asyncio.ensure_future(self._go_away(float(await request.text())))
            return web.Response(status=204)
        return await self._storehouse.control(request)


def _sibling(name: str) -> Any:
    """A module that lies beside this file, loaded by its path as this one was."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def serve(storehouse: Storehouse, until: Coroutine[Any, Any, object]) -> None:
    """Answer on a free port of the loopback interface, tell the port on stdout, and go on until `until` returns."""
    listener = Listener(storehouse)
    await listener.start()
    print(listener.port, flush=True)
    await until
    await listener.stop()


def read_objects(source: BinaryIO, count: int) -> Iterator[tuple[str, bytes]]:
    """The keys and bodies that the parent wrote."""
    for _ in range(count):
        key_length, length = LENGTHS.unpack(source.read(LENGTHS.size))
        yield source.read(key_length).decode(), source.read(length)


async def _end_of(stream: BinaryIO) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
    await reader.read()


def main() -> None:
    """Run the process."""
    # Ctrl-C goes to every process of the terminal; this one ends when its parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.stdin.buffer.readline())
    storehouse: Storehouse = _sibling("s3").Storehouse(settings["bucket"], settings["latency"])
    for key, data in read_objects(sys.stdin.buffer, settings["objects"]):
        storehouse.put(key, data)
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    with contextlib.suppress(ImportError):  # absent, as on Windows: a slower server
        import uvloop

        run = uvloop.run
    run(serve(storehouse, _end_of(sys.stdin.buffer)))


if __name__ == "__main__":
    main()
