"""Types of `DataLoader`'s arguments, for type checkers only."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, Never, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from headrace.options import LoaderOptions

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class FetchedByIndex(Protocol[T_co]):
    """A dataset with an async `aget`."""

    async def aget(self, index: Never, /) -> T_co: ...


class Indexed(Protocol[T_co]):
    """A dataset with `__getitem__`."""

    def __getitem__(self, index: Never, /) -> T_co: ...


# A dataset of samples of a type.
Samples: TypeAlias = Dataset[T] | FetchedByIndex[T] | AsyncIterable[T] | Iterable[T] | Indexed[T]
# Samples that the default collate functions make tensors of, also one by one.
Array: TypeAlias = torch.Tensor | npt.NDArray[np.generic]


class _OnlyAny:
    """The class of no object: of all types `Any` alone is compatible with it."""


# Samples of unknown type, and tuples, of which the default collate functions make lists.
Unknown: TypeAlias = _OnlyAny | tuple[Any, ...]


class KeywordArguments(LoaderOptions, total=False):
    """The arguments on which the type of a batch does not depend."""

    sampler: Iterable[object] | None
    batch_sampler: Iterable[list[Any]] | None
    num_workers: int
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
