"""The layer of the server's process that answers as a `Fault` says. `server.py` loads this file by its path."""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import random
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from aiohttp import web

__all__ = ["Misbehaviour"]

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

REMEMBERED = 200_000  # requests; more than any test makes
LINGER_NOT = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Misbehaviour:
    """Wraps what answers well.

    Args:
        bucket: the bucket's name.
        put: stores bytes under a key.
    """

    def __init__(self, bucket: str, put: Callable[[str, bytes], object]) -> None:
        self._root = f"/{bucket}/"
        self._put = put
        self._faults: list[_Active] = []
        self.seen: deque[tuple[float, str, str, str, str]] = deque(maxlen=REMEMBERED)
        """Requests since `set`: when, method, key, range, fault."""
        self.watching = False

    def set(self, faults: list[dict[str, Any]]) -> None:
        """Misbehave so from now on; an empty list behaves."""
        self.watching = True
        self.seen.clear()
        self._faults = [_Active(fault) for fault in faults]

    def layer(self, handle: Handler) -> Handler:
        """What answers, given what answers well."""

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            if not self.watching:
                return await handle(request)
            path, _, query = request.raw_path.partition("?")
            key, method = unquote(path.removeprefix(self._root)), request.method
            if method == "GET" and "list-type=2" in query:
                key, method = request.query.get("prefix", ""), "LIST"
            active = next((fault for fault in self._faults if fault.meets(method, key, request)), None)
            kind = active.kind if active is not None else ""
            self.seen.append((time.monotonic(), method, key, request.headers.get("Range", ""), kind))
            if active is None:
                return await handle(request)
            if kind == "overwrite":
                return await _overwrite(active, request, handle, functools.partial(self._put, key))
            return await _ANSWERS[kind](active, request, handle)

        return answer


class _Active:
    def __init__(self, fault: dict[str, Any]) -> None:
        self.kind: str = fault["kind"]
        self.told = fault
        self._counts: Counter[str] = Counter()
        self._dice = random.Random(1)
        self._tokens = float(fault["at"])
        self._at = self.free_at = time.monotonic()

    def meets(self, method: str, key: str, request: web.BaseRequest) -> bool:
        told = self.told
        if method != told["method"] or not fnmatch.fnmatchcase(key, told["key"]):
            return False
        if told["unless"] is not None and request.headers.get(told["unless"][0]) == told["unless"][1]:
            return False
        if told["share"] < 1.0 and self._dice.random() >= told["share"]:
            return False
        name = key if told["per_key"] else ""
        number = self._counts[name]
        self._counts[name] += 1
        if number < told["skip"]:
            return False
        if told["times"] is not None and number >= told["skip"] + told["times"]:
            return False
        return self.kind != "throttle" or self._is_over(told["rate"], float(told["at"]))

    def _is_over(self, rate: float, depth: float) -> bool:
        now = time.monotonic()
        self._tokens = min(depth, self._tokens + (now - self._at) * rate)
        self._at = now
        if self._tokens < 1.0:
            return True
        self._tokens -= 1.0
        return False


async def _good(active: _Active, request: web.BaseRequest, handle: Handler) -> web.Response:
    """The answer as it should be, its body in memory and not yet sent."""
    answer = await handle(request)
    assert isinstance(answer, web.Response)
    if not active.told["etag"]:
        answer.headers.popall("ETag", None)
    return answer


def _body(answer: web.Response) -> bytes:
    assert isinstance(answer.body, bytes)
    return answer.body


async def _begin(answer: web.Response, request: web.BaseRequest) -> tuple[web.StreamResponse, bytes]:
    """The head of the answer, sent; and the body that it has promised."""
    body = _body(answer)
    stream = web.StreamResponse(status=answer.status, headers=answer.headers)
    stream.content_length = len(body)
    await stream.prepare(request)
    return stream, body


