"""`map` with coroutine functions: rows fetched as tasks of the loader's event loop."""

import asyncio
import functools
import gc
import random
import weakref
from collections import Counter
from typing import ClassVar

import pytest
import torch

import headrace as hr
from tests.datasets import Numbers
from tests.unit.streams.reading import Count


class Rows(Numbers):
    """The rows 0, 1, 2, …"""

    def __init__(self, length=60):
        super().__init__(length)

    def sample_key(self, index):
        return f"row-{index}"


class BatchedRows(Rows):
    """The same, read by one call for each batch."""

    async def agets(self, indices):
        self.calls = getattr(self, "calls", 0) + 1
        return [await self.aget(index) for index in indices]


def row_stream(length=60, bad=()):
    """The same rows as a stream with a state."""
    return Count(length, bad=bad)


class Images:
    """A store that is entered by `fetch`; knows what was fetched, and how many at once."""

    def __init__(self, failing=()):
        self.failing = failing
        self.fetched = []
        self.running = self.most = 0

    async def fetch(self, row):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            # Ends in another order than it began.
            for _ in range(random.randrange(1, 12)):
                await asyncio.sleep(0)
            if row in self.failing:
                raise FileNotFoundError(f"no image of row {row}")
            self.fetched.append(row)
            return row * 10
        finally:
            self.running -= 1


def add_one(sample):
    return sample + 1


async def add(number, sample):
    return sample + number


class AddsTwo:
    async def __call__(self, sample):
        return sample + 2


def divisible_by_four(sample):
    return sample % 4 == 0


def loader_of(dataset, **options):
    return hr.DataLoader(
        dataset, options.pop("batch_size", 4), collate_fn=list, **options
    )


def samples_of(loader):
    return [sample for batch in loader for sample in batch]


DATASETS = {"map-style": Rows, "by batches": BatchedRows, "stream": row_stream}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_concurrency_is_the_number_of_rows_in_flight(make):
    running, full = set(), asyncio.Event()

    async def fetch(row):
        running.add(row)
        if len(running) == 7:
            full.set()
        await full.wait()  # for the seventh row
        assert len(running) <= 7
        await asyncio.sleep(0)
        running.remove(row)
        return row

    with loader_of(make().map(fetch), concurrency=7, memory_budget=None) as loader:
        assert samples_of(loader) == [*range(60)]


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_functions_and_coroutine_functions_of_any_kind_are_applied_in_turn(make):
    mapped = make().map(add_one).map(Images().fetch).map(functools.partial(add, 1))
    with loader_of(mapped.map(AddsTwo()).map(add_one)) as loader:
        assert samples_of(loader) == [10 * (row + 1) + 4 for row in range(60)]


def test_rows_of_blocks_are_read_together_and_fetched_singly():
    rows, images = BatchedRows(), Images()
    with loader_of(rows.map(images.fetch), concurrency=6, batch_size=12) as loader:
        samples_of(loader)
    assert rows.calls == 5
    assert images.most <= 6


def test_other_loaders_and_plain_loops_read_the_same_samples():
    images = Images()
    expected = [10 * row for row in range(60)]
    for make in DATASETS.values():
        plain = torch.utils.data.DataLoader(make().map(images.fetch), 4, collate_fn=list)
        assert samples_of(plain) == expected
    assert list(row_stream().map(images.fetch)) == expected
    assert BatchedRows().map(images.fetch).__getitems__([3, 1]) == [30, 10]


