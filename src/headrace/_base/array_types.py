"""NumPy array types for annotations, and batch indices as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, cast, overload

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
ByteArray: TypeAlias = NDArray[np.uint8]
Uint32Array: TypeAlias = NDArray[np.uint32]
AnyArray: TypeAlias = NDArray[Any]
AnyDType: TypeAlias = np.dtype[np.generic]


@dataclass(eq=False, repr=False, slots=True)
class Indices(Sequence[int]):
    """Batch indices from a computed order, in an array."""

    array: IntArray

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        found: int | list[int] = self.array[position].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __repr__(self) -> str:
        return repr(tuple(self))


COMPUTED_INDICES = (range, Indices)
"""Types of batch indices from a computed order."""


def index_array(indices: Sequence[Any] | AnyArray) -> AnyArray:
    """Return the indices as an array, without a copy if possible."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step)
    return indices.array if isinstance(indices, Indices) else np.asarray(indices)


def join_indices(parts: Sequence[Sequence[Any] | AnyArray]) -> Any:
    """Concatenate the indices of all parts.

    Adjoining ranges become a single range. Other parts become `Indices`. A single part stays
    unchanged, except an array, which becomes `Indices`.
    """
    if all(isinstance(part, range) and part.step == 1 for part in parts):
        ranges = cast("Sequence[range]", parts)
        if all(one.stop == following.start for one, following in pairwise(ranges)):
            return range(ranges[0].start, ranges[-1].stop)
    if len(parts) > 1:
        return Indices(np.concatenate([*map(index_array, parts)]))
    (part,) = parts
    return Indices(part) if isinstance(part, np.ndarray) else part
