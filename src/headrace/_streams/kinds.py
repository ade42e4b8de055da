"""Kinds and optional capabilities of datasets.

Methods decide the kind: a user's class needs no base class. The module also finds the datasets and
samplers in a dataset's attributes, and sets the epoch of each.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Sampler

from headrace._base.array_types import IntArray
from headrace._base.text import dataset_repr, short_repr
from headrace._ranks.distributed import RankChoice
from headrace._ranks.rankinfo import RankInfo
from headrace.errors import DatasetTypeError

T_co = TypeVar("T_co", covariant=True)
"""The type of a dataset's samples."""


class DatasetKind(enum.Enum):
    ASYNC_MAP = "async map"
    ASYNC_ITERABLE = "async iterable"
    MAP = "map"
    ITERABLE = "iterable"

    @property
    def is_async(self) -> bool:
        return self in (DatasetKind.ASYNC_MAP, DatasetKind.ASYNC_ITERABLE)

    @property
    def is_iterable(self) -> bool:
        return self in (DatasetKind.ASYNC_ITERABLE, DatasetKind.ITERABLE)


class Capabilities(NamedTuple):
    aget: bool = False
    agets: bool = False
    ranges: bool = False  # samples are byte ranges, read together; see `RangedDataset`
    aiter: bool = False


MOST_BLOCKS = 192  # read side by side; a multiple of the usual numbers of ranks
BLOCK_BYTES = 256 << 10  # neighbouring bytes to read with a single request
BYTES_AT_ONCE = 64 << 20  # all blocks read side by side
# Samples to plan ahead if blocks are read as a whole: plans take 50 bytes a sample.
MOST_AHEAD = 1 << 20
# Samples of the blocks side by side, if read as a whole: the order takes 0.1 µs a sample.
MOST_SAMPLES = 1 << 22


