"""Batches as trees: their leaves are replaced, the classes of their containers are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["replaced"]


def replaced(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """`batch` with `leaf` applied to what is no container; containers are copied, never written to.

    The batch sizes of a `PackedSequence` stay in host memory, where torch needs them.
    """
    if isinstance(batch, torch.Tensor):
        return leaf(batch)
    if isinstance(batch, PackedSequence):
        orders = (batch.sorted_indices, batch.unsorted_indices)
        moved = [None if order is None else leaf(order) for order in orders]
        return PackedSequence(leaf(batch.data), batch.batch_sizes, *moved)
    if isinstance(batch, str | bytes | bytearray | memoryview):
        return batch
    if isinstance(batch, Mapping):
        items = {key: replaced(value, leaf) for key, value in batch.items()}
        if type(batch) is dict:
            return items
        if isinstance(batch, MutableMapping):
            clone = copy.copy(batch)
            clone.update(items)
            return clone
        return type(batch)(items)  # type: ignore[call-arg]
    if isinstance(batch, tuple):
        parts = [replaced(value, leaf) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)
    if isinstance(batch, Sequence) and not isinstance(batch, range):
        parts = [replaced(value, leaf) for value in batch]
        if type(batch) is list:
            return parts
        if isinstance(batch, MutableSequence):
            copied = copy.copy(batch)
            for number, part in enumerate(parts):
                copied[number] = part
            return copied
        return type(batch)(parts)  # type: ignore[call-arg]
    return leaf(batch)
