"""A joined request that holds up the next batch is made a second time, and its samples come once."""

import asyncio
import threading

import numpy as np
import pytest

import headrace as hr
from headrace._store.ranges import Ranges
from headrace._streams.map_style import RangedDataset, positions
from object_server import Fault, ObjectServer
from tests.servers import store_of

OBJECTS = 200
SLOW = 150  # the object that is under control


class Pairs(RangedDataset):
    """Objects of two samples, each one request. That for one of them does what `give` says, attempt by attempt."""

    def __init__(self, give):
        self.give = give
        self.attempts = 0
        self.ended = []

    def __len__(self):
        return 2 * OBJECTS

    def ranges(self, indices):
        places = positions(indices, len(self))
        return Ranges(places // 2, 4 * (places % 2), 4 * (places % 2) + 4)

    async def read_range(self, number, start, stop, *, index=None):
        data = np.array([2 * number, 2 * number + 1], np.int32).tobytes()[start:stop]
        if number != SLOW or index is not None:
            await asyncio.sleep(0.001)  # latency
            return memoryview(data)
        self.attempts += 1
        attempt = self.attempts
        try:
            await self.give(attempt)
        except asyncio.CancelledError:
            self.ended.append(attempt)
            raise
        return memoryview(data)

    def sample_of(self, index, data):
        return int(np.frombuffer(data, np.int32)[0])


def hedging(dataset):
    return hr.DataLoader(
        dataset,
        batch_size=10,
        hedge="auto",
        placement="thread",
        concurrency=8,
        collate_fn=list,
    )


async def never():
    await asyncio.Event().wait()


def test_when_the_first_attempt_fails_the_second_is_ended_and_each_sample_is_fetched_by_itself(
    engine_loop,
):
    begun = []

    async def give(attempt):
        if attempt == 1:
            begun.append(asyncio.Event())
            await begun[0].wait()
            raise ValueError("the first")
        begun[0].set()
        await never()

    dataset = Pairs(give)
    with hedging(dataset) as loader:
        assert [sample for batch in loader for sample in batch] == list(
            range(2 * OBJECTS)
        )
    assert set(dataset.ended) == set(range(2, dataset.attempts + 1)), (
        "an attempt was left behind"
    )


def test_an_epoch_that_is_left_ends_all_attempts(engine_loop):
    begun = threading.Event()

    async def give(attempt):
        begun.set()
        await never()

    dataset = Pairs(give)
    with hedging(dataset) as loader:
        batches = iter(loader)
        for _ in range(SLOW // 5):
            next(batches)
        assert begun.wait(30)
    assert len(dataset.ended) == dataset.attempts


@pytest.mark.parametrize(
    ("placement", "is_cached"),
    [("thread", False), ("process", True)],
    ids=["plain", "cached"],
)
def test_windows_are_read_together_and_a_request_that_is_never_answered_holds_nobody_up(
    tmp_path, placement, is_cached
):
    tokens = np.arange(1000, dtype=np.uint16)
    with ObjectServer(
        {f"{shard:03}.bin": tokens.tobytes() for shard in range(OBJECTS)}
    ) as server:
        windows = hr.TokenDataset(
            f"{{000..{OBJECTS - 1}}}.bin",
            seq_len=100,
            store=store_of(server, timeout=600.0),
        )
        dataset = windows.cache(tmp_path / "cache") if is_cached else windows
        server.misbehave(Fault("silence", key=f"{SLOW}.bin", times=1))
        options = (
            {"num_workers": 1, "prefetch_factor": 8} if placement == "thread" else {}
        )
        with hr.DataLoader(
            dataset,
            batch_size=20,
            hedge="auto",
            placement=placement,
            concurrency=8,
            **options,
        ) as loader:
            rows = [row for batch in loader for row in batch.tolist()]
            counts = loader.stats().requests
        assert rows == tokens.reshape(10, 100).tolist() * OBJECTS
        assert counts.hedges_won >= 1
        assert (
            OBJECTS < counts.requests <= 1.05 * 1.5 * OBJECTS
        )  # the look-ahead may divide a shard once
        assert counts.hedges <= 0.05 * counts.requests
        assert (counts.cache_misses >= OBJECTS) == is_cached
