"""The objects of a dataset as columns: keys, sizes, versions, labels, checksums."""

from __future__ import annotations

import bisect
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from headrace._core.store.head import strong

if TYPE_CHECKING:
    from obstore import ObjectMeta

UNKNOWN = -1
"""The size of an object of unknown size."""

Labels = Callable[[str], object] | Mapping[str, object] | Sequence[object] | None

# Keys of files may have bytes that are not UTF-8, which Python holds as surrogates.
_ERRORS = "surrogatepass"


class StringArray(Sequence[str]):
    """An immutable sequence of strings: one buffer of UTF-8, and offsets.

    Other processes of this machine map both buffers of a pickle. NumPy's `StringDType` is pickled as Python strings:
    1.28 million keys take 1.6 s to another process, and these 0.1 s.

    Raises:
        TypeError: one of them is not a string.

    Example:
        >>> keys = StringArray(["a.jpg", "b.jpg"])
        >>> keys[-1], len(keys), keys == ("a.jpg", "b.jpg")
        ('b.jpg', 2, True)
    """

    __slots__ = ("_offsets", "_text")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._text: Any = bytearray()  # bytes or a view of them, once built
        self._offsets: Any = array("q", [0])
        self.extend(strings)

    def extend(self, strings: Iterable[str]) -> None:
        """Append strings; not to a copy from a pickle."""
        if isinstance(strings, StringArray):
            self._offsets.extend(map(len(self._text).__add__, strings._offsets[1:]))
            self._text += strings._text
            return
        encoded = []
        for string in strings:
            if not isinstance(string, str):
                raise TypeError(f"{string!r} is not a str")
            encoded.append(string.encode("utf-8", _ERRORS))
        offsets = accumulate(map(len, encoded), initial=self._offsets.pop())
        self._offsets.extend(offsets)
        self._text += b"".join(encoded)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if protocol < 5:
            return _from_buffers, (bytes(self._text), bytes(self._offsets))
        return _from_buffers, (PickleBuffer(self._text), PickleBuffer(self._offsets))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        # Once for every sample: 140 ns, in a copy that is mapped 170, where a tuple takes 10.
        if index.__class__ is not int:
            if isinstance(index, slice):
                return tuple(self[position] for position in range(*index.indices(len(self))))
            index = operator.index(index)
        offsets = self._offsets
        if index < 0:
            index += len(offsets) - 1
            if index < 0:
                raise IndexError("index out of range")
        return str(self._text[offsets[index] : offsets[index + 1]], "utf-8", _ERRORS)

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray | tuple):
            return len(self) == len(other) and all(map(operator.eq, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a tuple's it would have to make every string

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"{type(self).__name__}([{shown}{', …' if len(self) > 3 else ''}], {len(self)} in all)"

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return len(self._text) + memoryview(self._offsets).nbytes


def _from_buffers(text: bytes | memoryview, offsets: bytes | memoryview) -> StringArray:
    strings = StringArray.__new__(StringArray)
    strings._text, strings._offsets = text, memoryview(offsets).cast("B").cast("q")
    return strings


@dataclass(frozen=True, slots=True)
class Catalog:
    """The objects of a dataset, by their position."""

    keys: StringArray  # relative to the dataset's URL
    sizes: array[int] | None = None  # in bytes, `UNKNOWN` where not known; None if no size is known
    etags: StringArray | None = None  # entity tags, an empty string for none; None if no object has one
    labels: Sequence[object] | None = None  # one each; None if there are none here
    checksums: StringArray | None = None  # ``algorithm:hexadecimal`` of the bytes, or empty; None if no object has one


def catalog_of_page(page: Sequence[ObjectMeta]) -> Catalog:
    """The objects of a page of a listing."""
    return Catalog(
        StringArray([entry["path"] for entry in page]),
        array("q", [entry["size"] for entry in page]),
        StringArray([strong(entry["e_tag"]) or "" for entry in page]),
    )


def join_pages(pages: Iterable[Catalog]) -> Catalog:
    """The objects of all pages, sorted by key; of a key that came twice, the last."""
    keys, sizes, etags = StringArray(), array("q"), StringArray()
    for page in pages:
        keys.extend(page.keys)
        sizes.extend(page.sizes or ())
        etags.extend(page.etags or ())
    found = Catalog(keys, sizes, etags if any(etags) else None)
    if all(map(operator.lt, keys, islice(keys, 1, None))):
        return found
    last = {key: position for position, key in enumerate(keys)}
    return _chosen(found, [last[key] for key in sorted(last)])


def without_folder_markers(found: Catalog) -> Catalog:
    """A sorted listing without the empty objects that S3's console and other tools make for a folder.

    Their keys end in ``/``, which obstore takes off: such a key is that of the whole listing, or other keys begin with
    it and a ``/``. The marker of a folder without objects looks like any empty object.
    """
    keys, empty = found.keys, np.flatnonzero(np.frombuffer(found.sizes or b"", np.int64) == 0).tolist()
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
        None if etags is None else StringArray(map(etags.__getitem__, order)),
    )


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
