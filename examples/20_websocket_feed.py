"""
A WebSocket
===========

A feed over a WebSocket as a dataset: shuffled in a buffer, batched as it arrives.

::

    pip install aiohttp
    python examples/20_websocket_feed.py
"""

import asyncio
import json
import threading

from aiohttp import ClientSession, web

import headrace as hr


def quotes_from(url):
    """A stream with a connection per epoch."""

    async def read():
        async with ClientSession() as session, session.ws_connect(url) as feed:
            async for message in feed:
                yield json.loads(message.data)

    return hr.from_async_iterable(read)


async def send(request):
    feed = web.WebSocketResponse()
    await feed.prepare(request)
    for number in range(12):
        await feed.send_json({"symbol": "ABC"[number % 3], "price": 100 + number / 4})
    await feed.close()
    return feed


async def serve(started, stop):
    app = web.Application()
    app.router.add_get("/quotes", send)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    started.append((asyncio.get_running_loop(), stop, runner.addresses[0][1]))
    listening.set()
    await stop.wait()
    await runner.cleanup()


async def exchange():
    await serve(started, asyncio.Event())


started, listening = [], threading.Event()
thread = threading.Thread(target=lambda: asyncio.run(exchange()))
thread.start()
listening.wait()
loop, stop, port = started[0]

quotes = quotes_from(f"http://127.0.0.1:{port}/quotes").shuffle(buffer_size=6, seed=1)
with hr.DataLoader(quotes, batch_size=4) as loader:
    for epoch in range(2):
        for batch in loader:
            print(epoch, batch["symbol"], batch["price"].tolist())

loop.call_soon_threadsafe(stop.set)
thread.join()
