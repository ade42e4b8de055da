"""Programs of other processes that use the same cache folder; each gets a pipe to the test as `wire`.

Run by `tests.faults.peers`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import headrace as hr
from headrace._store.disk_cache import DiskCache


def run_until_killed(main: Coroutine[Any, Any, None], last: int) -> None:
    """Run a coroutine, and die by SIGKILL before the `last`-th C function that the cache calls in any thread."""
    seen = 0

    def trace(frame, event, function):
        nonlocal seen
        if event == "c_call" and frame.f_code.co_filename.endswith("/disk_cache.py"):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(trace)
    sys.setprofile(trace)
    asyncio.run(main, debug=False)
    sys.setprofile(None)


async def read_through(cache, name, fetch):
    """An entry's bytes, which are fetched and cached if they are not there."""
    (data,) = await cache.read_many([name])
    if data is None:
        data = await fetch()
        await cache.write([name], [data])
    return data


def write_until_killed(wire, folder, names, data, max_bytes):
    """Write entries, one and then two together, and die before every third call, each time in a fork of this process.

    Sends the number of the call before which no process died: the write had ended. Folders have
    numbers of calls."""

    async def make_full(cache):
        for other in (b"1" * 16, b"2" * 16):  # so that the write has to make room
            await cache.write([other], [memoryview(bytes(5000))])

    async def main(cache):
        await cache.write(names[:1], [memoryview(data)[:1000]])
        await cache.write(names[1:], [memoryview(data)[:1000]] * 2)

    for last in range(1, 1000, 3):
        if not (pid := os.fork()):
            asyncio.run(make_full(DiskCache(f"{folder}/{last}", max_bytes)), debug=False)
            run_until_killed(main(DiskCache(f"{folder}/{last}", max_bytes)), last)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != -signal.SIGKILL:
            assert status == 0, status
            wire.send(last)
            return


def fetch_for_ever(wire, folder, name):
    """Fetch an entry, which does not end; sends the process id when it has begun."""

    async def fetch():
        wire.send(os.getpid())
        await asyncio.Event().wait()

    asyncio.run(read_through(DiskCache(folder), name, fetch))


def read_objects(wire, store, folder, expected, epochs, cache_options):
    """Read cached objects and check their bytes; sends hits, misses and damaged entries."""
    dataset = hr.ObjectDataset(store).cache(folder, **cache_options)
    wire.send("ready")
    wire.recv()
    with hr.DataLoader(
        dataset, batch_size=3, collate_fn=lambda samples: samples, shuffle=True
    ) as loader:
        for _ in range(epochs):
            for batch in loader:
                for sample in batch:
                    assert bytes(sample.data) == expected[sample.key], sample.key
        counts = loader.stats().requests
    wire.send((counts.cache_hits, counts.cache_misses, counts.cache_damaged))