def _hang_up(request: web.BaseRequest, *, reset: bool) -> None:
    transport = request.transport
    if transport is None:
        return
    if reset:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        transport.abort()
    else:
        transport.close()


async def _status(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    told = active.told
    return web.Response(status=told["status"], headers=told["headers"], text=told["body"])


async def _cut(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    stream, body = await _begin(await _good(active, request, handle), request)
    await stream.write(body[: active.told["at"]])
    if active.kind == "reset":
        await asyncio.sleep(0.02)  # until the client has what came before: a reset takes back what it has not read
    _hang_up(request, reset=active.kind == "reset")
    return stream


async def _overwrite(
    active: _Active, request: web.BaseRequest, handle: Handler, put: Callable[[bytes], object]
) -> web.StreamResponse:
    answer = await _good(active, request, handle)
    put(active.told["body"].encode())
    stream, body = await _begin(answer, request)
    await stream.write(body[: active.told["at"]])
    _hang_up(request, reset=False)
    return stream


async def _refuse(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    _hang_up(request, reset=True)
    return web.Response()


async def _silence(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _trickle(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    stream, body = await _begin(await _good(active, request, handle), request)
    piece = -(-len(body) // 10) or 1
    for start in range(0, len(body), piece):
        await asyncio.sleep(active.told["seconds"])
        await stream.write(body[start : start + piece])
    await stream.write_eof()
    return stream


async def _stall(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    await asyncio.sleep(active.told["seconds"])
    return await _good(active, request, handle)


async def _flip(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    answer = await _good(active, request, handle)
    body = bytearray(_body(answer))
    body[active.told["at"]] ^= 1
    answer.body = bytes(body)
    return answer


async def _whole(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    headers = request.headers.copy()
    headers.popall("Range", None)
    return await _good(active, request.clone(headers=headers), handle)


async def _shorten(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    answer = await _good(active, request, handle)
    answer.body = _body(answer)[:-1]
    return answer


async def _misplaced(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    answer = await _good(active, request, handle)
    unit, _, rest = answer.headers["Content-Range"].partition(" ")
    span, _, size = rest.partition("/")
    first, last = map(int, span.split("-"))
    answer.headers["Content-Range"] = f"{unit} {first + 1}-{last + 1}/{int(size) + 1}"
    return answer


async def _page(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    answer = await _good(active, request, handle)
    return web.Response(text=active.told["body"], content_type="text/html", headers={"ETag": answer.headers["ETag"]})


async def _redirect(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": active.told["body"]})


async def _hang_up_after(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    stream, body = await _begin(await _good(active, request, handle), request)
    await stream.write(body)
    await stream.write_eof()
    # The client has the whole body and puts the connection back into its pool; then it ends.
    asyncio.get_running_loop().call_later(active.told["seconds"], lambda: _hang_up(request, reset=False))
    return stream


async def _retag(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    headers = request.headers.copy()
    headers.popall("If-Match", None)
    answer = await _good(active, request.clone(headers=headers), handle)
    answer.headers["ETag"] = '"another"'
    return answer


async def _repeat(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    answer = await _good(active, request, handle)
    first, opening, rest = _body(answer).partition(b"<Contents>")
    entries, closing, last = rest.rpartition(b"</Contents>")
    page = opening + entries + closing
    answer.body = first + page + page + last
    return answer


async def _bandwidth(active: _Active, request: web.BaseRequest, handle: Handler) -> web.StreamResponse:
    stream, body = await _begin(await _good(active, request, handle), request)
    for start in range(0, len(body), 65536):
        piece = body[start : start + 65536]
        now = time.monotonic()
        active.free_at = max(active.free_at, now) + len(piece) / active.told["rate"]
        await asyncio.sleep(active.free_at - now)
        await stream.write(piece)
    await stream.write_eof()
    return stream


_ANSWERS: dict[str, Callable[[_Active, web.BaseRequest, Handler], Awaitable[web.StreamResponse]]] = {
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
