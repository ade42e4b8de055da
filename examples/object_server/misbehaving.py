"""Middleware of the server's process that injects faults. `server.py` loads this file by its path."""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import random
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from aiohttp import web

__all__ = ["Misbehaviour"]

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_SEEN = 200_000  # requests; more than any test makes
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


class Misbehaviour:
    """Faults around a handler; `put` stores bytes under a key."""

    def __init__(self, bucket: str, put: Callable[[str, bytes], object]) -> None:
        self._root = f"/{bucket}/"
        self._put = put
        self._faults: list[_Active] = []
        self.seen: deque[tuple[float, str, str, str, str]] = deque(maxlen=MAX_SEEN)
        """Requests since `set`: time, method, key, range, fault."""
        self.watching = False

    def set(self, faults: Sequence[Mapping[str, object]]) -> None:
        """Replace the faults; an empty list injects none."""
        self.watching = True
        self.seen.clear()
        self._faults = [_Active(fault) for fault in faults]

    def layer(self, handle: Handler) -> Handler:
        """The handler with faults around `handle`."""

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            if not self.watching:
                return await handle(request)
            path, _, query = request.raw_path.partition("?")
            key, method = unquote(path.removeprefix(self._root)), request.method
            if method == "GET" and "list-type=2" in query:
                key, method = request.query.get("prefix", ""), "LIST"
            active = next(
                (fault for fault in self._faults if fault.meets(method, key, request)),
                None,
            )
            kind = active.kind if active is not None else ""
            self.seen.append(
                (time.monotonic(), method, key, request.headers.get("Range", ""), kind)
            )
            if active is None:
                return await handle(request)
            if kind == "overwrite":
                return await _overwrite(
                    active, request, handle, functools.partial(self._put, key)
                )
            try:
                return await _FAULTS[kind](active, request, handle)
            except ConnectionResetError:
                # the client has gone; aiohttp would print a traceback for each request
                return web.Response()

        return answer


class _Active:
    def __init__(self, fault: Mapping[str, Any]) -> None:
        self.kind: str = fault["kind"]
        self.fault = fault
        self._counts: Counter[str] = Counter()
        self._random = random.Random(1)
        self._tokens = float(fault["at"])
        self._at = self.free_at = time.monotonic()

    def meets(self, method: str, key: str, request: web.BaseRequest) -> bool:
        fault = self.fault
        if method != fault["method"] or not fnmatch.fnmatchcase(key, fault["key"]):
            return False
        if (
            fault["unless"] is not None
            and request.headers.get(fault["unless"][0]) == fault["unless"][1]
        ):
            return False
        if fault["share"] < 1.0 and self._random.random() >= fault["share"]:
            return False
        name = key if fault["per_key"] else ""
        number = self._counts[name]
        self._counts[name] += 1
        if number < fault["skip"]:
            return False
        if fault["times"] is not None and number >= fault["skip"] + fault["times"]:
            return False
        return self.kind != "throttle" or self._over_rate(
            fault["rate"], float(fault["at"])
        )

    def _over_rate(self, rate: float, depth: float) -> bool:
        now = time.monotonic()
        self._tokens = min(depth, self._tokens + (now - self._at) * rate)
        self._at = now
        if self._tokens < 1.0:
            return True
        self._tokens -= 1.0
        return False


async def _respond(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.Response:
    """The correct response, not yet sent."""
    response = await handle(request)
    assert isinstance(response, web.Response)
    if not active.fault["etag"]:
        response.headers.popall("ETag", None)
    return response


def _body(response: web.Response) -> bytes:
    assert isinstance(response.body, bytes)
    return response.body


async def _send_headers(
    response: web.Response, request: web.BaseRequest
) -> tuple[web.StreamResponse, bytes]:
    """Send the headers; returns the stream and the body that they announce."""
    body = _body(response)
    stream = web.StreamResponse(status=response.status, headers=response.headers)
    stream.content_length = len(body)
    await stream.prepare(request)
    return stream, body


def _hang_up(request: web.BaseRequest, *, reset: bool) -> None:
    transport = request.transport
    if transport is None:
        return
    if reset:
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE
        )
        transport.abort()
    else:
        transport.close()


