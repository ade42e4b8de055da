"""Batches are put together by torch's rules; what a store gives undecoded is kept."""

from collections import namedtuple

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.collate import default_collate, pad_sequences

Point = namedtuple("Point", ["x", "y"])


def test_undecoded_memory_stays_a_list_and_missing_labels_none():
    views = [memoryview(b"one"), memoryview(b"three")]
    assert default_collate([(view, None) for view in views]) == [views, None]


@pytest.mark.parametrize("samples", [[(1, None), (2, 5)], [(1, 5), (2, None)]])
def test_label_missing_in_some_samples_is_an_error(samples):
    with pytest.raises((TypeError, RuntimeError), match="None"):
        default_collate(samples)


def plain(padded):
    """A batch as lists."""
    if isinstance(padded, dict):
        return {key: plain(value) for key, value in padded.items()}
    return padded.tolist() if isinstance(padded, torch.Tensor) else [plain(part) for part in padded]


@pytest.mark.parametrize("make", [list, torch.tensor, np.array], ids=["lists", "tensors", "arrays"])
def test_sequences_are_padded_to_the_longest(make):
    padded, lengths = pad_sequences([make([1, 2, 3]), make([4]), make([5, 6])])
    assert plain(padded) == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert plain(lengths) == [3, 1, 2]
    assert (padded.dtype, lengths.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize(
    ("samples", "options", "expected"),
    [
        ([[1.5], [2.5, 3.5]], {"padding_value": -1, "padding_side": "left"}, [[[-1, 1.5], [2.5, 3.5]], [1, 2]]),
        ([(7, [1, 2]), (8, [3])], {"sequence": 1}, [[[1, 2], [3, 0]], [2, 1], [7, 8]]),
        ([(7, [1, 2]), (8, [3])], {"sequence": -1}, [[[1, 2], [3, 0]], [2, 1], [7, 8]]),
        ([Point([1], 5), Point([2, 3], 6)], {}, [[[1, 0], [2, 3]], [1, 2], [5, 6]]),
        ([[1, 2], [1.5]], {}, [[[1, 2], [1.5, 0]], [2, 1]]),
    ],
    ids=["value and side", "second item", "last item", "named tuple", "two dtypes"],
)
def test_sequences_are_padded_as_requested(samples, options, expected):
    assert plain(pad_sequences(samples, **options)) == expected


def test_items_of_a_sequence_may_be_vectors():
    padded, lengths = pad_sequences([torch.ones(2, 80), torch.ones(5, 80)])
    assert padded.shape == (2, 5, 80)
    assert padded[0, 2:].sum() == 0
    assert plain(lengths) == [2, 5]


def test_other_items_of_tuples_are_collated_by_default_after_the_lengths():
    batch = pad_sequences([([1, 2], 1.0, "a", {"x": 1}), ([3], 0.0, "b", {"x": 2})])
    assert len(batch) == 5
    assert plain(batch[:3]) == [[[1, 2], [3, 0]], [2, 1], [1.0, 0.0]]
    assert batch[3] == default_collate(["a", "b"])
    assert plain(batch[4]) == {"x": [1, 2]}


def test_sequence_of_mappings_is_named_by_its_key():
    batch = pad_sequences([{"label": 1, "tokens": [1]}, {"label": 0, "tokens": [2, 3]}], sequence="tokens")
    assert plain(batch) == {"label": [1, 0], "tokens": [[1, 0], [2, 3]], "lengths": [1, 2]}
    with pytest.raises(TypeError, match="mappings with the keys"):
        pad_sequences([{"tokens": [1]}])
    with pytest.raises(ValueError, match="already"):
        pad_sequences([{"tokens": [1], "lengths": 1}], sequence="tokens")


def test_empty_sequence_is_all_padding():
    padded, lengths = pad_sequences([[], [1, 2]])
    assert plain(padded) == [[0, 0], [1, 2]]
    assert padded.dtype == torch.int64
    assert plain(lengths) == [0, 2]
    assert pad_sequences([[], []])[0].shape == (2, 0)
    assert pad_sequences([[], torch.ones(2, 3)])[0].shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ([torch.ones(2, 3), torch.ones(3, 4)], ValueError),
        ([torch.ones(2, 1), torch.ones(3, 4)], ValueError),  # would be stretched
        ([torch.tensor(1), torch.tensor(2)], TypeError),
        ([(1, [1]), (2, [2])], TypeError),
    ],
    ids=["other shapes", "shape 1", "numbers", "number first"],
)
def test_what_is_no_set_of_sequences_is_refused(batch, error):
    with pytest.raises(error, match="pad_sequences"):
        pad_sequences(batch)


@pytest.mark.parametrize(
    ("samples", "remedy"),
    [
        ([torch.zeros(1), torch.zeros(2)], "collate_fn=headrace.pad_sequences"),
        ([[0], [0, 0]], "collate_fn=headrace.pad_sequences"),
        ([object, object], "transform="),
        ([{"a": torch.zeros(1)}, {"a": torch.zeros(2)}], "sample['a'] is [2] at index 1, and [1] at index 0"),
        ([{"a": 0, "b": "x"}, {"b": "y"}], "sample['a'] is missing at index 1, and a number at index 0"),
        ([(0, None), (0, 1)], "sample[1] is a number at index 1, and NoneType at index 0"),
        ([(0, [object])] * 2, "it is sample[1][0]"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_of_torchs_collate_has_a_remedy(samples, remedy, num_workers):
    loader = hr.DataLoader(samples, 2, num_workers=num_workers)
    with loader, pytest.raises((RuntimeError, TypeError, KeyError)) as caught:
        list(loader)
    assert [note for note in caught.value.__notes__ if remedy in note]


@pytest.mark.parametrize("samples", [[3, -1], [True, False], [1, True], [1, 2.5], [1.5, 2], [2**70, 1]], ids=str)
def test_numbers_are_collated_as_by_torch(samples):
    def outcome(loader):
        try:
            batch = next(iter(loader(samples, 2)))
        except (ValueError, RuntimeError) as error:
            return str(error)
        return batch.dtype, batch.tolist()

    assert outcome(hr.DataLoader) == outcome(torch.utils.data.DataLoader)
