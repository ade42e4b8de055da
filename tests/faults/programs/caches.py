"""Programs of other processes that use the same cache folder; each gets a pipe to the test as `wire`.

Run by `tests.faults.peers`, whose fork server has imported this module.
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
from headrace._core.cache.disk_cache import DiskCache
from headrace._core.cache.get_many import get_many


def run_until_killed(main: Coroutine[Any, Any, None], last: int) -> int:
    """Run a coroutine, and die by SIGKILL before the `last`-th C function that the cache's modules call, in any thread.

    Returns the number of such calls if there are fewer.
    """
    seen = 0

    def trace(frame, event, function):
        nonlocal seen
        if event == "c_call" and "/headrace/_core/cache/" in frame.f_code.co_filename:
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(trace)
    sys.setprofile(trace)
    asyncio.run(main)
    sys.setprofile(None)
    return seen


def get_until_killed(wire, last, folder, name, data, max_bytes):
    """Get one entry, and die before the `last`-th call."""

    async def fetch():
        return memoryview(data)

    async def main():
        await DiskCache(folder, max_bytes).get(name, fetch, lambda data: data)

    wire.send(run_until_killed(main(), last))


def get_many_until_killed(wire, last, folder, names, bodies, max_bytes):
    """Get several entries together, and die before the `last`-th call."""

    async def read(chosen, others):
        return [memoryview(bodies[position]) for position in chosen]

    async def main():
        async for _ in get_many(DiskCache(folder, max_bytes), names, read, lambda found: found):
            pass

    wire.send(run_until_killed(main(), last))


def fetch_for_ever(wire, folder, name, with_child):
    """Hold the lock of an entry, whose fetch does not end; sends the process id when it is held."""

    async def fetch():
        if with_child and os.fork() == 0:  # inherits every descriptor
            os.read(wire.fileno(), 1)
            os._exit(0)
        wire.send(os.getpid())
        await asyncio.Event().wait()

    asyncio.run(DiskCache(folder).get(name, fetch, lambda data: data))


def fetch_many_for_ever(wire, folder, names):
    """Hold the locks of several entries; sends their number when they are held."""

    async def read(chosen, others):
        wire.send(len(chosen))
        await asyncio.Event().wait()

    async def main():
        async for _ in get_many(DiskCache(folder), names, read, None):
            pass

    asyncio.run(main())


def read_objects(wire, store, folder, expected, epochs, cache_options):
    """Read cached objects and check their bytes; sends hits, misses, waits and damaged entries."""
    dataset = hr.ObjectDataset(store).cache(folder, **cache_options)
    wire.send("ready")
    wire.recv()
    with hr.DataLoader(dataset, batch_size=3, collate_fn=lambda samples: samples, shuffle=True) as loader:
        for _ in range(epochs):
            for batch in loader:
                for sample in batch:
                    assert bytes(sample.data) == expected[sample.key], sample.key
        counts = loader.stats().requests
    wire.send((counts.cache_hits, counts.cache_misses, counts.cache_waits, counts.cache_damaged))


def read_windows(wire, store, folder, seq_len):
    """Read cached windows of the shard "0.bin"; sends them, and hits, misses and damaged entries."""
    dataset = hr.TokenDataset("0.bin", seq_len=seq_len, store=store).cache(folder)
    options = {"num_workers": 1, "prefetch_factor": 10, "concurrency": 8, "placement": "thread", "executor": "thread"}
    with hr.DataLoader(dataset, batch_size=20, **options) as loader:
        wire.send("ready")
        wire.recv()
        windows = [window for batch in loader for window in batch.tolist()]
        counts = loader.stats().requests
    wire.send((windows, counts.cache_hits, counts.cache_misses, counts.cache_damaged))
