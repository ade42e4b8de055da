"""Complete listings of a store, as columns."""

from __future__ import annotations

import bisect
import operator
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeVar, overload

from headrace._extras import require
from headrace._store.errors import NO_LISTING
from headrace._store.head import LARGEST, Head, strong
from headrace._store.ranges import map_all
from headrace._store.store import PAGE, Store
from headrace.errors import EmptyListingError, StoreError

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")

AT_ONCE = 16  # directories listed at the same time
MOST_FOLDERS = 4  # on the first page of a directory that is listed by directories

UNKNOWN = -1
"""Stands for an unknown size of an object."""

Labels = Callable[[str], object] | Mapping[str, object] | Sequence[object] | None

# Keys of files may have bytes that are not UTF-8. Python holds such bytes as surrogates.
_ERRORS = "surrogatepass"


class StringArray(Sequence[str]):
    """An immutable sequence of strings: a buffer of UTF-8, and offsets.

    Other processes of the machine map both buffers of a pickle. 1.28 million keys reach another
    process in 0.1 s. NumPy's `StringDType` is pickled as Python strings and takes 1.6 s.
    """

    __slots__ = ("_offsets", "_text")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._text: Any = bytearray()  # in a copy from a pickle: bytes or a view
        self._offsets: Any = array("q", [0])
        self.extend(strings)

    def extend(self, strings: Iterable[str]) -> None:
        """Append strings. A copy from a pickle cannot be extended."""
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
        offsets = self._offsets
        position = range(len(offsets) - 1)[index]
        if isinstance(position, range):
            return tuple(map(self.__getitem__, position))
        return str(
            self._text[offsets[position] : offsets[position + 1]], "utf-8", _ERRORS
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray | tuple):
            return len(self) == len(other) and all(map(operator.eq, self, other))
        return NotImplemented

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        more = ", …" if len(self) > 3 else ""
        return f"{type(self).__name__}([{shown}{more}], {len(self)} in all)"


def _from_buffers(text: bytes | memoryview, offsets: bytes | memoryview) -> StringArray:
    strings = StringArray.__new__(StringArray)
    strings._text, strings._offsets = text, memoryview(offsets).cast("B").cast("q")
    return strings


@dataclass(frozen=True, slots=True)
class Catalog:
    """The objects of a dataset, as columns by position."""

    keys: StringArray  # relative to the dataset's URL
    sizes: array[int] | None = None  # bytes, or `UNKNOWN`; None if no size is known
    # Entity tags. An object without a tag has an empty string; None if no object has a tag.
    etags: StringArray | None = None
    # ``algorithm:hexadecimal`` of the bytes, or an empty string; None if no object has a checksum.
    checksums: StringArray | None = None


def _join_pages(pages: Iterable[Catalog], url: str) -> Catalog:
    """Join pages, sorted by key, without folder markers."""
    keys, sizes, etags = StringArray(), array("q"), StringArray()
    for page in pages:
        keys.extend(page.keys)
        sizes.extend(page.sizes or ())
        etags.extend(page.etags or ())
    if not all(sizes) or any(map(operator.ge, keys, islice(keys, 1, None))):
        order = _positions(keys, [*zip(sizes, etags, strict=True)], url)
        keys, etags = (
            StringArray(map(column.__getitem__, order)) for column in (keys, etags)
        )
        sizes = array("q", map(sizes.__getitem__, order))
    return Catalog(keys, sizes, etags if any(etags) else None)


def _positions(
    keys: Sequence[str], versions: Sequence[tuple[int, str | None]], url: str
) -> list[int]:
    """Return the positions of distinct keys, in the order of keys.

    If a key is listed twice, the last position counts. Folder markers are left out: S3's console
    and other tools make an empty object for a folder, with a key that ends in a slash. obstore
    removes slashes at the ends of keys, so two different objects may have the same key. An empty
    object is a folder marker if the key is empty, or if other keys begin with the key and a ``/``.
    The marker of a folder without objects looks like any empty object, and stays.

    Raises:
        StoreError: two objects with content have the same key and different versions.
    """
    last: dict[str, int] = {}
    for position, (key, version) in enumerate(zip(keys, versions, strict=True)):
        before = versions[last.setdefault(key, position)]
        if version == before or not before[0]:
            last[key] = position
        elif version[0]:
            why = "keys differ by a slash at an end, or one was overwritten meanwhile"
            raise StoreError(
                f"two objects are listed as {key!r}: {why}. Rename it, or list again",
                url=url,
            )
    found = sorted(last)
    return [
        last[key] for key in found if versions[last[key]][0] or not _is_folder(found, key)
    ]


