"""Whole batches of a `TensorDataset` by one `index_select`, equal to collated single samples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

Gather = Callable[[Sequence[Any]], list[torch.Tensor]]


def tensor_fast_path(dataset: Any) -> Gather | None:
    """A function from indices to what the default collate makes of those samples; None where there is no such way.

    Args:
        dataset: a `TensorDataset`, or a `Subset` of one, of exactly these classes: a subclass may do more in
            `__getitem__`.

    Returns:
        A function that raises where one of the indices is wrong; reading sample by sample then says which.
    """
    if type(dataset) is Subset:
        inner = tensor_fast_path(dataset.dataset)
        positions = dataset.indices
        if inner is None:
            return None
        return lambda indices: inner([positions[index] for index in indices])
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    tensors, length = dataset.tensors, len(dataset)

    def gather(indices: Sequence[Any]) -> list[torch.Tensor]:
        if set(map(type, indices)) == {int}:
            index = torch.frombuffer(array("q", indices), dtype=torch.int64)  # `torch.tensor` takes four times as long
        else:
            index = torch.tensor(indices)
        # A tensor from a list of mixed types would round floats and take booleans; only integers mean one sample each.
        if index.dtype != torch.int64 or index.ndim != 1:
            raise IndexError("not a list of integers")
        if not len(indices):
            raise IndexError("an empty batch")
        if bool((index < 0).any()):
            index = torch.where(index < 0, index + length, index)
        return [tensor.index_select(0, index) for tensor in tensors]

    return gather


def _is_plain(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return type(tensor) is torch.Tensor and on_cpu and not tensor.requires_grad
