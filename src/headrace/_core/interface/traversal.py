"""The datasets and samplers that are reachable through the attributes of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

_METHODS = ("aget", "__aiter__", "set_epoch")
_FIRST = 32  # elements of a container, which may be a list of a million keys


def child_datasets(value: Any) -> Iterator[Any]:
    """The datasets and samplers in the value of one attribute: itself, or elements of a dict, a list or a tuple.

    Of a container whose first 32 elements are something else, no more than these are looked at.
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
    return isinstance(value, Dataset | Sampler) or any(hasattr(value, method) for method in _METHODS)


def walk_datasets(dataset: Any) -> Iterator[Any]:
    """A dataset and all datasets that it is made of, each once, parts before the dataset that holds them.

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
