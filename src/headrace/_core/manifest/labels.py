"""Labels of keyed samples, given as a function, a mapping or a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Labels = Callable[[str], object] | Mapping[str, object] | Sequence[object] | None


def align_labels(labels: Labels, keys: Sequence[str]) -> Sequence[Any] | None:
    """The label of each of `keys`, in their order; None if no labels were given.

    Functions are called here, once: a missing label is an error of the constructor and not of mid-epoch, and a dataset
    can be pickled whatever function it was given.

    Raises:
        ValueError: a mapping lacks a key, or a sequence is of another length than `keys`.
        TypeError: `labels` is none of the three.
    """
    if labels is None:
        return None
    if callable(labels):
        return compact(map(labels, keys))
    if isinstance(labels, Mapping):
        missing = [key for key in keys if key not in labels]
        if missing:
            raise ValueError(
                f"labels= has no label for {len(missing)} of {len(keys)} keys, the first is {missing[0]!r}"
            )
        return compact(labels[key] for key in keys)
    if hasattr(labels, "iloc") and getattr(labels, "ndim", 1) == 1:
        # Of a Series of pandas, labels[0] is the value whose index is 0, wherever it stands.
        labels = compact(labels)
    is_sequence = hasattr(labels, "__getitem__") and hasattr(labels, "__len__")
    if isinstance(labels, str | bytes) or hasattr(labels, "iloc") or not is_sequence:
        raise TypeError(f"labels= must be a function of a key, a mapping or a sequence, not {type(labels).__name__}")
    if len(labels) != len(keys):
        raise ValueError(
            f"labels= has {len(labels)} labels for {len(keys)} keys; they are matched in the order of `keys`"
        )
    return labels


def compact(labels: Iterable[Any]) -> Sequence[object]:
    """Labels in less memory: numbers of one type in an array, equal strings as one object. Types are preserved.

    Example:
        >>> compact([3, 1, 2]), compact(["cat", 1.5])
        (array('q', [3, 1, 2]), ['cat', 1.5])
    """
    interned: dict[str, str] = {}
    row = [interned.setdefault(label, label) if type(label) is str else label for label in labels]
    kinds = set(map(type, row))
    if kinds == {int}:
        try:
            return array("q", row)
        except OverflowError:  # more than 64 bits
            return row
    return array("d", row) if kinds == {float} else row
