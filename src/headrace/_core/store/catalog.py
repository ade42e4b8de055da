"""The objects of a dataset, as a listing or a manifest has them: keys, sizes, versions, labels, checksums."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace._core.store.etags import Etags, strong
from headrace._core.store.string_array import StringArray, StringArrayBuilder

if TYPE_CHECKING:
    from obstore import ObjectMeta

UNKNOWN = -1
"""The size of an object of unknown size."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The objects of a dataset, by their position.

    Attributes:
        keys: relative to the dataset's URL.
        sizes: in bytes, `UNKNOWN` where not known; None if no size is known.
        etags: entity tags; None if no object has one.
        labels: one each; None if there are none here.
        checksums: ``algorithm:hexadecimal`` of the bytes, or an empty string; None if no object has one.
    """

    keys: StringArray
    sizes: array[int] | None = None
    etags: Etags | None = None
    labels: Sequence[object] | None = None
    checksums: StringArray | None = None


class CatalogBuilder:
    """Collects objects one by one, in about 30 bytes beside key and tag for each."""

    def __init__(self, suffix: str | tuple[str, ...] | None = None) -> None:
        self._suffix = suffix
        self.keys = StringArrayBuilder()
        self.sizes = array("q")
        self.etags = StringArrayBuilder()

    def append(self, key: str, size: int, etag: str | None) -> None:
        self.keys.append(key)
        self.sizes.append(size)
        self.etags.append(etag or "")

    def add_page(self, page: Sequence[ObjectMeta]) -> None:
        suffix = self._suffix
        for entry in page:
            if suffix is None or entry["path"].endswith(suffix):
                self.append(entry["path"], entry["size"], strong(entry["e_tag"]))

    def extend(self, other: CatalogBuilder) -> None:
        self.keys.extend(other.keys)
        self.sizes.extend(other.sizes)
        self.etags.extend(other.etags)

    def catalog(self) -> Catalog:
        """The objects, in the order in which they were appended."""
        etags = Etags(self.etags.build())
        known = len(self.sizes) > 0 and max(self.sizes) != UNKNOWN
        return Catalog(self.keys.build(), self.sizes if known else None, etags or None)

    def sorted(self) -> Catalog:
        """The objects sorted by key; of a key that was appended twice, the last."""
        found = self.catalog()
        if _ascends(found.keys):
            return found
        keys = list(found.keys)
        order: list[int] = []
        for position in sorted(range(len(keys)), key=keys.__getitem__):
            if order and keys[position] == keys[order[-1]]:
                order[-1] = position
            else:
                order.append(position)
        return _chosen(found, order)


def without_folder_markers(found: Catalog) -> Catalog:
    """A sorted listing without the empty objects that S3's console and other tools make for a folder.

    Their keys end in ``/``, which obstore takes off: such a key is that of the whole listing, or other keys begin with
    it and a ``/``. The marker of a folder without objects looks like any empty object.
    """
    if found.sizes is None:
        return found
    keys, empty = found.keys, np.flatnonzero(np.frombuffer(found.sizes, dtype=np.int64) == 0).tolist()
    markers = {position for position in empty if _is_folder(keys, keys[position])}
    if not markers:
        return found
    return _chosen(found, [position for position in range(len(keys)) if position not in markers])


def _is_folder(keys: Sequence[str], key: str) -> bool:
    inside = bisect.bisect_left(keys, f"{key}/")
    return not key or (inside < len(keys) and keys[inside].startswith(f"{key}/"))


def _chosen(found: Catalog, order: Sequence[int]) -> Catalog:
    """The objects of a listing at these positions."""
    keys, sizes, etags = found.keys, found.sizes, found.etags
    return Catalog(
        StringArray(map(keys.__getitem__, order)),
        None if sizes is None else array("q", map(sizes.__getitem__, order)),
        None if etags is None else Etags(map(etags.__getitem__, order)),
    )


def _ascends(keys: Iterable[str]) -> bool:
    last: str | None = None
    for key in keys:
        if last is not None and key <= last:
            return False
        last = key
    return True


def first_repeated(keys: Sequence[str], hashed: Callable[[str], int] = hash) -> tuple[int, int] | None:
    """The positions of the first repeated key, and of its repetition; None if all keys differ.

    A million hashes are 8 MB, where a set of the keys is 150.

    Args:
        keys: in any order.
        hashed: makes an integer of 64 bits of a key.

    Example:
        >>> first_repeated(["a", "b", "c", "b", "a"])
        (1, 3)
    """
    hashes = np.fromiter(map(hashed, keys), dtype=np.int64, count=len(keys))
    ordered = np.sort(hashes)
    repeated = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not repeated:
        return None
    seen: dict[str, int] = {}
    for position in np.flatnonzero(np.isin(hashes, list(repeated))).tolist():
        key = keys[position]
        if key in seen:
            return seen[key], position
        seen[key] = position
    return None