def test_rows_that_are_dropped_or_broken_are_not_fetched():
    images = Images()
    rows = row_stream(bad={8}).filter(divisible_by_four)
    with loader_of(rows.map(images.fetch), on_error="skip") as loader:
        assert samples_of(loader) == [10 * row for row in range(0, 60, 4) if row != 8]
    assert sorted(images.fetched) == [row for row in range(0, 60, 4) if row != 8]


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_an_error_names_row_key_stage_and_function(make):
    images = Images(failing={7})
    missing = pytest.raises(FileNotFoundError, match="no image of row 7")
    with loader_of(make().map(images.fetch)) as loader, missing as caught:
        samples_of(loader)
    notes = "\n".join(caught.value.__notes__)
    assert "map(Images.fetch)" in notes
    assert "fetch" in notes
    assert "7" in notes
    assert make is row_stream or "row-7" in notes


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_skipped_errors_leave_out_the_row_only(make):
    images = Images(failing={7, 8, 30})
    with loader_of(make().map(images.fetch), on_error="skip") as loader:
        assert samples_of(loader) == [
            10 * row for row in range(60) if row not in images.failing
        ]
        assert loader.stats().skipped_samples == 3


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
@pytest.mark.parametrize("steps", [0, 1, 5, 14])
def test_a_restored_loader_fetches_only_the_rest(make, steps):
    images = Images()
    with loader_of(make().map(images.fetch), seed=0) as loader:
        batches = iter(loader)
        first = [sample for _ in range(steps) for sample in next(batches)]
        state = loader.state_dict()
        rest = [sample for batch in batches for sample in batch]
    assert first + rest == [10 * row for row in range(60)]
    images.fetched.clear()
    with loader_of(make().map(images.fetch), seed=0) as loader:
        loader.load_state_dict(state)
        assert samples_of(loader) == rest
    assert sorted(images.fetched) == [*range(4 * steps, 60)]


def test_a_state_holds_a_position_and_no_sample():
    async def fetch(row):
        return f"bytes of {row}" * 100

    with loader_of(row_stream().map(fetch)) as loader:
        next(iter(loader))
        assert len(str(loader.state_dict())) < 1000


class Endless:
    """A store that never answers for the rows from `first` on."""

    def __init__(self, first):
        self.first, self.started, self.ended = first, [], []

    async def fetch(self, row):
        if row < self.first:
            return row
        self.started.append(row)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append(row)


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_leaving_an_epoch_cancels_the_fetches(make):
    store = Endless(4)
    loader = loader_of(make().map(store.fetch), concurrency=8)
    assert next(iter(loader)) == [0, 1, 2, 3]
    loader.close()
    assert sorted(store.started) == sorted(store.ended)


def test_an_operation_that_ends_early_cancels_the_fetches():
    store = Endless(6)
    stream = row_stream().map(store.fetch).take(6)
    with loader_of(hr.concat([stream, stream]), concurrency=8, batch_size=3) as loader:
        assert samples_of(loader) == [*range(6)] * 2
        assert store.ended


class Image:
    """A sample of one MiB; knows how many of them are alive."""

    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()
    most = 0

    def __init__(self):
        self.pixels = bytearray(1 << 20)
        self.alive.add(self)
        Image.most = max(Image.most, len(self.alive))


async def fetch_image(row):
    await asyncio.sleep(0)
    return Image()


@pytest.mark.parametrize(
    "dataset",
    [
        Rows(200).map(fetch_image),
        BatchedRows(200).map(fetch_image),
        row_stream(200).map(fetch_image),
        row_stream(200).map(fetch_image).filter(lambda image: True),
    ],
    ids=["map-style", "by batches", "stream", "stream with a filter"],
)
def test_the_memory_budget_bounds_the_fetched_bytes(dataset):
    gc.collect()
    Image.most = 0
    with loader_of(dataset, memory_budget=24 << 20, concurrency=50) as loader:
        for batch in loader:
            assert len(batch) == 4
            del batch
    # a batch more: the consumer holds the batch
    assert Image.most <= 24 + 4


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_slow_rows_are_hedged(make):
    calls = Counter()

    async def fetch(row):
        calls[row] += 1
        # the first call for a row never ends
        await (
            asyncio.Event().wait()
            if row == 150 and calls[row] == 1
            else asyncio.sleep(0.001)  # latency
        )
        return row

    with loader_of(make(200).map(fetch), hedge="auto") as loader:
        assert samples_of(loader) == [*range(200)]
        assert loader.stats().requests.hedges_won
    assert calls[150] == 2
