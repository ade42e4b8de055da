"""Batches as trees: their leaves are replaced, the classes of their containers are kept."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def replaced(batch: object, leaf: Callable[[object], Any]) -> Any:
    """`batch` with `leaf` applied to everything that is no container; containers are copied, never written to.

    The batch sizes of a `PackedSequence` stay in host memory, as torch requires. A container with a `to` and a
    `record_stream` of its own (a `TensorDict`) is a leaf: a copy of its items would lose its other state.
    """
    if isinstance(batch, torch.Tensor):
        return leaf(batch)
    if isinstance(batch, PackedSequence):
        orders = (batch.sorted_indices, batch.unsorted_indices)
        moved = [None if order is None else leaf(order) for order in orders]
        return PackedSequence(leaf(batch.data), batch.batch_sizes, *moved)
    if isinstance(batch, str | bytes | bytearray | memoryview):
        return batch
    if isinstance(batch, Mapping | Sequence) and moves(batch) and names_its_memory(batch):
        return leaf(batch)
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


def moves(leaf: object) -> bool:
    """Whether `leaf` has a ``to(device, non_blocking=True)``; a `to` with other arguments is not called."""
    to = getattr(leaf, "to", None)
    if not callable(to) or isinstance(leaf, type):
        return False
    code = getattr(to, "__code__", None)  # None where it is written in C
    return code is None or "non_blocking" in code.co_varnames or bool(code.co_flags & inspect.CO_VARKEYWORDS)


def names_its_memory(leaf: object) -> bool:
    """Whether the allocator can be notified of a stream that uses the memory of `leaf`."""
    return callable(getattr(leaf, "record_stream", None))