def _is_folder(keys: Sequence[str], key: str) -> bool:
    inside = bisect.bisect_left(keys, f"{key}/")
    return not key or (inside < len(keys) and keys[inside].startswith(f"{key}/"))


def align_labels(labels: Labels, keys: Sequence[str]) -> Sequence[Any] | None:
    """Return the label of each key, in the order of `keys`.

    Returns None if no labels were given. A function is called for all keys at once, when the
    dataset is made. So a missing label is an error of the constructor, not an error in the middle
    of an epoch, and the dataset can be pickled with any function.
    """
    if labels is None:
        return None
    if callable(labels):
        # Not `map`: a StopIteration would end `map`.
        return compact(labels(key) for key in keys)
    if isinstance(labels, Mapping):
        missing = [key for key in keys if key not in labels]
        if missing:
            raise ValueError(
                f"labels= has no label for {len(missing)} of {len(keys)} keys, the first is "
                f"{missing[0]!r}"
            )
        return compact(labels[key] for key in keys)
    if hasattr(labels, "iloc") and getattr(labels, "ndim", 1) == 1:
        # In a pandas Series, labels[0] is the value with the index 0, at any position.
        labels = compact(labels)
    unusable = isinstance(labels, str | bytes) or hasattr(labels, "iloc")
    if unusable or not hasattr(labels, "__getitem__"):
        given = type(labels).__name__
        raise TypeError(
            f'labels= must be "folder", a function of a key, a mapping or a sequence, not {given}'
        )
    if len(labels) != len(keys):
        raise ValueError(
            f"labels= has {len(labels)} labels for {len(keys)} keys; they are matched in the order "
            f"of `keys`"
        )
    return labels


