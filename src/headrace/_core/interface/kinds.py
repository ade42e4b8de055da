"""The kind of a dataset and its optional capabilities, found by methods: a user's class needs no base class."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

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
        """Whether the dataset decides the order itself, without a sampler."""
        return self in (DatasetKind.ASYNC_ITERABLE, DatasetKind.ITERABLE)


class Capabilities(NamedTuple):
    """The methods of a dataset that a loader may use.

    Attributes:
        aget: one sample by its index.
        agets: a batch of samples by one call.
        ranges: samples are byte ranges, so that neighbours are read by one request; see `JoinedReads`.
        cached_reads: byte ranges may be on a local disk; see `JoinedReads.cached_reads`.
        aiter: a stream, read with `async for`.
        set_epoch: an epoch's number for the order of samples.
        sample_key: a name of a sample for error messages.
    """

    aget: bool = False
    agets: bool = False
    ranges: bool = False
    cached_reads: bool = False
    aiter: bool = False
    set_epoch: bool = False
    sample_key: bool = False

    @property
    def is_async(self) -> bool:
        """Whether samples are fetched on the engine's loop."""
        return self.aget or self.aiter


def capabilities(dataset: object) -> Capabilities:
    """The capabilities of a dataset or sampler; a class whose instances differ defines `_capabilities`."""
    of_instance = getattr(type(dataset), "_capabilities", None)
    found: Capabilities = capabilities_by_methods(dataset) if of_instance is None else of_instance(dataset)
    return found


def capabilities_by_methods(dataset: object) -> Capabilities:
    return Capabilities(
        aget=has_method(dataset, "aget"),
        agets=has_method(dataset, "agets"),
        aiter=has_method(dataset, "__aiter__"),
        set_epoch=has_method(dataset, "set_epoch"),
        sample_key=has_method(dataset, "sample_key"),
    )


def has_method(part: object, name: str) -> bool:
    """Whether an object has a method; its `__getattr__` may give None for every name, or raise any error."""
    try:
        return callable(getattr(part, name, None))
    except Exception:  # user code
        return False


def kind_of(dataset: object) -> DatasetKind:
    """The kind of a dataset, by its methods.

    Raises:
        DatasetTypeError: it has none of `aget`, `__getitem__`, `__aiter__`, `__iter__`.
    """
    can = capabilities(dataset)
    if can.aget:
        return DatasetKind.ASYNC_MAP
    if can.aiter:
        return DatasetKind.ASYNC_ITERABLE
    if isinstance(dataset, IterableDataset):
        return DatasetKind.ITERABLE
    if hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
        return DatasetKind.MAP
    if hasattr(dataset, "__iter__"):
        return DatasetKind.ITERABLE
    raise DatasetTypeError(dataset=dataset)


def sample_key(dataset: Any, index: Any) -> str | None:
    """The dataset's name of the sample at `index`, for an error message; None if it has none or fails."""
    if not capabilities(dataset).sample_key:
        return None
    try:
        key = dataset.sample_key(index)
        return None if key is None else str(key)
    except BaseException:  # called while an error is reported, often because `index` is wrong; that error matters
        return None


async def fetch_all(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """Fetch the samples at `indices`: by one call of `agets` if there is one, else by concurrent calls of `aget`."""
    if capabilities(dataset).agets:
        return list(await dataset.agets(indices))
    return await asyncio.gather(*map(dataset.aget, indices))


def check_times(times: int) -> None:
    """Raise for a number of repetitions that is not an int (`TypeError`) or negative (`ValueError`)."""
    if isinstance(times, bool) or not isinstance(times, int):
        raise TypeError(f"times must be an int, but got {times!r}")
    if times < 0:
        raise ValueError(f"times={times} must not be negative")
