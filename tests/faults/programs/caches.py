"""Programs of other processes that use the same cache folder; each gets a pipe to the test as `wire`.

Run by `tests.faults.peers`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time

import headrace as hr
from headrace._store.disk_cache import DiskCache

COUNT = 80


def data_of(number: int) -> bytes:
    """The bytes of a numbered entry."""
    return random.Random(number).randbytes(20_000 + 1_000 * number)


async def read_through(cache, name, fetch):
    """An entry's bytes, which are fetched and cached if they are not there."""
    (data,) = await cache.read_many([name])
    if data is None:
        data = await fetch()
        await cache.write([name], [data])
    return data


async def read_number(cache, number):
    """A numbered entry's bytes, through the cache."""

    async def fetch():
        return memoryview(data_of(number))

    return await read_through(cache, number.to_bytes(16, "little"), fetch)


def read_for_ever(wire, folder, seed, max_bytes):
    """Read random numbered entries; ends with an error at wrong bytes."""
    source, cache = random.Random(seed), DiskCache(folder, max_bytes)

    async def read():
        while True:
            numbers = source.sample(range(COUNT), 8)
            found = await asyncio.gather(
                *(read_number(cache, number) for number in numbers)
            )
            assert found == [data_of(number) for number in numbers]

    wire.send("ready")
    asyncio.run(read())


def lock_for_ever(wire, database):
    """Hold the lock of writers; sends the process id."""
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    wire.send(os.getpid())
    time.sleep(1000)  # until the test kills this process


def read_objects(wire, store, folder, expected):
    """Read cached objects and check their bytes; sends hits, misses and damaged entries."""
    dataset = hr.ObjectDataset(store).cache(folder)
    wire.send("ready")
    wire.recv()
    with hr.DataLoader(dataset, batch_size=3, collate_fn=list, shuffle=True) as loader:
        for batch in loader:
            for sample in batch:
                assert bytes(sample.data) == expected[f"train/{sample.key}"], sample.key
        counts = loader.stats().requests
    wire.send((counts.cache_hits, counts.cache_misses, counts.cache_damaged))
