"""Reprs: of datasets made of others, of samples; short, whatever they hold."""

import pytest

import headrace as hr
from tests import datasets


class Numbers(datasets.Numbers):
    def __init__(self):
        super().__init__(3)

    def __repr__(self):
        return "Numbers()"


class Stream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        yield 1

    def __repr__(self):
        return "Stream()"


class Scale:
    def __call__(self, sample):
        return sample


async def words():
    yield "a"


@pytest.mark.parametrize(
    ("dataset", "shown"),
    [
        (Numbers().map(len), "Numbers().map(len)"),
        (hr.concat([Numbers().map(Scale())]), "concat([Numbers().map(Scale)])"),
        (Stream().map(len), "Stream().map(len)"),
        (Stream().take(2), "Stream().take(2)"),
        (Stream().shuffle(100, seed=3), "Stream().shuffle(100, seed=3)"),
        (Stream().split(rank=0, world_size=1), "Stream().split()"),
        (hr.concat([Numbers(), Numbers()]), "concat([Numbers(), Numbers()])"),
        (hr.concat([Stream(), Stream()]), "concat([Stream(), Stream()])"),
        (
            hr.mix([Stream(), Stream()], [2, 1]),
            "mix([Stream(), Stream()], [2, 1], seed=None, stop='first')",
        ),
        (hr.from_async_iterable(words), "from_async_iterable(words)"),
        (Stream().pack(64, "best_fit"), "Stream().pack(64, 'best_fit')"),
        (hr.batch_by_tokens(Stream(), 64), "batch_by_tokens(Stream(), 64)"),
    ],
)
def test_repr_of_a_dataset_made_of_others(dataset, shown):
    assert repr(dataset) == shown


@pytest.mark.parametrize(
    "sample",
    [
        hr.types.FileSample("a.jpg", bytes(1234), 3),
        hr.types.ObjectSample("a.jpg", memoryview(bytes(1234)), 3),
    ],
)
def test_repr_of_a_sample_has_the_number_of_its_bytes(sample):
    assert repr(sample) == f"{type(sample).__name__}(key='a.jpg', data=<1,234 bytes>, label=3)"
