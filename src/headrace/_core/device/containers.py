"""Batches as trees: their leaves are replaced, the classes of their containers are kept."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any
from weakref import WeakKeyDictionary

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
    kind = type(leaf)
    known = _MOVES.get(kind)
    if known is None:
        to = getattr(leaf, "to", None)
        known = _MOVES[kind] = callable(to) and not isinstance(leaf, type) and _takes_non_blocking(to)
    return known


def names_its_memory(leaf: object) -> bool:
    """Whether the allocator can be notified of a stream that uses the memory of `leaf`."""
    return callable(getattr(leaf, "record_stream", None))


def _takes_non_blocking(to: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return True
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        or (parameter.name == "non_blocking" and parameter.kind is not parameter.POSITIONAL_ONLY)
        for parameter in parameters
    )


# By class: looking at a signature takes longer than enqueueing a copy.
_MOVES: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
