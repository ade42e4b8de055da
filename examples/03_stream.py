"""
A stream over TCP
=================

An async iterable over the TCP connection to another process, batched as it arrives.
"""

import asyncio
import contextlib
import json
import threading

import headrace as hr


class Readings(hr.AsyncIterableDataset):
    """JSON lines from a TCP server, until it closes the connection."""

    def __init__(self, host, port):
        self.host, self.port = host, port

    async def __aiter__(self):
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            while line := await reader.readline():
                yield json.loads(line)
        finally:
            writer.close()


async def serve(ready, count):
    """A sensor: it sends `count` readings to each client."""
    done = asyncio.Event()

    async def feed(reader, writer):
        for number in range(count):
            writer.write(
                json.dumps({"sensor": f"s{number % 3}", "value": number / 2}).encode()
                + b"\n"
            )
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    async with await asyncio.start_server(feed, "127.0.0.1", 0) as server:
        ready.append(server.sockets[0].getsockname())
        listening.set()
        await done.wait()


address, listening = [], threading.Event()
sensor = threading.Thread(target=lambda: asyncio.run(serve(address, 10)))
sensor.start()
listening.wait()
with hr.DataLoader(Readings(*address[0]), batch_size=4) as loader:
    for batch in loader:
        print(batch["sensor"], batch["value"].tolist())
sensor.join()
