"""The datasets and samplers that are reachable through the attributes of a dataset, and the epoch that they follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from headrace._core.interface.kinds import capabilities

_FIRST = 32  # elements of a container, which may be a list of a million keys


def child_datasets(value: Any) -> Iterator[Any]:
    """The datasets and samplers in the value of one attribute: the value, or elements of a dict, a list or a tuple.

    A container without a dataset among its first 32 elements is taken to have none.
    """
    several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    for number, part in enumerate(several):
        if _is_dataset(part):
            yield part
        elif number >= _FIRST:
            return


def _is_dataset(value: Any) -> bool:
    if isinstance(value, type):
        return False
    if isinstance(value, Dataset | Sampler):
        return True
    can = capabilities(value)
    return can.is_async or can.set_epoch


def walk_datasets(dataset: Any) -> Iterator[Any]:
    """A dataset and all datasets in its attributes, each once, parts before the dataset that holds them.

    Example:
        >>> from torch.utils.data import ConcatDataset, Subset
        >>> from headrace.testing import SlowDataset
        >>> inner = SlowDataset(4, 0.0)
        >>> [type(part).__name__ for part in walk_datasets(ConcatDataset([inner, Subset(inner, [0])]))]
        ['SlowDataset', 'Subset', 'ConcatDataset']
    """
    yield from _walk(dataset, set())


def _walk(dataset: Any, visited: set[int]) -> Iterator[Any]:
    if id(dataset) in visited:
        return
    visited.add(id(dataset))
    for value in list(getattr(dataset, "__dict__", {}).values()):
        for part in child_datasets(value):
            yield from _walk(part, visited)
    yield dataset


def translates_epochs(dataset: Any) -> bool:
    """Whether a class of the user's has a `set_epoch`, so that streams in it may get other epochs than the loader's."""
    methods = (getattr(part, "set_epoch", None) for part in walk_datasets(dataset))
    modules = (getattr(method, "__module__", "") for method in methods if method is not None)
    return not all(str(module).startswith(("headrace.", "torch.")) for module in modules)


def propagate_epoch(part: Any, epoch: int, *, only_wanted: bool = False) -> None:
    """Call `set_epoch` of a dataset or sampler; if it has none, of the datasets and samplers in its attributes.

    Args:
        part: the dataset or sampler. One with `set_epoch` is responsible for its own parts.
        epoch: the epoch's number.
        only_wanted: leave out torch datasets and samplers without ``wants_epoch = True``.
    """
    for follower in _epoch_followers(part, set()):
        if not only_wanted or getattr(follower, "wants_epoch", capabilities(follower).is_async):
            follower.set_epoch(epoch)


def _epoch_followers(part: Any, visited: set[int]) -> Iterator[Any]:
    if id(part) in visited:
        return
    visited.add(id(part))
    if capabilities(part).set_epoch:
        yield part
        return
    for value in list(getattr(part, "__dict__", {}).values()):
        for child in child_datasets(value):
            if not (isinstance(part, Sampler) and isinstance(child, Dataset)):  # the sampler's data source
                yield from _epoch_followers(child, visited)


def splits_by_rank(stream: Any) -> bool:
    """Whether a stream, or a part of it, reads only its rank's part, as `split`, and streams of shards."""
    return any(getattr(part, "splits_by_rank", False) for part in walk_datasets(stream))
