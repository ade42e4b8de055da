"""Ranges of all planned batches that lie near each other are one request, and an error does not affect neighbours."""

import asyncio

import numpy as np
import torch

from headrace._engine.range_fetch import RangeFetch
from headrace._records.batches import Rows
from headrace._records.failure import Failure
from headrace._store.ranges import Ranges
from headrace._streams.map_style import RangedDataset, positions
from tests.unit.engine.stages import Stage, plan


class Bytes(RangedDataset):
    """Ten objects of ten samples of one byte, which is its index."""

    def __init__(self):
        self.asked = []
        self.refused = set()
        self.gone = set()
        self.short = False

    def __len__(self):
        return 100

    def ranges(self, indices):
        places = positions(indices, 100)
        return Ranges(places // 10, places % 10, places % 10 + 1)

    async def read_range(self, number, start, stop, *, index=None):
        self.asked.append((number, start, stop, index))
        await asyncio.sleep(0)
        if number in self.gone:
            raise OSError(f"object {number} is gone, said for index {index}")
        return memoryview(
            bytes(range(number * 10 + start, number * 10 + stop - self.short))
        )

    def sample_of(self, index, data):
        if index in self.refused:
            raise ValueError(f"no good: {index}")
        return data[0]


def stage(dataset, concurrency=8):
    return Stage(lambda context: RangeFetch(context, dataset, concurrency))


def described(failure):
    assert isinstance(failure, Failure)
    return failure.index, str(failure.error)


async def test_the_first_batch_is_read_by_itself_and_all_others_together():
    dataset = Bytes()
    async with stage(dataset) as fetch:
        await fetch.admit(plan(0, (5, 15)), plan(1, (6, 27)), plan(2, (9, 28)))
        assert fetch.batches == [[5, 15], [6, 27], [9, 28]]
    assert dataset.asked == [
        (0, 5, 6, None),
        (1, 5, 6, None),
        (0, 6, 10, None),
        (2, 7, 9, None),
    ]


async def test_the_request_that_the_oldest_batch_waits_for_goes_first():
    dataset = Bytes()
    async with stage(dataset, concurrency=1) as fetch:
        await fetch.admit(plan(0, (0,)), plan(1, (90,)), plan(2, (50,)), plan(3, (10,)))
        assert fetch.numbers == [0, 1, 2, 3]
    assert [asked[0] for asked in dataset.asked] == [0, 9, 5, 1]


async def test_samples_without_bytes_need_no_request():
    class Empty(Bytes):
        def ranges(self, indices):
            zeros = np.zeros(len(indices), np.int64)
            return Ranges(zeros, zeros, zeros)

        def sample_of(self, index, data):
            return bytes(data)

    dataset = Empty()
    async with stage(dataset) as fetch:
        await fetch.admit(plan(0, (0, 1)), plan(1, ()), plan(2, (2,)))
        assert sorted(map(tuple, fetch.batches)) == [(), (b"",), (b"", b"")]
    assert not dataset.asked


async def test_ranges_that_cannot_be_are_their_samples_errors_and_no_other_batchs():
    class Wrong(Bytes):
        def ranges(self, indices):
            good = super().ranges(indices)
            return Ranges(
                good.objects, good.starts - (np.array(indices) % 20 == 0), good.stops
            )

        async def aget(self, index):
            raise LookupError(f"asked for {index} alone")

    async with stage(Wrong()) as fetch:
        await fetch.admit(plan(0, (0, 1)), plan(1, (12, 13)), plan(2, (20,)))
        batches = dict(zip(fetch.numbers, fetch.batches, strict=True))
    assert batches.pop(1) == [12, 13]
    failures = [described(failure) for number in (0, 2) for failure in batches[number]]
    assert failures == [(i, f"asked for {i} alone") for i in (0, 1, 20)]


async def test_a_tensor_of_samples_goes_on_as_rows_and_with_a_failure_among_them_as_samples():
    class Tensors(Bytes):
        def samples_of(self, indices, data):
            if self.refused & set(indices):
                raise ValueError("not all")
            return torch.tensor([each[0] for each in data])

    dataset = Tensors()
    dataset.refused = {41}
    async with stage(dataset) as fetch:
        await fetch.admit(plan(0, (1, 2)), plan(1, (40, 41)))
        assert isinstance(fetch.delivered[0].samples, Rows)
        assert [int(sample) for sample in fetch.batches[0]] == [1, 2]
        assert fetch.batches[1][0] == 40
        assert described(fetch.batches[1][1])[0] == 41
