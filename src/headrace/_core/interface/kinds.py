"""What is asked of a dataset, by its methods and not by its class: which of the four kinds it is, and what it may have.

The user's class need not be one of ours: what lacks an optional method is treated as if it did nothing.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Sampler

from headrace._core.interface.traversal import child_datasets
from headrace.errors import DatasetTypeError


class DatasetKind(enum.Enum):
    """The four kinds of dataset, by how a sample is fetched."""

    ASYNC_MAP = "async map"
    ASYNC_ITERABLE = "async iterable"
    MAP = "map"
    ITERABLE = "iterable"

    @property
    def is_async(self) -> bool:
        """Whether samples are fetched on the engine's loop."""
        return self in (DatasetKind.ASYNC_MAP, DatasetKind.ASYNC_ITERABLE)

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset decides the order itself, and no sampler does."""
        return self in (DatasetKind.ASYNC_ITERABLE, DatasetKind.ITERABLE)


def kind_of(dataset: object) -> DatasetKind:
    """Tell a dataset's kind by its methods; no base class is needed.

    Raises:
        DatasetTypeError: it has none of `aget`, `__getitem__`, `__aiter__`, `__iter__`.
    """
    if hasattr(dataset, "aget"):
        return DatasetKind.ASYNC_MAP
    if hasattr(dataset, "__aiter__"):
        return DatasetKind.ASYNC_ITERABLE
    if isinstance(dataset, IterableDataset):
        return DatasetKind.ITERABLE
    if hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
        return DatasetKind.MAP
    if hasattr(dataset, "__iter__"):
        return DatasetKind.ITERABLE
    raise DatasetTypeError(dataset=dataset)


def propagate_epoch(part: Any, epoch: int, *, only_wanted: bool = False) -> None:
    """Call `set_epoch` of a dataset or sampler; where it has none, of the datasets and samplers it holds.

    Args:
        part: the dataset or sampler. One with `set_epoch` passes the epoch on to those it holds, if they need it.
        epoch: the epoch's number.
        only_wanted: whether to leave out torch datasets and samplers without ``wants_epoch = True``.
    """
    for follower in _followers(part, set()):
        is_async = hasattr(follower, "aget") or hasattr(follower, "__aiter__")
        if not only_wanted or getattr(follower, "wants_epoch", is_async):
            follower.set_epoch(epoch)


def _followers(part: Any, visited: set[int]) -> Iterator[Any]:
    if id(part) in visited:
        return
    visited.add(id(part))
    if hasattr(part, "set_epoch"):
        yield part
        return
    for value in list(getattr(part, "__dict__", {}).values()):
        for held in child_datasets(value):
            if not (isinstance(part, Sampler) and isinstance(held, Dataset)):  # the sampler's data source
                yield from _followers(held, visited)


def sample_key(dataset: Any, index: Any) -> str | None:
    """What the dataset calls the sample at `index`, for an error's message; None where it does not say or cannot."""
    describe = getattr(dataset, "sample_key", None)
    if describe is None:
        return None
    try:
        return str(describe(index))
    except BaseException:  # this runs while an error is reported, often because `index` is wrong; that error matters
        return None


async def get_all(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """The samples at `indices`, fetched at once: by `agets` where there is one."""
    if hasattr(dataset, "agets"):
        return list(await dataset.agets(indices))
    return await asyncio.gather(*(dataset.aget(index) for index in indices))
