"""The process behind `ObjectServer`: an object store in memory that speaks enough S3, and plain HTTP.

`ObjectServer` starts this file by its path, not with ``-m``, so that the process imports aiohttp and nothing of
headrace: a server is up in a quarter of a second, where importing torch alone takes seconds. Hence no imports from
    headrace here.

On stdin comes one line of JSON with the settings, then the objects, each as two little-endian lengths and two
strings of bytes. On stdout goes one line with the port. When stdin ends, because the parent closed it or died, so
does the process.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import hashlib
import importlib.util
import json
import re
import signal
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from aiohttp import web

__all__ = ["Handler", "Listener", "StoredObject", "Storehouse", "main", "read_objects", "serve"]

LENGTHS = struct.Struct("<QQ")
LAST = chr(sys.maxunicode)  # behind whatever may follow in a key
CONTROL = "/_"  # no bucket's name begins with an underscore

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class StoredObject:
    """One object with the headers of a GET of the whole, which are made once."""

    __slots__ = ("common", "data", "etag", "modified", "whole")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        self.modified = formatdate(usegmt=True)
        self.common = {
            "ETag": self.etag,
            "Last-Modified": self.modified,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        self.whole = {**self.common, "Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"}


class Storehouse:
    """The bucket, its counters, and the handler that answers for them.

    Args:
        bucket: the bucket's name, the first segment of every object's path.
        latency: seconds before the first byte of a GET of an object, and of a listing.
    """

    def __init__(self, bucket: str, latency: float) -> None:
        self.bucket = bucket
        self.latency = latency
        self.objects: dict[str, StoredObject] = {}
        self._by_path: dict[str, StoredObject] = {}
        self._sorted: list[str] | None = None
        self._counts: Counter[str] = Counter()
        self._in_flight = 0
        self._max_in_flight = 0

    def put(self, key: str, data: bytes) -> StoredObject:
        """Store `data` as `key`, in place of what was there."""
        stored = self.objects[key] = self._by_path[f"/{self.bucket}/{quote(key)}"] = StoredObject(data)
        self._sorted = None
        return stored

    def delete(self, key: str) -> None:
        """Forget `key`; like S3, without complaint if it was not there."""
        if self.objects.pop(key, None) is not None:
            del self._by_path[f"/{self.bucket}/{quote(key)}"]
            self._sorted = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of a client."""
        method = request.method
        stored = self._by_path.get(request.raw_path) if method == "GET" else None
        if stored is not None:  # nearly every request: a GET whose path is spelled as we spell it
            return await self._get(request, stored)
        bucket, _, key = unquote(request.raw_path.partition("?")[0]).lstrip("/").partition("/")
        if bucket != self.bucket:
            return _refuse(404, "NoSuchBucket", "The specified bucket does not exist", request)
        if not key:
            return await self._list(request) if method == "GET" else _not_implemented(request)
        if method == "PUT":
            return await self._put(request, key)
        if method == "DELETE" and not request.query_string:
            self._counts["DELETE"] += 1
            self.delete(key)
            return web.Response(status=204)
        if method not in ("GET", "HEAD"):
            return _not_implemented(request)
        stored = self.objects.get(key)
        if stored is not None and method == "GET":
            return await self._get(request, stored)
        self._counts[method] += 1
        if stored is None:
            return _refuse(404, "NoSuchKey", "The specified key does not exist.", request)
        return web.Response(body=stored.data, headers=stored.common)  # aiohttp leaves the body of a HEAD out

    async def control(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the parent: the counters, or a change of latency."""
        if request.raw_path == "/_stats":
            return web.json_response({"requests": self._counts, "max_concurrent": self._max_in_flight})
        if request.raw_path == "/_latency" and request.method == "PUT":
            self.latency = float(await request.text())
            return web.Response(status=204)
        return _not_implemented(request)

    async def _get(self, request: web.BaseRequest, stored: StoredObject) -> web.StreamResponse:
        self._counts["GET"] += 1
        self._in_flight += 1
        if self._in_flight > self._max_in_flight:
            self._max_in_flight = self._in_flight
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
            wanted = request.headers.get("If-Match")
            if wanted is not None and wanted not in ("*", stored.etag):
                return _refuse(412, "PreconditionFailed", "At least one of the pre-conditions did not hold", request)
            asked = request.headers.get("Range")
            if asked is None:
                return web.Response(body=stored.data, headers=stored.common)
            size = len(stored.data)
            span = _parse_range(asked, size)
            if span is None:
                return _refuse(416, "InvalidRange", f"The requested range is not satisfiable: {asked}", request)
            start, stop = span
            if start == 0 and stop == size:
                return web.Response(status=206, body=stored.data, headers=stored.whole)
            headers = {**stored.common, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
            return web.Response(status=206, body=stored.data[start:stop], headers=headers)
        finally:
            self._in_flight -= 1

    async def _put(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        if request.query_string or "aws-chunked" in request.headers.get("Content-Encoding", ""):
            return _not_implemented(request)
        self._counts["PUT"] += 1
        stored = self.put(key, await request.content.read())  # not request.read(), which takes 1 MiB at most
        return web.Response(headers={"ETag": stored.etag})

    async def _list(self, request: web.BaseRequest) -> web.StreamResponse:
        query = request.query
        if query.get("list-type") != "2":
            return _not_implemented(request)
        self._counts["LIST"] += 1
        self._in_flight += 1
        self._max_in_flight = max(self._max_in_flight, self._in_flight)
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
        finally:
            self._in_flight -= 1
        token = query.get("continuation-token")
        after = base64.urlsafe_b64decode(token).decode() if token else query.get("start-after", "")
        limit = min(int(query.get("max-keys", 1000)), 1000)
        found, more = self._page(query.get("prefix", ""), query.get("delimiter", ""), after, limit)
        spell = quote if query.get("encoding-type") == "url" else escape
        return web.Response(body=self._listing(query, found, more, spell), content_type="application/xml")

    def _page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Sequence[str], bool]:
        """Keys, and with a delimiter common prefixes, which end in it; and whether more follow."""
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        keys = self._sorted
        first = bisect.bisect_left(keys, prefix)
        if after:
            # Behind a common prefix come no keys that begin with it.
            behind = after + LAST if delimiter and after.endswith(delimiter) else after
            first = max(first, bisect.bisect_right(keys, behind))
        found: list[str] = []
        while first < len(keys) and keys[first].startswith(prefix) and len(found) <= limit:
            border = keys[first].find(delimiter, len(prefix)) if delimiter else -1
            found.append(keys[first] if border < 0 else keys[first][: border + len(delimiter)])
            first = first + 1 if border < 0 else bisect.bisect_right(keys, found[-1] + LAST)
        return found[:limit], len(found) > limit

    def _listing(self, query: Any, found: Sequence[str], more: bool, spell: Callable[[str], str]) -> bytes:
        parts = [
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self.bucket}</Name><Prefix>{spell(query.get('prefix', ''))}</Prefix>"
            f"<KeyCount>{len(found)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
        ]
        if spell is quote:
            parts.append("<EncodingType>url</EncodingType>")
        if more:
            token = base64.urlsafe_b64encode(found[-1].encode()).decode()
            parts.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
        delimiter = query.get("delimiter", "")
        for key in found:
            if delimiter and delimiter in key[len(query.get("prefix", "")) :]:
                parts.append(f"<CommonPrefixes><Prefix>{spell(key)}</Prefix></CommonPrefixes>")
                continue
            parts.append(
                f"<Contents><Key>{spell(key)}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(self.objects[key].etag)}</ETag><Size>{len(self.objects[key].data)}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        parts.append("</ListBucketResult>")
        return "".join(parts).encode()


def _parse_range(asked: str, size: int) -> tuple[int, int] | None:
    """``bytes=first-last``, ``bytes=first-`` or ``bytes=-count`` as start and stop; None if nothing is there."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if match is None:
        return None
    first, last = match.groups()
    if first:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    elif last:
        start, stop = max(size - int(last), 0), size
    else:
        return None
    return (start, stop) if start < stop else None


def _refuse(status: int, code: str, message: str, request: web.BaseRequest) -> web.Response:
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Error><Code>{code}</Code><Message>{escape(message)}</Message>"
        f"<Resource>{escape(request.raw_path)}</Resource></Error>"
    )
    return web.Response(status=status, body=body.encode(), content_type="application/xml")


def _not_implemented(request: web.BaseRequest) -> web.Response:
    what = f"{request.method} {request.raw_path} is not something this server does"
    return _refuse(501, "NotImplemented", what, request)


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
    storehouse = Storehouse(settings["bucket"], settings["latency"])
    for key, data in read_objects(sys.stdin.buffer, settings["objects"]):
        storehouse.put(key, data)
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        run = uvloop.run
    run(serve(storehouse, _end_of(sys.stdin.buffer)))


if __name__ == "__main__":
    main()
