"""Batches are put together by torch's rules; what a store gives undecoded is kept."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate as torch_collate

from headrace.collate import default_collate, default_convert
from headrace.testing.contract import same

Point = namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2],
        [1.5, 2.5],
        [True, False],
        ["a", "b"],
        [b"a", b"b"],
        [np.float32(1), np.float32(2)],
        [np.arange(3), np.arange(3)],
        [torch.ones(2), torch.zeros(2)],
        [(1, "a"), (2, "b")],
        [[1, 2.0], [3, 4.0]],
        [{"a": 1, "b": torch.ones(1)}, {"a": 2, "b": torch.zeros(1)}],
        [Point(1, 2.0), Point(3, 4.0)],
        [{"a": [(1, {"b": "c"})]}, {"a": [(2, {"b": "d"})]}],
    ],
    ids=repr,
)
def test_it_does_what_torch_does(samples):
    ours, torchs = default_collate(samples), torch_collate(samples)
    assert type(ours) is type(torchs)
    assert same(ours, torchs)


@pytest.mark.parametrize("samples", [[object(), object()], [torch.ones(1), torch.ones(2)], [(1, 2), (1,)], []])
def test_it_refuses_what_torch_refuses_in_torchs_words(samples):
    with pytest.raises(Exception, match=r".") as torchs:
        torch_collate(samples)
    with pytest.raises(torchs.type) as ours:
        default_collate(samples)
    assert str(ours.value) == str(torchs.value)


def test_undecoded_memory_stays_a_list():
    views = [memoryview(b"one"), memoryview(b"three")]
    assert default_collate(views) == views


def test_a_label_that_nobody_gave_stays_none():
    assert default_collate([(1, None), (2, None)])[1] is None


@pytest.mark.parametrize("samples", [[(1, None), (2, 5)], [(1, 5), (2, None)]])
def test_a_label_that_some_lack_is_an_error(samples):
    with pytest.raises((TypeError, RuntimeError), match="None"):
        default_collate(samples)


def test_without_batches_samples_are_converted_as_in_torch():
    assert default_convert is torch.utils.data.default_convert
