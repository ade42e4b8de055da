"""A real server that takes so many requests a second, and refuses the others with 429 and Retry-After."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

from aiohttp import web

from headrace._core.eventloop.loop_thread import LoopThread


class BusyApi:
    """A context manager; serves ``/index`` by the index.

    Attributes:
        url: where it is.
        asked: how often it was asked for each index.
        refused: how many requests it refused.
    """

    def __init__(self, per_second, *, burst=1, retry_after="1"):
        self.asked = Counter()
        self.refused = 0
        self._per_second, self._burst = per_second, burst
        self._tokens, self._at = burst, time.monotonic()
        self._headers = {} if retry_after is None else {"Retry-After": retry_after}

    async def _answer(self, request):
        index = request.match_info["index"]
        self.asked[int(index)] += 1
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1:
            self.refused += 1
            return web.Response(status=429, headers=self._headers)
        self._tokens -= 1
        return web.Response(text=index)

    async def _start(self):
        app = web.Application()
        app.router.add_get("/{index}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._loop = LoopThread("busy-api")
        self._stack.callback(self._loop.close, 1.0)
        self._loop.run(self._start())
        self._stack.callback(lambda: self._loop.run(self._runner.cleanup()))
        return self

    def __exit__(self, *_):
        self._stack.close()
