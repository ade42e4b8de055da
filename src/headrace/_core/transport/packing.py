"""Small tensors of a pickled object, packed into one buffer: one copy for all that have the same dtype and shape.

A batch with a tensor for each column of a table has hundreds of them, and a buffer of its own takes more than the bytes
in it. They are unpacked as views of the received buffer, each with a storage of its own that has exactly its bytes: as
large in `torch.save`, and with its own version for autograd, as a tensor that was sent alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace._core.transport.allocator import SMALL, aligned

NUMPY_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

Layout = tuple[list[int], list[tuple[str, tuple[int, ...], int, int]]]
"""For each buffer that the pickle takes its number among the groups, from 1, or 0 for a buffer that is not packed; and
of each group the dtype, the shape, the number of tensors and the offset of the first, in bytes."""


@dataclass(slots=True, eq=False)
class _Group:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    tensors: list[torch.Tensor] = field(default_factory=list)
    # Writable: in the place of a buffer that is not, an unpickler takes no tensor.
    mark: pickle.PickleBuffer = field(default_factory=lambda: pickle.PickleBuffer(bytearray()))


class TensorPacker:
    """Collects the small tensors that a pickler meets."""

    def __init__(self) -> None:
        self._groups: dict[tuple[torch.dtype, torch.Size], _Group | None] = {}

    def add(self, tensor: torch.Tensor) -> tuple[object, ...] | None:
        """The tensor as pickled: the next one of a group, for which a mark stands; None if it is not packed."""
        if (
            tensor.is_nested
            or tensor.layout is not torch.strided
            or not tensor.is_cpu
            or tensor.requires_grad
            or not tensor.is_contiguous()
        ):
            return None
        key = tensor.dtype, tensor.shape
        try:
            group = self._groups[key]
        except KeyError:
            group = self._groups[key] = _group_of(tensor)
        if group is None:
            return None
        group.tensors.append(tensor)
        return next, (group.mark,)

    def clear(self) -> None:
        """Forget the tensors of a pickle that was given up."""
        self._groups.clear()

    def pack(self, found: list[pickle.PickleBuffer]) -> tuple[list[memoryview], Layout | None]:
        """The buffers of a pickle, that of the packed tensors last, and its layout; None if there are none.

        Args:
            found: the buffers and the marks, in the order of the pickle.
        """
        groups = [group for group in self._groups.values() if group is not None]
        if not groups:
            return [buffer.raw() for buffer in found], None
        numbers = {id(group.mark): number for number, group in enumerate(groups, 1)}
        slots = [numbers.get(id(buffer), 0) for buffer in found]
        buffers = [buffer.raw() for buffer, slot in zip(found, slots, strict=True) if not slot]
        region, places = _copied(groups)
        return [*buffers, region], (slots, places)


def _group_of(tensor: torch.Tensor) -> _Group | None:
    dtype = NUMPY_DTYPES.get(tensor.dtype)
    if dtype is None or not 0 < tensor.nbytes <= SMALL:
        return None
    return _Group(dtype, tuple(tensor.shape))


def _copied(groups: list[_Group]) -> tuple[memoryview, list[tuple[str, tuple[int, ...], int, int]]]:
    places, end = [], 0
    for group in groups:
        count = len(group.tensors)
        places.append((group.dtype.str, group.shape, count, end))
        end = aligned(end + count * group.tensors[0].nbytes)
    region = np.empty(end, np.uint8)
    for group, (_, shape, count, offset) in zip(groups, places, strict=True):
        rows: np.ndarray[Any, Any] = np.ndarray((count, *shape), group.dtype, region, offset)
        torch.stack(group.tensors, out=torch.from_numpy(rows))
    return region.data, places


def unpacked(buffers: Sequence[memoryview], layout: Layout) -> Iterator[memoryview | Iterator[torch.Tensor]]:
    """What the pickle takes in place of each buffer: the buffer itself, or for a mark the tensors of its group."""
    slots, places = layout
    own, groups = iter(buffers[:-1]), [_tensors(buffers[-1], *place) for place in places]
    return (groups[slot - 1] if slot else next(own) for slot in slots)


def _tensors(region: memoryview, dtype: str, shape: tuple[int, ...], count: int, offset: int) -> Iterator[torch.Tensor]:
    rows: Any = np.ndarray((count, *shape), dtype, region, offset)
    tensor_of: Callable[[Any], torch.Tensor] = torch.from_numpy
    return map(tensor_of, rows if shape else (rows[number, ...] for number in range(count)))
