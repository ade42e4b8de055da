"""The kind of a dataset and its optional capabilities, found by methods: a user's class needs no base class.

Also the datasets and samplers that are reachable through a dataset's attributes, and the epoch that
they follow.
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

from headrace._core.array_types import IntArray
from headrace._core.ranks.distributed import RankChoice
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.text import short_repr
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
    # samples are byte ranges, so that neighbours are read by one request; see `RangedDataset`
    ranges: bool = False
    aiter: bool = False


MOST_BLOCKS = 192  # read side by side; 192 is a multiple of the usual numbers of ranks
BLOCK_BYTES = 256 << 10  # of neighbours that one request reads
BYTES_AT_ONCE = 64 << 20  # of all blocks that are read side by side
MOST_AHEAD = (
    1 << 20
)  # samples of blocks read as a whole that are planned ahead: plans take 50 bytes a sample
MOST_SAMPLES = (
    1 << 22
)  # of blocks that are read as a whole, side by side: their order takes 0.1 µs a sample


class Blocks(NamedTuple):
    """The sizes with which samples of a map-style dataset are read in random order: blocks of neighbours."""

    size: int  # samples in a block; the mean, where there are `borders`
    at_once: int  # blocks that are read side by side
    borders: IntArray | None = (
        None  # the first sample of each block that is read as a whole; None for equal blocks
    )
    ahead: int = 0  # blocks whose samples are planned ahead; 0 for two times `at_once`
    content: str = ""  # a checksum: with other blocks a state is refused

    @property
    def samples(self) -> int:
        """The number of samples that are read side by side."""
        return self.size * self.at_once

    @classmethod
    def within(cls, most_bytes: int, sample_bytes: int, size: int = 0) -> Blocks:
        """Blocks of `size` samples, or of `BLOCK_BYTES`, of which as many are read side by side as the bytes allow."""
        sample_bytes = max(1, sample_bytes)
        size = size or max(1, BLOCK_BYTES // sample_bytes)
        most = min(MOST_BLOCKS, most_bytes // (size * sample_bytes))
        if most < 3:
            return cls(size, max(1, most))
        return cls(size, 3 << (most // 3).bit_length() - 1)

    @classmethod
    def whole(
        cls, most_bytes: int, nbytes: int, counts: Sequence[int], text: str = "", *, ahead: int = 1
    ) -> Blocks:
        """Blocks of `counts` samples that are read as a whole, together `nbytes` bytes.

        Half of `most_bytes` is for the blocks side by side, the rest for those that follow or are
        larger than others. An `ahead`-th of them is planned ahead.
        """
        sizes = np.array([count for count in counts if count] or [0], np.int64)
        n = int(sizes.sum())
        size = max(1, -(-n // len(sizes)))
        found = cls.within(most_bytes // 2, nbytes // max(1, n), size)
        at_once = min(found.at_once, max(1, MOST_SAMPLES // size))
        planned = max(1, min(-(-at_once // ahead), MOST_AHEAD // size))
        digest = hashlib.blake2b(sizes.tobytes() + text.encode(), digest_size=8).hexdigest()
        return cls(size, at_once, np.cumsum(sizes) - sizes, planned, f"{len(sizes)} of {digest}")

    @property
    def shown(self) -> tuple[int, int, str]:
        """What an order depends on."""
        return self.size, self.at_once, self.content

    def firsts(self, n: int) -> IntArray:
        """The first sample of each block, of `n` samples."""
        return np.arange(0, n, self.size) if self.borders is None else self.borders


def blocks_of(dataset: object) -> Blocks | None:
    """The blocks in which a dataset is read. None: a loader reads the dataset in torch's order."""
    found = getattr(dataset, "blocks", None)
    return found if isinstance(found, Blocks) else None


def reads_whole_blocks(dataset: object) -> bool:
    """Whether a dataset reads and keeps whole blocks, as row groups, for all samples that wait."""
    blocks = blocks_of(dataset)
    return blocks is not None and blocks.borders is not None


def capabilities(dataset: object) -> Capabilities:
    """The capabilities of a dataset; a class whose instances differ defines `_capabilities`."""
    found: Capabilities = getattr(type(dataset), "_capabilities", capabilities_by_methods)(dataset)
    return found


def joined_part(dataset: object, sampler: object) -> float:
    """The part of the look-ahead that is planned at once, since a request serves several samples; 0 if none does."""
    ranges = capabilities(dataset).ranges
    if reads_whole_blocks(dataset) or (ranges and getattr(sampler, "order_of", "") == "samples"):
        return 1 / 8  # of neighbours, which a request serves anyway
    return 0.5 if ranges else 0


