"""Reprs: of datasets made of others, of samples; short, whatever they hold."""

import pytest

import headrace as hr
from tests.datasets import Numbers
from tests.unit.streams.reading import Plain

NUMBERS = Numbers(3)


@pytest.mark.parametrize(
    ("dataset", "shown"),
    [
        (hr.concat([NUMBERS.map(len)]), f"concat([{NUMBERS}.map(len)])"),
        (
            hr.mix([Plain(3).map(len), hr.concat([Plain(4)]).take(2)], [2, 1]),
            "mix([Count(3).map(len), concat([Count(4)]).take(2)], [2, 1], seed=None, stop='first')",
        ),
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
    assert (
        repr(sample)
        == f"{type(sample).__name__}(key='a.jpg', data=<1,234 bytes>, label=3)"
    )
