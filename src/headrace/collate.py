"""From samples to a batch: torch's rules, and ours for what a store gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate as torch_default_collate
from torch.utils.data import default_convert
from torch.utils.data._utils.collate import (
    collate,
    collate_numpy_array_fn,
    collate_tensor_fn,
    default_collate_fn_map,
    np_str_obj_array_pattern,
)

__all__ = ["Destination", "collating_into", "default_collate", "default_convert", "destined"]


def default_collate(batch: Sequence[Any]) -> Any:
    """Put samples together to a batch: `torch.utils.data.default_collate`, which stacks tensors, arrays and numbers.

    Beyond torch it takes what an object store's samples hold before they are decoded: `memoryview` stays a list, as
    `bytes` does in torch, and a field that is None in every sample (a label that nobody gave) stays None.

    Args:
        batch: the samples; all of the same structure.

    Returns:
        The same structure, each leaf with a leading dimension of ``len(batch)``.

    Raises:
        TypeError: a leaf is of a type that cannot be put together.
        RuntimeError: tensors of unequal shape.

    Example:
        >>> default_collate([(1.0, b"a"), (2.0, b"b")])
        [tensor([1., 2.], dtype=torch.float64), (b'a', b'b')]
    """
    return collate(batch, collate_fn_map=_COLLATE_FN_MAP)


def _keep(batch: Sequence[Any], *, collate_fn_map: Any = None) -> list[Any]:
    return list(batch)


def _keep_none(batch: Sequence[Any], *, collate_fn_map: Any = None) -> None:
    if any(sample is not None for sample in batch):
        raise TypeError("default_collate: a field is None in some samples of the batch and not in others")


_COLLATE_FN_MAP: dict[type | tuple[type, ...], Callable[..., Any]] = {
    **default_collate_fn_map,
    memoryview: _keep,
    type(None): _keep_none,
}


class Destination(Protocol):
    """Memory that a batch may be made in, instead of the heap."""

    def empty(self, size: int) -> memoryview | None:
        """`size` bytes of it, uninitialised; None if there are not as many."""


_destination: Destination | None = None


@contextlib.contextmanager
def collating_into(destination: Destination) -> Iterator[None]:
    """Have `destined` collate functions stack into `destination`; for a worker, which makes one batch at a time."""
    global _destination
    _destination = destination
    try:
        yield
    finally:
        _destination = None


def destined(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The default collates as functions that stack into the destination; any other function as it is.

    A function of the user's that calls a default collate itself is left alone: it may keep what it gets.
    """
    return _DESTINED.get(collate_fn, collate_fn)


def _stack(batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    if not all(_is_plain(tensor) and tensor.shape == batch[0].shape for tensor in batch):
        irregular: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # and its errors
        return irregular
    first = batch[0]
    size = len(batch) * first.numel() * first.element_size()
    uniform = size > 0 and all(tensor.dtype == first.dtype for tensor in batch)
    memory = _destination.empty(size) if uniform and _destination is not None else None
    if memory is None:
        return torch.stack(list(batch), 0)
    out = torch.frombuffer(memory, dtype=first.dtype).view(len(batch), *first.shape)
    return torch.stack(list(batch), 0, out=out)


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def _stack_arrays(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    if np_str_obj_array_pattern.search(batch[0].dtype.str) is not None:
        return collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)  # raises torch's error
    return _stack([torch.as_tensor(array) for array in batch])


def _collate_as_torch_into_destination(batch: Any) -> Any:
    return collate(batch, collate_fn_map=_TORCH_DESTINED)


def _collate_into_destination(batch: Any) -> Any:
    return collate(batch, collate_fn_map=_OURS_DESTINED)


_TORCH_DESTINED = {**default_collate_fn_map, torch.Tensor: _stack, np.ndarray: _stack_arrays}
_OURS_DESTINED = {**_COLLATE_FN_MAP, torch.Tensor: _stack, np.ndarray: _stack_arrays}
_DESTINED: dict[Any, Callable[[Any], Any]] = {
    torch_default_collate: _collate_as_torch_into_destination,
    default_collate: _collate_into_destination,
}
