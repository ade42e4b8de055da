"""Cached blocks of shards: as few requests as without a cache, in faults too.

The server counts what was fetched, byte by byte.
"""

import pickle

import numpy as np
import pytest
from torch.utils.data import Subset

import headrace as hr
from object_server import Fault, ObjectServer
from tests.faults.test_cache import QUICK, body_of, entries_in, execute
from tests.servers import store_of
from tests.unit.shards import tars

WINDOW = 50  # tokens, of two bytes
COUNT = 400
TOKENS = np.arange(WINDOW * COUNT, dtype=np.uint16)
BLOCK = 10  # windows


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr("headrace.datasets.cached.CACHE_BLOCK", 2 * WINDOW * BLOCK)


@pytest.fixture(scope="module")
def started():
    tar = tars.shard(range(64), bin=body_of)
    with ObjectServer({"0.bin": TOKENS.tobytes(), "0.tar": tar}) as server:
        yield server


def windows(server):
    return hr.TokenDataset(f"{server.url}/0.bin", seq_len=WINDOW, store=store_of(server))


def tar(server):
    return hr.TarDataset.index(f"{server.url}/0.tar", store=store_of(server))


def loader_of(dataset, *, batch_size=20, **more):
    more = {"placement": "thread", "concurrency": 8, "retry": QUICK, **more}
    return hr.DataLoader(
        dataset, batch_size=batch_size, num_workers=1, prefetch_factor=10, **more
    )


def epoch(dataset, **more):
    """The rows of one epoch of windows, and what was counted."""
    with loader_of(dataset, **more) as loader:
        rows = [row for batch in loader for row in batch.tolist()]
        return rows, loader.stats().requests


def rows_of(numbers):
    return [
        TOKENS[number * WINDOW : number * WINDOW + WINDOW].tolist() for number in numbers
    ]


def counted(counts, *names):
    return {name: getattr(counts, f"cache_{name}") for name in names}


def spans(server):
    """From where to where each request since the last `misbehave` has read."""
    found = [seen.span.removeprefix("bytes=").split("-") for seen in server.seen()]
    return sorted((int(start), int(stop) + 1) for start, stop in found)


# As few requests, and each byte once


def test_first_epoch_makes_no_more_requests_than_without_a_cache_and_the_second_none(
    server, folder
):
    expected = rows_of(range(COUNT))
    _, plain = epoch(windows(server))
    cached = windows(server).cache(folder)
    rows, first = epoch(cached)
    assert rows == expected
    assert max(first.requests, plain.requests) < COUNT / 20
    blocks = COUNT // BLOCK
    assert counted(first, "hits", "misses", "damaged") == {
        "hits": 0,
        "misses": blocks,
        "damaged": 0,
    }
    assert entries_in(folder) == blocks
    rows, second = epoch(cached)
    assert rows == expected
    assert second.requests == 0
    assert counted(second, "hits", "misses") == {"hits": blocks, "misses": 0}


def test_only_blocks_that_are_missing_or_damaged_are_fetched_each_once(server, folder):
    cached = windows(server).cache(folder)
    epoch(Subset(cached, range(100, COUNT)))
    server.misbehave()
    rows, counts = epoch(cached)
    assert rows == rows_of(range(COUNT))
    assert counted(counts, "hits", "misses") == {"hits": 30, "misses": 10}
    read = spans(server)
    assert min(start for start, _ in read) == 0
    assert max(stop for _, stop in read) == 100 * WINDOW * 2
    assert sum(stop - start for start, stop in read) == 100 * WINDOW * 2

    folder = folder.with_name("another")
    epoch(Subset(windows(server).cache(folder), range(60)))
    execute(folder, "UPDATE entries SET data = zeroblob(length(data)) WHERE id IN (2, 5)")
    rows, counts = epoch(Subset(windows(server).cache(folder), range(60)))
    assert rows == rows_of(range(60))
    assert counted(counts, "hits", "misses", "damaged") == {
        "hits": 4,
        "misses": 2,
        "damaged": 2,
    }
    assert counts.requests <= 4

    cached = windows(server).cache(folder.with_name("third"))
    numbers = [5, 5, 6, 7, 5, 6] * 20
    server.misbehave()
    rows, _ = epoch(Subset(cached, numbers), batch_size=len(numbers))
    assert rows == rows_of(numbers)
    assert spans(server) == [(0, BLOCK * WINDOW * 2)]