async def _status(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    fault = active.fault
    return web.Response(
        status=fault["status"], headers=fault["headers"], text=fault["body"]
    )


async def _cut(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    stream, body = await _send_headers(await _respond(active, request, handle), request)
    await stream.write(body[: active.fault["at"]])
    if active.kind == "reset":
        # until the client has read the rest: a reset discards what it has not
        await asyncio.sleep(0.02)
    _hang_up(request, reset=active.kind == "reset")
    return stream


async def _overwrite(
    active: _Active,
    request: web.BaseRequest,
    handle: Handler,
    put: Callable[[bytes], object],
) -> web.StreamResponse:
    response = await _respond(active, request, handle)
    put(active.fault["body"].encode())
    stream, body = await _send_headers(response, request)
    await stream.write(body[: active.fault["at"]])
    _hang_up(request, reset=False)
    return stream


async def _refuse(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    _hang_up(request, reset=True)
    return web.Response()


async def _silence(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _trickle(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    stream, body = await _send_headers(await _respond(active, request, handle), request)
    piece = -(-len(body) // 10) or 1
    for start in range(0, len(body), piece):
        await asyncio.sleep(active.fault["seconds"])
        await stream.write(body[start : start + piece])
    await stream.write_eof()
    return stream


async def _stall(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    await asyncio.sleep(active.fault["seconds"])
    return await _respond(active, request, handle)


async def _flip(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    response = await _respond(active, request, handle)
    body = bytearray(_body(response))
    body[active.fault["at"]] ^= 1
    response.body = bytes(body)
    return response


async def _whole(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    headers = request.headers.copy()
    headers.popall("Range", None)
    return await _respond(active, request.clone(headers=headers), handle)


async def _shorten(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    response = await _respond(active, request, handle)
    response.body = _body(response)[:-1]
    return response


async def _misplaced(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    response = await _respond(active, request, handle)
    unit, _, rest = response.headers["Content-Range"].partition(" ")
    span, _, size = rest.partition("/")
    first, last = map(int, span.split("-"))
    response.headers["Content-Range"] = f"{unit} {first + 1}-{last + 1}/{int(size) + 1}"
    return response


async def _page(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    response = await _respond(active, request, handle)
    return web.Response(
        text=active.fault["body"],
        content_type="text/html",
        headers={"ETag": response.headers["ETag"]},
    )


async def _redirect(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": active.fault["body"]})


async def _hang_up_after(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    stream, body = await _send_headers(await _respond(active, request, handle), request)
    await stream.write(body)
    await stream.write_eof()
    # First the client puts the connection back into its pool.
    asyncio.get_running_loop().call_later(
        active.fault["seconds"], lambda: _hang_up(request, reset=False)
    )
    return stream


async def _retag(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    headers = request.headers.copy()
    headers.popall("If-Match", None)
    response = await _respond(active, request.clone(headers=headers), handle)
    response.headers["ETag"] = '"another"'
    return response


async def _repeat(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    response = await _respond(active, request, handle)
    first, opening, rest = _body(response).partition(b"<Contents>")
    entries, closing, last = rest.rpartition(b"</Contents>")
    page = opening + entries + closing
    response.body = first + page + page + last
    return response


async def _bandwidth(
    active: _Active, request: web.BaseRequest, handle: Handler
) -> web.StreamResponse:
    stream, body = await _send_headers(await _respond(active, request, handle), request)
    for start in range(0, len(body), 65536):
        piece = body[start : start + 65536]
        now = time.monotonic()
        active.free_at = max(active.free_at, now) + len(piece) / active.fault["rate"]
        await asyncio.sleep(active.free_at - now)
        try:
            await stream.write(piece)
        except ConnectionResetError:  # the client has closed it, with requests in flight
            return stream
    await stream.write_eof()
    return stream


_FAULTS: dict[
    str, Callable[[_Active, web.BaseRequest, Handler], Awaitable[web.StreamResponse]]
] = {
    "status": _status,
    "cut": _cut,
    "reset": _cut,
    "refuse": _refuse,
    "silence": _silence,
    "trickle": _trickle,
    "stall": _stall,
    "flip": _flip,
    "whole": _whole,
    "misplaced": _misplaced,
    "shorten": _shorten,
    "page": _page,
    "redirect": _redirect,
    "hang up": _hang_up_after,
    "retag": _retag,
    "repeat": _repeat,
    "throttle": _status,
    "bandwidth": _bandwidth,
}
