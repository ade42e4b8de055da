"""Mistakes of a first program: an error says what is wrong, and none gives wrong batches without a word."""

import pytest

import headrace as hr
from headrace.errors import DatasetTypeError
from tests.datasets import Numbers


class ForgottenAwait(Numbers):
    def __init__(self):
        super().__init__(4)
        self.given = []

    async def aget(self, index):
        self.given.append(super().aget(index))
        return self.given[-1]


async def stream():
    yield 1


async def asynchronous(batch):
    return batch


def with_generator(sample, generator):
    return sample


MISTAKES = {
    "an async collate_fn": (
        lambda: hr.DataLoader(Numbers(4), collate_fn=asynchronous),
        (TypeError, r"collate_fn must not be async.*map\(\)"),
    ),
    "an async transform": (
        lambda: hr.DataLoader(Numbers(4), transform=asynchronous),
        (TypeError, r"transform must not be async.*map\(\)"),
    ),
    "an async filter": (
        lambda: hr.from_async_iterable(stream).filter(asynchronous),
        (TypeError, "filter must not be async"),
    ),
    "a transform with a generator": (
        lambda: hr.DataLoader(Numbers(4), transform=with_generator),
        (TypeError, "missing a required argument: 'generator'.*@headrace.randomized"),
    ),
    "a function of map with a generator": (
        lambda: Numbers(4).map(with_generator),
        (TypeError, "missing a required argument: 'generator'.*@headrace.randomized"),
    ),
    "a URL in place of a dataset": (
        lambda: hr.DataLoader("s3://bucket/train"),
        (DatasetTypeError, "is a URL, and not a dataset"),
    ),
    "a context beside a placement": (
        lambda: iter(
            hr.DataLoader(
                Numbers(4),
                placement="process",
                multiprocessing_context="fork",
                num_workers=1,
            )
        ),
        (ValueError, "placement= and multiprocessing_context= exclude each other"),
    ),
    "an index of a stream": (
        lambda: hr.from_async_iterable(stream)[0],
        (TypeError, "is a stream, without indices"),
    ),
    "a class in place of a dataset": (
        lambda: hr.DataLoader(Numbers),
        (DatasetTypeError, r"is a class: give an object of it, Numbers\("),
    ),
    "a function in place of a dataset": (
        lambda: hr.DataLoader(print),
        (DatasetTypeError, "aget.*__getitem__.*__aiter__.*__iter__"),
    ),
    "an async generator": (
        lambda: hr.DataLoader(stream()),
        (DatasetTypeError, "can be read only once"),
    ),
    "braces that are not closed": (
        lambda: hr.TarDataset("{0000..0127.tar"),
        (ValueError, "braces in .* are not balanced"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_refused_with_its_cause(mistake):
    make, (kind, message) = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        make()


def test_forgotten_await_is_named():
    dataset = ForgottenAwait()
    with hr.DataLoader(dataset, 2) as loader, pytest.raises(TypeError) as caught:
        next(iter(loader))
    assert "an await is missing in aget" in "".join(caught.value.__notes__)
    for coroutine in dataset.given:
        coroutine.close()  # otherwise Python warns that it was never awaited