def test_datasets_of_one_shard_share_blocks_and_a_replaced_shard_has_others(folder):
    with ObjectServer({"0.bin": TOKENS.tobytes()}) as server:
        assert epoch(windows(server).cache(folder))[0] == rows_of(range(COUNT))
        store = store_of(server)
        other = hr.TokenDataset(f"{server.url}/0.bin", seq_len=25, stride=7, store=store)
        server.misbehave()
        cached = other.cache(folder)
        for index in (0, 3, len(other) - 1):
            assert cached[index].tolist() == TOKENS[7 * index : 7 * index + 25].tolist()
        assert server.seen() == []
        server.put("0.bin", TOKENS[::-1].tobytes())
        assert (
            epoch(windows(server).cache(folder))[0]
            == TOKENS[::-1].reshape(-1, WINDOW).tolist()
        )
        # The replaced version is still in the cache, and only there.
        assert cached[1].tolist() == TOKENS[7:32].tolist()
        with pytest.raises(hr.errors.ObjectChangedError):
            other[1]


def test_range_after_the_end_of_a_shard_is_an_error(server, folder):
    class Longer(hr.TokenDataset):
        def ranges(self, indices):
            found = super().ranges(indices)
            return found._replace(stops=found.stops + 100)

    url, store = f"{server.url}/0.bin", store_of(server)
    longer = Longer(url, seq_len=WINDOW, store=store)
    for dataset in (longer, longer.cache(folder)):
        with pytest.raises(hr.errors.StoreError):
            dataset[COUNT - 1]


# Faults


def test_damaged_member_is_read_again_without_its_neighbours(server, folder):
    indexed = tar(server)
    cached = indexed.cache(folder)
    _, header, _ = indexed.range(10)
    server.misbehave(Fault("flip", key="0.tar", at=header + 3, times=1))
    with loader_of(cached, batch_size=64, collate_fn=list) as loader:
        samples = next(iter(loader))
    assert [sample["bin"][:4] for sample in samples] == [
        body_of(number)[:4] for number in range(64)
    ]
    # Together; the member; its blocks.
    assert len(server.seen()) == 3
    server.misbehave()
    with loader_of(
        pickle.loads(pickle.dumps(cached)), batch_size=64, collate_fn=list
    ) as loader:
        assert next(iter(loader)) == samples
    assert server.seen() == []


def test_samples_of_a_failed_joined_read_are_fetched_one_by_one_and_cached(
    server, folder
):
    cached = windows(server).cache(folder)
    server.misbehave(Fault("status", key="0.bin", status=403, times=1))
    rows, counts = epoch(Subset(cached, range(20)))
    assert rows == rows_of(range(20))
    assert 2 < counts.requests <= 21
    assert entries_in(folder) == 2


def test_store_that_refuses_is_reported_for_each_sample_and_nothing_is_cached(
    server, folder
):
    cached = windows(server).cache(folder)
    server.misbehave(Fault("status", key="0.bin", status=403))
    with loader_of(Subset(cached, range(20)), on_error="skip", batch_size=5) as loader:
        with pytest.raises(hr.errors.TooManySkippedError):
            list(loader)
        skipped = loader.stats().skipped
    assert sorted(skip.index for skip in skipped) == list(range(20))
    assert all(skip.key == cached.sample_key(skip.index) for skip in skipped)
    assert entries_in(folder) == 0