def folders_of(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the first folders of all keys, sorted.

    Raises:
        ValueError: a key is in no folder.
    """
    folders = set()
    for key in keys:
        folder, slash, _ = key.partition("/")
        if not slash:
            raise ValueError(
                f'classes and labels="folder" need each key in the folder of its class: {key!r} '
                f"is in none"
            )
        folders.add(folder)
    return tuple(sorted(folders))


class KeyedSamples:
    """Public methods of a dataset with a key for each sample."""

    _keys: Sequence[str]
    _classes: tuple[str, ...] | None = None  # names of the numbers in `_labels`
    _labels: Sequence[Any] | None

    def _set_labels(self, labels: Labels, classes: Sequence[str] | None) -> None:
        if isinstance(labels, str) and labels == "folder":
            self._classes = tuple(folders_of(self._keys) if classes is None else classes)
            numbers = {name: number for number, name in enumerate(self._classes)}
            try:
                labels = compact(numbers[key.partition("/")[0]] for key in self._keys)
            except KeyError as name:
                raise ValueError(f"classes= does not name the folder {name}") from None
        elif classes is not None:
            raise ValueError('classes= are the names of folders, for labels="folder"')
        self._labels = align_labels(labels, self._keys)

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the samples, in the order of indices."""
        return self._keys

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, by the numbers in labels.

        The names are `classes=`, or else the first folders of all keys, sorted.

        Raises:
            ValueError: a key is in no folder.
        """
        return folders_of(self._keys) if self._classes is None else self._classes

    def __len__(self) -> int:
        return len(self._keys)

    def sample_key(self, index: int) -> str:
        """Return the key at `index`."""
        return self._keys[index]


def compact(labels: Iterable[Any]) -> Sequence[object]:
    """Store labels in less memory. Types are preserved.

    If all labels are `int`, or all are `float`, the labels become an array. Equal strings become
    the same object.
    """
    interned: dict[str, str] = {}
    row = [
        interned.setdefault(label, label) if type(label) is str else label
        for label in labels
    ]
    kinds = set(map(type, row))
    if kinds == {int}:
        try:
            return array("q", row)
        except OverflowError:  # more than 64 bits
            return row
    return array("d", row) if kinds == {float} else row


async def list_objects(store: Store, suffix: str | tuple[str, ...] | None) -> Catalog:
    """List all objects with keys that end in `suffix`.

    The objects are sorted by key, without folder markers.

    Raises:
        EmptyListingError: no object is listed.
        StoreError: the store refused or failed, or lists without end.
    """

    def take(page: Sequence[ObjectMeta]) -> Catalog:
        entries = [
            each for each in page if suffix is None or each["path"].endswith(suffix)
        ]
        return Catalog(
            StringArray([entry["path"] for entry in entries]),
            array("q", [min(entry["size"], LARGEST) for entry in entries]),
            StringArray([strong(entry["e_tag"]) or "" for entry in entries]),
        )

    catalog = _join_pages(await _list_by_folders(store, "", take), store.url)
    if len(catalog.keys):
        return catalog
    named = "" if suffix is None else f" whose key ends in suffix={suffix!r}"
    message = (
        f"no object{named} is listed; a URL names a whole directory, not a file or the beginning "
        f"of a name"
    )
    raise nothing_listed(store, message, store.url)


def nothing_listed(store: Store, problem: str, url: str) -> EmptyListingError:
    """Return the error for a listing without a match.

    A web server that cannot list may answer like a server without files.
    """
    return EmptyListingError(
        f"{problem}; {NO_LISTING}" if store.traits.web_server else problem, url=url
    )


async def list_heads(store: Store, prefix: str) -> list[Head]:
    """List the metadata of all objects in a directory, sorted by key.

    Raises `StoreError` as `list_objects` does.
    """
    pages = await _list_by_folders(store, prefix.strip("/"), _heads)
    return _distinct([*chain.from_iterable(pages)], store)


def _heads(page: Sequence[ObjectMeta]) -> list[Head]:
    return [Head.of(entry["path"], entry) for entry in page]


def _distinct(heads: Sequence[Head], store: Store) -> list[Head]:
    versions = [(head.size, head.etag) for head in heads]
    found = _positions([head.key for head in heads], versions, store.url)
    return [heads[position] for position in found]


async def list_level(store: Store, glob: re.Pattern[str], folder: str) -> list[Head]:
    """List the objects and directories in `folder` with matching names.

    Args:
        store: the store to list.
        glob: pattern of the names.
        folder: key of the directory; empty, or with a slash at the end.

    Returns:
        Objects and directories. Keys of directories end in a slash.

    Raises:
        StoreError: the store refused or failed, or lists without end.
    """
    level = await store.level(folder)
    folders = [Head(f"{each}/", 0, None) for each in level["common_prefixes"]]
    return [
        head
        for head in _distinct([*_heads(level["objects"]), *folders], store)
        if head.key.startswith(folder)
        and head.key != folder
        and glob.fullmatch(head.key.removeprefix(folder).removesuffix("/"))
    ]


async def _list_by_folders(
    store: Store, prefix: str, take: Callable[[Sequence[ObjectMeta]], T]
) -> list[T]:
    """List a directory: directories of many objects concurrently.

    Each page of a listing names the start of the next page, so a million keys take a thousand round
    trips in sequence. If the first page shows directories of many objects, each directory is listed
    by itself.
    """
    async with aclosing(store.pages(prefix or None)) as pages:
        first = await anext(pages, None) or ()
        if not _has_large_folders(store, prefix, first):
            return [take(first), *[take(page) async for page in pages]]
    level = await store.level(prefix)

    async def list_folder(folder: str) -> list[T]:
        return await _list_by_folders(store, folder, take)

    parts = await map_all(list_folder, level["common_prefixes"], AT_ONCE)
    return [take(level["objects"]), *chain.from_iterable(parts)]


def _has_large_folders(store: Store, prefix: str, first: Sequence[ObjectMeta]) -> bool:
    """Return whether the first page of a listing is full of objects of few directories.

    False if the page ends with an object directly in the listed directory: to find the directories,
    the store would list all these objects a second time.
    """
    if len(first) < PAGE or not store.traits.remote or store.traits.web_server:
        return False
    depth = len(prefix) + 1 if prefix else 0
    folders = [entry["path"][depth:].partition("/")[0] for entry in first]
    in_folder = first[-1]["path"][depth:] != folders[-1]
    return in_folder and len({*folders}) <= MOST_FOLDERS


def require_pyarrow(what: str) -> Any:
    """Return pyarrow's Parquet module for `what`.

    Raises `MissingExtraError` if pyarrow is not installed.
    """
    return require("pyarrow.parquet", what, "pyarrow", "parquet")
