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
from headrace._core.store.disk_cache import DiskCache


def run_until_killed(main: Coroutine[Any, Any, None], last: int) -> int:
    """Run a coroutine, and die by SIGKILL before the `last`-th C function that the cache's module calls, in any thread.

    Returns the number of such calls if there are fewer.
    """
    seen = 0

    def trace(frame, event, function):
        nonlocal seen
        if event == "c_call" and frame.f_code.co_filename.endswith("/disk_cache.py"):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(trace)
    sys.setprofile(trace)
    asyncio.run(main)
    sys.setprofile(None)
    return seen


async def read_through(cache, name, fetch):
    """An entry's bytes, which are fetched and cached if they are not there."""
    (data,) = await cache.read_many([name])
    if data is None:
        data = await fetch()
        await cache.write([name], [data])
    return data


def write_until_killed(wire, last, folder, names, data, max_bytes):
    """Write entries, one and then two together, and die before the `last`-th call."""

    async def main():
        cache = DiskCache(folder, max_bytes)
        await cache.write(names[:1], [memoryview(data)[:1000]])
        await cache.write(names[1:], [memoryview(data)[:1000]] * 2)

    wire.send(run_until_killed(main(), last))


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
    with hr.DataLoader(dataset, batch_size=3, collate_fn=lambda samples: samples, shuffle=True) as loader:
        for _ in range(epochs):
            for batch in loader:
                for sample in batch:
                    assert bytes(sample.data) == expected[sample.key], sample.key
        counts = loader.stats().requests
    wire.send((counts.cache_hits, counts.cache_misses, counts.cache_damaged))


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
