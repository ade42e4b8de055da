"""A bucket in memory with a part of S3's API: GET, HEAD, PUT, DELETE and ListObjectsV2.

Imports nothing of headrace; `server.py` says why.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from aiohttp import web

__all__ = ["Bucket", "StoredObject"]

LAST = chr(sys.maxunicode)  # sorts after every other character


class StoredObject:
    """An object and its response headers."""

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
        self.whole = {
            **self.common,
            "Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}",
        }


class Bucket:
    """The objects, counters, and request handlers.

    Args:
        name: first segment of every object's path.
        latency: seconds before the first byte of a GET of an object, and of a listing.
    """

    def __init__(self, name: str, latency: float) -> None:
        self.name = name
        self.latency = latency
        self.objects: dict[str, StoredObject] = {}
        self._by_path: dict[str, StoredObject] = {}
        self._sorted: list[str] | None = None
        self._counts: Counter[str] = Counter()
        self._in_flight = 0
        self._max_in_flight = 0

    def put(self, key: str, data: bytes) -> StoredObject:
        """Store or replace an object."""
        stored = self.objects[key] = self._by_path[f"/{self.name}/{quote(key)}"] = (
            StoredObject(data)
        )
        self._sorted = None
        return stored

    def delete(self, key: str) -> None:
        """Delete an object; like S3, no error if it does not exist."""
        if self.objects.pop(key, None) is not None:
            del self._by_path[f"/{self.name}/{quote(key)}"]
            self._sorted = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle a client's request."""
        method = request.method
        stored = self._by_path.get(request.raw_path) if method == "GET" else None
        if stored is not None:  # fast path: a GET whose path is quoted as ours
            return await self._get(request, stored)
        bucket, _, key = (
            unquote(request.raw_path.partition("?")[0]).lstrip("/").partition("/")
        )
        if bucket != self.name:
            return _refuse(
                404, "NoSuchBucket", "The specified bucket does not exist", request
            )
        if not key:
            return (
                await self._list(request)
                if method == "GET"
                else _not_implemented(request)
            )
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
        # aiohttp leaves the body of a HEAD out
        return web.Response(body=stored.data, headers=stored.common)

    async def control(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle the parent's request: counters, or a change of latency."""
        if request.raw_path == "/_stats":
            return web.json_response(
                {"requests": self._counts, "max_concurrent": self._max_in_flight}
            )
        if request.raw_path == "/_latency" and request.method == "PUT":
            self.latency = float(await request.text())
            return web.Response(status=204)
        return _not_implemented(request)

    async def _get(
        self, request: web.BaseRequest, stored: StoredObject
    ) -> web.StreamResponse:
        self._counts["GET"] += 1
        self._in_flight += 1
        if self._in_flight > self._max_in_flight:
            self._max_in_flight = self._in_flight
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
            wanted = request.headers.get("If-Match")
            if wanted is not None and wanted not in ("*", stored.etag):
                return _refuse(
                    412,
                    "PreconditionFailed",
                    "At least one of the pre-conditions did not hold",
                    request,
                )
            asked = request.headers.get("Range")
            if asked is None:
                return web.Response(body=stored.data, headers=stored.common)
            size = len(stored.data)
            span = _parse_range(asked, size)
            if span is None:
                return _refuse(
                    416,
                    "InvalidRange",
                    f"The requested range is not satisfiable: {asked}",
                    request,
                )
            start, stop = span
            if start == 0 and stop == size:
                return web.Response(status=206, body=stored.data, headers=stored.whole)
            headers = {
                **stored.common,
                "Content-Range": f"bytes {start}-{stop - 1}/{size}",
            }
            return web.Response(status=206, body=stored.data[start:stop], headers=headers)
        finally:
            self._in_flight -= 1

    async def _put(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        if request.query_string or "aws-chunked" in request.headers.get(
            "Content-Encoding", ""
        ):
            return _not_implemented(request)
        self._counts["PUT"] += 1
        # not request.read(), which takes 1 MiB at most
        stored = self.put(key, await request.content.read())
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
        after = (
            base64.urlsafe_b64decode(token).decode()
            if token
            else query.get("start-after", "")
        )
        limit = min(int(query.get("max-keys", 1000)), 1000)
        found, more = self._page(
            query.get("prefix", ""), query.get("delimiter", ""), after, limit
        )
        spell = quote if query.get("encoding-type") == "url" else escape
        return web.Response(
            body=self._listing(query, found, more, spell), content_type="application/xml"
        )

    def _page(
        self, prefix: str, delimiter: str, after: str, limit: int
    ) -> tuple[Sequence[str], bool]:
        """Keys and, with a delimiter, common prefixes, which end in it; and whether more follow."""
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        keys = self._sorted
        first = bisect.bisect_left(keys, prefix)
        if after:
            # After a common prefix, its keys are skipped.
            last = after + LAST if delimiter and after.endswith(delimiter) else after
            first = max(first, bisect.bisect_right(keys, last))
        found: list[str] = []
        while (
            first < len(keys) and keys[first].startswith(prefix) and len(found) <= limit
        ):
            border = keys[first].find(delimiter, len(prefix)) if delimiter else -1
            found.append(
                keys[first] if border < 0 else keys[first][: border + len(delimiter)]
            )
            first = (
                first + 1 if border < 0 else bisect.bisect_right(keys, found[-1] + LAST)
            )
        return found[:limit], len(found) > limit

    def _listing(
        self,
        query: Mapping[str, str],
        found: Sequence[str],
        more: bool,
        spell: Callable[[str], str],
    ) -> bytes:
        parts = [
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self.name}</Name><Prefix>{spell(query.get('prefix', ''))}</Prefix>"
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
                parts.append(
                    f"<CommonPrefixes><Prefix>{spell(key)}</Prefix></CommonPrefixes>"
                )
                continue
            parts.append(
                f"<Contents><Key>{spell(key)}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(self.objects[key].etag)}</ETag><Size>{len(self.objects[key].data)}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        parts.append("</ListBucketResult>")
        return "".join(parts).encode()


def _parse_range(asked: str, size: int) -> tuple[int, int] | None:
    """``bytes=first-last``, ``bytes=first-`` or ``bytes=-count`` as start and stop; None if not satisfiable."""
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


def _refuse(
    status: int, code: str, message: str, request: web.BaseRequest
) -> web.Response:
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Error><Code>{code}</Code><Message>{escape(message)}</Message>"
        f"<Resource>{escape(request.raw_path)}</Resource></Error>"
    )
    return web.Response(status=status, body=body.encode(), content_type="application/xml")


def _not_implemented(request: web.BaseRequest) -> web.Response:
    what = f"{request.method} {request.raw_path} is not supported by this server"
    return _refuse(501, "NotImplemented", what, request)
