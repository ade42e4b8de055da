"""The datasets that a dataset is made of: those that it, and what it holds, have in their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

__all__ = ["held_datasets", "nested_datasets"]


def held_datasets(value: Any) -> Iterator[Any]:
    """The datasets in the value of one attribute: itself, or the elements of a dict, a list or a tuple of datasets."""
    several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    for part in several:
        if not isinstance(part, Dataset) and not hasattr(part, "aget") and not hasattr(part, "__aiter__"):
            return  # a list of keys: its first element says so
        yield part


def nested_datasets(dataset: Any) -> Iterator[Any]:
    """A dataset and all that it is made of, each once, behind those that it holds itself.

    Example:
        >>> from torch.utils.data import ConcatDataset, Subset
        >>> from headrace.testing import SlowDataset
        >>> inner = SlowDataset(4, 0.0)
        >>> [type(part).__name__ for part in nested_datasets(ConcatDataset([inner, Subset(inner, [0])]))]
        ['SlowDataset', 'Subset', 'ConcatDataset']
    """
    yield from _walk(dataset, set())


def _walk(dataset: Any, visited: set[int]) -> Iterator[Any]:
    if id(dataset) in visited:
        return
    visited.add(id(dataset))
    for value in list(getattr(dataset, "__dict__", {}).values()):
        for part in held_datasets(value):
            yield from _walk(part, visited)
    yield dataset
