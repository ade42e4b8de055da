"""Tensors and arrays whose memory is not their own: expanded, read-only."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from headrace import DataLoader


class Ones(Dataset[int]):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index


def only_batch(make):
    (batch,) = DataLoader(Ones(), 2, num_workers=1, collate_fn=lambda samples: make())
    return batch


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(3.0).expand(1000, 3),
        lambda: torch.arange(3.0).reshape(1, 3, 1).expand(50, 3, 20),
        lambda: torch.zeros(()).expand(4_000_000_000),
        lambda: torch.arange(6.0).reshape(2, 3).T.unsqueeze(0).expand(10, 3, 2),
        lambda: torch.tensor([True]).expand(5).unsqueeze(1).expand(5, 7),
    ],
)
def test_expanded_tensor_arrives_expanded(make):
    arrived, expected = only_batch(make), make()
    assert (arrived.shape, arrived.dtype) == (expected.shape, expected.dtype)
    assert arrived.untyped_storage().nbytes() <= expected.untyped_storage().nbytes()
    if expected.numel() < 1e6:
        assert torch.equal(arrived, expected)


def test_expanded_tensor_that_requires_grad_arrives_with_its_values():
    arrived = only_batch(lambda: torch.arange(3.0).expand(4, 3).clone().requires_grad_())
    assert arrived.requires_grad
    assert arrived.tolist() == [[0.0, 1.0, 2.0]] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.frombuffer(bytes(range(24)), dtype=np.uint8),
        lambda: np.frombuffer(bytes(range(24)), dtype=">u2").reshape(3, 4)[:, ::2],
        lambda: np.frombuffer(b"", dtype=np.float32),
        lambda: np.broadcast_to(np.arange(3), (4, 3)),
        lambda: np.frombuffer(bytes(16), dtype="M8[ns]"),
    ],
)
def test_read_only_array_arrives_writable(make):
    arrived, expected = only_batch(make), make()
    assert arrived.flags.writeable
    assert (arrived.dtype, arrived.shape, arrived.tolist()) == (expected.dtype, expected.shape, expected.tolist())
    arrived[...] = arrived[::-1].copy()
