"""Batches are put together by torch's rules; what a store gives undecoded is kept."""

import pytest
import torch

import headrace as hr
from headrace.collate import HUGE, default_collate


def test_undecoded_memory_stays_a_list_and_missing_labels_none():
    views = [memoryview(b"one"), memoryview(b"three")]
    assert default_collate([(view, None) for view in views]) == [views, None]


@pytest.mark.parametrize(
    ("samples", "remedy"),
    [
        ([torch.zeros(1), torch.zeros(2)], "torch's pad_sequence"),
        ([[0], [0, 0]], "torch's pad_sequence"),
        ([object, object], "transform="),
        ([None, None], "leave out samples that are None"),
        ([1, None], "leave out samples that are None"),
        ([{"x": 1}, {"x": None}], "leave out samples that are None"),
        (
            [{"a": torch.zeros(1)}, {"a": torch.zeros(2)}],
            "sample['a'] is [2] at index 1, and [1] at index 0",
        ),
        (
            [{"a": 0, "b": "x"}, {"b": "y"}],
            "sample['a'] is missing at index 1, and a number at index 0",
        ),
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


@pytest.mark.parametrize(
    "samples", [[3, -1], [True, False], [1, True], [1, 2.5], [1.5, 2], [2**70, 1]], ids=str
)
def test_numbers_are_collated_as_by_torch(samples):
    def outcome(loader):
        try:
            batch = next(iter(loader(samples, 2)))
        except (ValueError, RuntimeError) as error:
            return str(error)
        return batch.dtype, batch.tolist()

    assert outcome(hr.DataLoader) == outcome(torch.utils.data.DataLoader)


@pytest.mark.parametrize(
    "change",
    [
        lambda sample, index: sample,
        lambda sample, index: sample.bfloat16(),
        lambda sample, index: sample.to(memory_format=torch.channels_last),
        lambda sample, index: sample.transpose(1, 3),
        lambda sample, index: (
            sample.transpose(1, 3) if index % 2 else sample.transpose(1, 3).contiguous()
        ),
        lambda sample, index: sample.requires_grad_(),
    ],
    ids=[
        "as it is",
        "bfloat16",
        "channels last",
        "transposed",
        "transposed in part",
        "with gradient",
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_large_batches_are_laid_out_as_by_torch(change, num_workers):
    samples = [change(torch.rand(2, 4, 128, 256), index) for index in range(8)]
    assert sum(sample.nbytes for sample in samples) >= HUGE

    def outcome(loader):
        try:
            batch = next(iter(loader(samples, 8, num_workers=num_workers)))
        except RuntimeError as error:
            return type(error), torch.empty(0)
        return (batch.dtype, batch.stride(), batch.requires_grad, batch.data_ptr() % 64), batch

    (ours, batch), (torchs, same) = map(outcome, (hr.DataLoader, torch.utils.data.DataLoader))
    assert ours == torchs
    assert torch.equal(batch, same)


@pytest.mark.parametrize(
    "rows", [torch.rand(16, 1024, 512), torch.rand(16, 1024, 512).transpose(1, 2)]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_large_rows_of_a_tensor_dataset_are_those_of_torch(rows, num_workers):
    dataset = torch.utils.data.TensorDataset(rows, torch.arange(16))
    (ours, numbers), (theirs, same) = (
        next(iter(loader(dataset, 8, sampler=range(15, -1, -1), num_workers=num_workers)))
        for loader in (hr.DataLoader, torch.utils.data.DataLoader)
    )
    assert torch.equal(ours, theirs)
    assert numbers.tolist() == same.tolist()