class Blocks(NamedTuple):
    """Blocks of neighbouring samples, read in random order.

    The `blocks` attribute of a map-style dataset gives the sizes.
    """

    size: int  # samples in a block; the mean if there are `borders`
    at_once: int  # blocks to read side by side
    # First sample of each block if blocks are read as a whole; None for blocks of equal size.
    borders: IntArray | None = None
    ahead: int = 0  # blocks with samples to plan ahead; 0 for two times `at_once`
    content: str = ""  # checksum; a state saved with other blocks is refused

    @property
    def samples(self) -> int:
        """Number of samples read side by side."""
        return self.size * self.at_once

    @classmethod
    def within(cls, most_bytes: int, nbytes: int, samples: int, size: int = 0) -> Blocks:
        """Make blocks of equal size.

        Args:
            most_bytes: bytes of all blocks read side by side.
            nbytes: bytes of some samples.
            samples: number of these samples.
            size: samples in a block; 0 for blocks of `BLOCK_BYTES`.
        """
        sample_bytes = max(1, nbytes // max(1, samples))
        size = size or max(1, BLOCK_BYTES // sample_bytes)
        most = min(MOST_BLOCKS, most_bytes // (size * sample_bytes))
        if most < 3:
            return cls(size, max(1, most))
        return cls(size, 3 << (most // 3).bit_length() - 1)

    @classmethod
    def whole(
        cls,
        most_bytes: int,
        nbytes: int,
        counts: Sequence[int],
        text: str = "",
        *,
        ahead: int = 1,
    ) -> Blocks:
        """Make blocks to be read as a whole.

        Args:
            most_bytes: half of the bytes is for the blocks read side by side. The other half is for
                the following blocks, and for blocks of more than average size.
            nbytes: bytes of all blocks together.
            counts: samples of each block. Empty blocks are left out.
            text: further content for the checksum.
            ahead: divides the number of blocks side by side; the result is planned ahead.
        """
        sizes = np.array([count for count in counts if count] or [0], np.int64)
        n = int(sizes.sum())
        size = max(1, -(-n // len(sizes)))
        found = cls.within(most_bytes // 2, nbytes, n, size)
        at_once = min(found.at_once, max(1, MOST_SAMPLES // size))
        planned = max(1, min(-(-at_once // ahead), MOST_AHEAD // size))
        digest = hashlib.blake2b(
            sizes.tobytes() + text.encode(), digest_size=8
        ).hexdigest()
        return cls(
            size, at_once, np.cumsum(sizes) - sizes, planned, f"{len(sizes)} of {digest}"
        )

    @property
    def shown(self) -> tuple[int, int, str]:
        """Values that determine an order."""
        return self.size, self.at_once, self.content

    def counts(self, n: int) -> IntArray:
        """Return the number of samples of each block, for `n` samples."""
        firsts = np.arange(0, n, self.size) if self.borders is None else self.borders
        return np.diff(firsts, append=n)


def blocks_of(dataset: object) -> Blocks | None:
    """Return the blocks of a dataset.

    None: a loader reads the dataset in torch's order.
    """
    found = getattr(dataset, "blocks", None)
    return found if isinstance(found, Blocks) else None


def reads_whole_blocks(dataset: object) -> bool:
    """Return whether whole blocks are read and kept, for example row groups.

    A block is kept for all waiting samples of the block.
    """
    blocks = blocks_of(dataset)
    return blocks is not None and blocks.borders is not None


def capabilities(dataset: object) -> Capabilities:
    """Return the capabilities of a dataset.

    A class defines `_capabilities` if instances have different capabilities.
    """
    found: Capabilities = getattr(
        type(dataset), "_capabilities", capabilities_by_methods
    )(dataset)
    return found


def joined_part(dataset: object, sampler: object) -> float:
    """Return the fraction of the look-ahead to plan at once.

    Planning several samples at once lets a request serve several samples. Returns 0 if requests
    serve a single sample.
    """
    ranges = capabilities(dataset).ranges
    if reads_whole_blocks(dataset) or (
        ranges and getattr(sampler, "order_of", "") == "samples"
    ):
        return 1 / 8  # the samples are neighbours: requests serve several samples anyway
    return 0.5 if ranges else 0


def capabilities_by_methods(dataset: object) -> Capabilities:
    return Capabilities(
        aget=has_method(dataset, "aget"),
        agets=has_method(dataset, "agets"),
        aiter=has_method(dataset, "__aiter__"),
    )


def has_method(part: object, name: str) -> bool:
    """Return whether an object has a method.

    `__getattr__` of the object may raise any error.
    """
    try:
        return callable(getattr(part, name, None))
    except Exception:  # user code
        return False


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature, as `inspect.signature`, without evaluating annotations.

    Annotations may contain names imported only for type checkers.
    """
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.STRING)
    return inspect.signature(function)


def kind_of(dataset: object) -> DatasetKind:
    """Return the kind of a dataset, by the methods.

    Raises:
        DatasetTypeError: the object is a class or an iterator, or has no method of a dataset.
    """
    if isinstance(dataset, type):
        raise DatasetTypeError(
            f"{dataset.__name__} is a class: give an object of it, {dataset.__name__}(...)"
        )
    if isinstance(dataset, str) and "://" in dataset:
        raise DatasetTypeError(
            f"{short_repr(dataset)} is a URL, and not a dataset: give the dataset for its files, "
            f"for example headrace.ObjectDataset({short_repr(dataset)})"
        )
    can = capabilities(dataset)
    if can.aget:
        return DatasetKind.ASYNC_MAP
    advance = getattr(
        type(dataset), "__next__", getattr(type(dataset), "__anext__", None)
    )
    # A built-in iterator: generator, file.
    if isinstance(advance, types.WrapperDescriptorType):
        raise DatasetTypeError(
            f"{short_repr(dataset)} can be read only once: each later epoch would be empty. "
            f"Give a list of the samples, an object whose __iter__ starts anew, "
            f"or headrace.from_async_iterable(function) of an async generator function"
        )
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
    """Return the dataset's name of a sample, for an error message.

    Returns None if there is no name, or `sample_key` of the dataset fails.
    """
    if not has_method(dataset, "sample_key"):
        return None
    try:
        key = dataset.sample_key(index)
        return None if key is None else str(key)
    except BaseException:
        # Called while an error is reported, often of a wrong `index`. Only the reported error
        # matters.
        return None


async def fetch_all(dataset: Any, indices: Sequence[Any]) -> Sequence[Any]:
    """Fetch the samples at `indices`.

    A dataset with `agets` gets a single call. Otherwise `aget` is called concurrently.
    """
    if capabilities(dataset).agets:
        samples: Sequence[Any] = await dataset.agets(indices)
        return samples
    return await asyncio.gather(*map(dataset.aget, indices))


# Elements to check of a container. A container may be a list of a million keys. The container holds
# no dataset if the first elements are no datasets.
_FIRST = 32


def children(dataset: Any) -> Iterator[Any]:
    """Yield the datasets and samplers in a dataset's attributes.

    Dicts, lists and tuples in attributes are searched too.
    """
    for value in list(getattr(dataset, "__dict__", {}).values()):
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, list | tuple):
            value = (value,)
        for number, part in enumerate(value):
            if _is_dataset(part):
                yield part
            elif number >= _FIRST:
                break


def _is_dataset(value: Any) -> bool:
    if isinstance(value, type):
        return False
    if isinstance(value, Dataset | Sampler):
        return True
    can = capabilities(value)
    return can.aget or can.aiter or has_method(value, "set_epoch")


def walk_datasets(dataset: Any, visited: set[int] | None = None) -> Iterator[Any]:
    """Yield a dataset and all datasets in the attributes, each once.

    Parts come before the dataset that holds the parts.
    """
    visited = set() if visited is None else visited
    if id(dataset) not in visited:
        visited.add(id(dataset))
        for part in children(dataset):
            yield from walk_datasets(part, visited)
        yield dataset


def given_rank(stream: Any) -> RankInfo | None:
    """Return the rank given by the user to a stream or to inner streams.

    Returns None if no rank was given, or several different ranks.

    Raises:
        ValueError: a part has a rank, and another part has none.
    """
    parts = {part._ranks.given: part for part in _divided_parts(stream, set())}
    without = parts.pop(None, None)
    if parts and without is not None:
        part = dataset_repr(next(iter(parts.values())))
        raise ValueError(
            f"{part} was given rank= and world_size=, but {dataset_repr(without)} in the same "
            f"stream was not: give both to all parts, or to none"
        )
    if len(parts) != 1:
        return None
    (found,) = parts
    return RankInfo(found.index, found.count, "the dataset")


def _divided_parts(stream: Any, visited: set[int]) -> Iterator[Any]:
    """Yield the parts that divide themselves among ranks.

    A `split` reads inner streams whole.
    """
    if isinstance(getattr(stream, "_ranks", None), RankChoice):
        yield stream
    elif id(stream) not in visited:
        visited.add(id(stream))
        for part in children(stream):
            yield from _divided_parts(part, visited)


def propagate_epoch(
    part: Any, epoch: int, *, only_wanted: bool = False, visited: set[int] | None = None
) -> None:
    """Call `set_epoch` of a dataset or sampler.

    A `set_epoch` method passes the epoch on. If `part` has no such method, the datasets and
    samplers in the attributes of `part` are called. With `only_wanted`, torch datasets and samplers
    without ``wants_epoch = True`` are left out.
    """
    visited = set() if visited is None else visited
    if id(part) in visited:
        return
    visited.add(id(part))
    if not has_method(part, "set_epoch"):
        for child in children(part):
            # Not the data source of a sampler.
            if not (isinstance(part, Sampler) and isinstance(child, Dataset)):
                propagate_epoch(child, epoch, only_wanted=only_wanted, visited=visited)
        return
    can = capabilities(part)
    if not only_wanted or getattr(part, "wants_epoch", can.aget or can.aiter):
        part.set_epoch(epoch)


def ranks_differ(stream: Any) -> bool:
    """Return whether ranks may get different numbers of samples.

    The numbers may differ if each rank reads shards of its own.
    """
    if getattr(stream, "equal_on_ranks", False):
        return False
    return getattr(stream, "ranks_differ", False) or any(
        map(ranks_differ, children(stream))
    )


def splits_by_rank(stream: Any) -> bool:
    """Return whether a stream or a part reads only the samples of a rank.

    `split` and streams of shards do.
    """
    return any(getattr(part, "splits_by_rank", False) for part in walk_datasets(stream))