def capabilities_by_methods(dataset: object) -> Capabilities:
    return Capabilities(
        aget=has_method(dataset, "aget"),
        agets=has_method(dataset, "agets"),
        aiter=has_method(dataset, "__aiter__"),
    )


def has_method(part: object, name: str) -> bool:
    """Whether an object has a method; its `__getattr__` may raise any error."""
    try:
        return callable(getattr(part, name, None))
    except Exception:  # user code
        return False


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    """As `inspect.signature`, without evaluating annotations: they may name what only type checkers import."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.STRING)
    return inspect.signature(function)


def kind_of(dataset: object) -> DatasetKind:
    """The kind of a dataset, by its methods; raises `DatasetTypeError` if it has none of them."""
    if isinstance(dataset, type):
        raise DatasetTypeError(
            f"{dataset.__name__} is a class: give an object of it, {dataset.__name__}(...)"
        )
    can = capabilities(dataset)
    if can.aget:
        return DatasetKind.ASYNC_MAP
    advance = getattr(type(dataset), "__next__", getattr(type(dataset), "__anext__", None))
    if isinstance(advance, types.WrapperDescriptorType):  # a built-in iterator: a generator, a file
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
    """The dataset's name of the sample at `index`, for an error message; None if it has none or fails."""
    if not has_method(dataset, "sample_key"):
        return None
    try:
        key = dataset.sample_key(index)
        return None if key is None else str(key)
    except (
        BaseException
    ):  # called while an error is reported, often because `index` is wrong; that error matters
        return None


async def fetch_all(dataset: Any, indices: Sequence[Any]) -> Sequence[Any]:
    """Fetch the samples at `indices`: by one call of `agets` if there is one, else by concurrent calls of `aget`."""
    if capabilities(dataset).agets:
        samples: Sequence[Any] = await dataset.agets(indices)
        return samples
    return await asyncio.gather(*map(dataset.aget, indices))


# elements of a container, which may be a list of a million keys: it has no dataset if these are
# none
_FIRST = 32


def children(dataset: Any) -> Iterator[Any]:
    """The datasets and samplers in all attributes of a dataset, and in the dicts, lists and tuples there."""
    for value in list(getattr(dataset, "__dict__", {}).values()):
        several = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else (value,)
        )
        for number, part in enumerate(several):
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
    """A dataset and all datasets in its attributes, each once, parts before the dataset that holds them."""
    visited = set() if visited is None else visited
    if id(dataset) not in visited:
        visited.add(id(dataset))
        for part in children(dataset):
            yield from walk_datasets(part, visited)
        yield dataset


def given_rank(stream: Any) -> RankInfo | None:
    """The rank that the user gave to a stream, or to the streams it is made of; None if there is none, or several."""
    choices = [getattr(part, "_ranks", None) for part in walk_datasets(stream)]
    given = {choice.given for choice in choices if isinstance(choice, RankChoice)} - {None}
    (found,) = given if len(given) == 1 else (None,)
    return None if found is None else RankInfo(found.index, found.count, "the dataset")


def propagate_epoch(
    part: Any, epoch: int, *, only_wanted: bool = False, visited: set[int] | None = None
) -> None:
    """Call `set_epoch` of a dataset or sampler, which passes it on; if it has none, of those in its attributes.

    With `only_wanted`, torch datasets and samplers without ``wants_epoch = True`` are left out.
    """
    visited = set() if visited is None else visited
    if id(part) in visited:
        return
    visited.add(id(part))
    if not has_method(part, "set_epoch"):
        for child in children(part):
            if not (
                isinstance(part, Sampler) and isinstance(child, Dataset)
            ):  # the sampler's data source
                propagate_epoch(child, epoch, only_wanted=only_wanted, visited=visited)
    elif not only_wanted or getattr(
        part, "wants_epoch", (can := capabilities(part)).aget or can.aiter
    ):
        part.set_epoch(epoch)


def ranks_differ(stream: Any) -> bool:
    """Whether ranks of a stream may get different numbers of samples, since each reads shards of its own."""
    if getattr(stream, "equal_on_ranks", False):
        return False
    return getattr(stream, "ranks_differ", False) or any(map(ranks_differ, children(stream)))


def splits_by_rank(stream: Any) -> bool:
    """Whether a stream, or a part of it, reads only its rank's part, as `split`, and streams of shards."""
    return any(getattr(part, "splits_by_rank", False) for part in walk_datasets(stream))
