"""Detect that a dataset has changed since another process was given a copy of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized

from headrace._core.interface.blocking import attributes_before_enter
from headrace._core.interface.kinds import child_datasets, walk_datasets

# Attributes of these classes are compared by value, others by identity and length: comparing each element would cost
# as much as copying them.
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Snapshot:
    """The length and attributes of a dataset, and of the datasets it is made of.

    It detects attributes that were set, and containers that grew or shrank; not an element that was replaced, nor
    changes inside functions (see `held_functions`). Attributes set by `__aenter__` are ignored: each process enters its
    own copy.

    Example:
        >>> class Keys:
        ...     def __init__(self): self.keys = ["a"]
        >>> dataset = Keys()
        >>> before = Snapshot(dataset)
        >>> dataset.keys.append("b")
        >>> before.same_as(Snapshot(dataset))
        False
    """

    def __init__(self, dataset: object) -> None:
        self._seen = [*_features(dataset, set())]

    def same_as(self, other: Snapshot) -> bool:
        """Whether no difference is found."""
        if len(self._seen) != len(other._seen):
            return False
        return all(_same(*features) for features in zip(self._seen, other._seen, strict=True))


def held_functions(dataset: object) -> list[object]:
    """The functions in the attributes of a dataset and of the datasets that it holds."""
    values = (value for part in walk_datasets(dataset) for value in attributes_before_enter(part).values())
    return [value for value in values if callable(value) and not isinstance(value, type)]


_Feature = tuple[str, object, int | None]


def _same(one: _Feature, other: _Feature) -> bool:
    (name, value, length), (other_name, other_value, other_length) = one, other
    if name != other_name or length != other_length or type(value) is not type(other_value):
        return False
    return value is other_value or (isinstance(value, _PLAIN) and value == other_value)


def _features(dataset: object, visited: set[int]) -> Iterator[_Feature]:
    yield "dataset", dataset, _length(dataset)
    if id(dataset) in visited:
        return
    visited.add(id(dataset))
    for name, value in attributes_before_enter(dataset).items():
        yield name, value, _length(value)
        for part in child_datasets(value):
            yield from _features(part, visited)


def _length(value: object) -> int | None:
    if isinstance(value, Sized):
        with contextlib.suppress(Exception):  # user code, or a class that has none after all
            return len(value)
    return None
