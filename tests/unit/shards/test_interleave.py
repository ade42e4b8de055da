"""Shards are read ahead, in turn, and the next is begun in time; what is in memory is bounded."""

import asyncio
from collections import Counter

import anyio

from headrace._core.shards.discovery import Shard
from headrace._core.shards.reading import Decoder, InterleavedShards, ReadAhead
from headrace._core.store.head import Head, InitialRead

CHUNK = 10
AHEAD = ReadAhead(shards_in_parallel=2, requests_per_shard=3, chunk_bytes=CHUNK)


class Source:
    """Shards of bytes that are their number; requests beyond those that are let through wait."""

    if_match = True

    def __init__(self, sizes):
        self.sizes = sizes
        self.asked = []
        self.open = asyncio.Event()
        self.open.set()

    async def read_start(self, key, stop):
        return InitialRead(await self.read(key, 0, stop), Head(key, self.sizes[key], None))

    async def read(self, key, start, stop, **expected):
        self.asked.append((key, start))
        await self.open.wait()
        return memoryview(bytes([int(key)]) * (min(stop, self.sizes[key]) - start))

    def name(self, key):
        return key

    def stream(self, *, known=False):
        shards = [Shard(self, key, Head(key, size, None) if known else None) for key, size in self.sizes.items()]
        return InterleavedShards(shards, range(len(shards)), lambda shard: Each(), AHEAD)


class Each(Decoder):
    """Every byte is a sample."""

    def __init__(self):
        self.offset = 0

    def feed(self, data):
        self.offset += len(data)
        yield from bytes(data)

    def position(self):
        return {"offset": self.offset}

    def restore(self, position):
        self.offset = position["offset"]

    def finish(self):
        return iter(())


async def settled(source):
    """When nothing more is asked for by itself; a task whose future has a result counts as blocked for a moment."""
    asked = -1
    while asked != len(source.asked):
        asked = len(source.asked)
        for _ in range(10):
            await anyio.wait_all_tasks_blocked()


async def drained(stream):
    return [sample async for sample in stream]


async def test_samples_are_interleaved_and_a_finished_shard_is_replaced():
    source = Source({"0": 3, "1": 1, "2": 4, "3": 1})
    assert await drained(source.stream()) == [0, 1, 0, 2, 0, 2, 3, 2, 2]


async def test_next_shard_is_opened_when_one_is_fully_requested():
    source = Source({"0": 6 * CHUNK, "1": 6 * CHUNK, "2": 6 * CHUNK})
    stream = source.stream(known=True)
    await anext(stream)
    await settled(source)
    assert {key for key, _ in source.asked} == {"0", "1"}
    while ("0", 5 * CHUNK) not in source.asked:
        await anext(stream)
        await settled(source)
    taken = 0
    while not any(key == "2" for key, _ in source.asked):
        await anext(stream)
        await settled(source)
        taken += 1
    assert taken < 2 * CHUNK + 2, "three chunks of each are still to come"
    await stream.aclose()


async def test_standby_shard_reads_two_chunks_until_activated():
    source = Source({"0": 2 * CHUNK, "1": 9 * CHUNK, "2": 9 * CHUNK, "3": 9 * CHUNK})
    stream = source.stream(known=True)
    samples = [await anext(stream)]
    await settled(source)
    assert Counter(key for key, _ in source.asked)["2"] == 2, "one being parsed, and one requested"
    assert "3" not in {key for key, _ in source.asked}
    while 2 not in samples:
        samples.append(await anext(stream))
    await settled(source)
    assert Counter(key for key, _ in source.asked)["2"] >= AHEAD.requests_per_shard + 1
    await stream.aclose()


async def test_closing_a_stream_closes_standby_shards():
    source = Source({"0": CHUNK, "1": CHUNK, "2": 9 * CHUNK, "3": 9 * CHUNK})
    stream = source.stream(known=True)
    await anext(stream)
    source.open.clear()
    await settled(source)
    before = asyncio.all_tasks()
    assert len(before) > 1
    await stream.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
