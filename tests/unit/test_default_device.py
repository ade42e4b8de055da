"""What headrace makes itself is in host memory, also where torch's default device is another one."""

import pytest
import torch
from torch.utils.data import TensorDataset

import headrace as hr
from tests.datasets import Numbers


def boxes(index):
    """The boxes of an image: one, or none."""
    return torch.ones(index % 2, 4, device="cpu")


def noisy(index, rng):
    return boxes(index) + rng.random()


@pytest.fixture
def meta():
    """A device that has no memory."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1, "transform": boxes, "batch_size": None},
        {"num_workers": 0, "transform": hr.randomized(noisy), "batch_size": None},
    ],
    ids=["empty tensors", "draws"],
)
def test_batches_are_in_host_memory(options, meta):
    with hr.DataLoader(Numbers(4), seed=1, **options) as loader:
        assert {tensor.device.type for tensor in loader} == {"cpu"}


def test_rows_of_a_torch_dataset_without_columns_come_from_a_worker_in_host_memory(meta):
    dataset = TensorDataset(
        torch.arange(4, device="cpu"), torch.zeros(4, 0, device="cpu")
    )
    with hr.DataLoader(dataset, batch_size=2, num_workers=1, seed=1) as loader:
        assert {tensor.device.type for batch in loader for tensor in batch} == {"cpu"}
