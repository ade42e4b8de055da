"""Lists of objects as columns: complete listings of a store."""

from __future__ import annotations

import asyncio
import bisect
import operator
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise, takewhile
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeVar, overload

from headrace._core.extras import require
from headrace._core.store.answers import answerable
from headrace._core.store.errors import NO_LISTING
from headrace._core.store.head import LARGEST, Head, strong
from headrace._core.store.ranges import map_all
from headrace._core.store.store import PAGE, Store
from headrace.errors import EmptyListingError, StoreError

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")

AT_ONCE = 16  # parts of a listing
PART = 2 * PAGE  # objects, at least, as expected

UNKNOWN = -1
"""The size of an object of unknown size."""

Labels = Callable[[str], object] | Mapping[str, object] | Sequence[object] | None

# Keys of files may have bytes that are not UTF-8, which Python holds as surrogates.
_ERRORS = "surrogatepass"


class StringArray(Sequence[str]):
    """An immutable sequence of strings: one buffer of UTF-8, and offsets.

    Other processes of this machine map both buffers of a pickle. NumPy's `StringDType` is pickled
    as Python strings: 1.28 million keys take 1.6 s to another process, and these 0.1 s.
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

    def buffers(self) -> tuple[memoryview, memoryview]:
        """The UTF-8, and the offsets."""
        return memoryview(self._text), memoryview(self._offsets).cast("B")

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

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return (
            f"{type(self).__name__}([{shown}{', …' if len(self) > 3 else ''}], {len(self)} in all)"
        )


def _from_buffers(text: bytes | memoryview, offsets: bytes | memoryview) -> StringArray:
    strings = StringArray.__new__(StringArray)
    strings._text, strings._offsets = text, memoryview(offsets).cast("B").cast("q")
    return strings


@dataclass(frozen=True, slots=True)
class Catalog:
    """The objects of a dataset, by their position."""

    keys: StringArray  # relative to the dataset's URL
    sizes: array[int] | None = None  # in bytes, `UNKNOWN` where not known; None if no size is known
    etags: StringArray | None = (
        None  # entity tags, an empty string for none; None if no object has one
    )
    checksums: StringArray | None = (
        None  # ``algorithm:hexadecimal`` of the bytes, or empty; None if no object has one
    )

    def buffers(self) -> list[memoryview]:
        """The columns of a listing as bytes."""
        etags = self.etags or StringArray([""] * len(self.keys))
        return [
            *self.keys.buffers(),
            memoryview(self.sizes or array("q")).cast("B"),
            *etags.buffers(),
        ]

    @classmethod
    def from_buffers(cls, buffers: Sequence[memoryview]) -> Catalog:
        keys, offsets, sizes, etags, ends = map(bytes, buffers)
        return cls(_from_buffers(keys, offsets), array("q", sizes), _from_buffers(etags, ends))


def catalog_of_page(page: Sequence[ObjectMeta]) -> Catalog:
    return Catalog(
        StringArray([entry["path"] for entry in page]),
        array("q", [min(entry["size"], LARGEST) for entry in page]),
        StringArray([strong(entry["e_tag"]) or "" for entry in page]),
    )


def join_pages(pages: Iterable[Catalog], url: str = "") -> Catalog:
    """The objects of all pages, sorted by key, without the markers of folders."""
    keys, sizes, etags = StringArray(), array("q"), StringArray()
    for page in pages:
        keys.extend(page.keys)
        sizes.extend(page.sizes or ())
        etags.extend(page.etags or ())
    if not all(sizes) or any(map(operator.ge, keys, islice(keys, 1, None))):
        order = _positions(keys, [*zip(sizes, etags, strict=True)], url)
        keys, etags = (StringArray(map(column.__getitem__, order)) for column in (keys, etags))
        sizes = array("q", map(sizes.__getitem__, order))
    return Catalog(keys, sizes, etags if any(etags) else None)


def _positions(
    keys: Sequence[str], versions: Sequence[tuple[int, str | None]], url: str
) -> list[int]:
    """The positions of distinct keys in their order, the last of one that came twice; not those of markers of folders.

    obstore takes slashes off the ends of keys, so that two objects may have one key. S3's console
    and other tools make an empty object for a folder, whose key ends in one: such a key is that of
    the whole listing, or other keys begin with it and a ``/``. The marker of a folder without
    objects looks like any empty object.
    """
    last: dict[str, int] = {}
    for position, (key, version) in enumerate(zip(keys, versions, strict=True)):
        before = versions[last.setdefault(key, position)]
        if version == before or not before[0]:
            last[key] = position
        elif version[0]:
            why = "keys differ by a slash at an end, or one was overwritten meanwhile"
            raise StoreError(
                f"two objects are listed as {key!r}: {why}. Rename it, or list again", url=url
            )
    found = sorted(last)
    return [last[key] for key in found if versions[last[key]][0] or not _is_folder(found, key)]


def _is_folder(keys: Sequence[str], key: str) -> bool:
    inside = bisect.bisect_left(keys, f"{key}/")
    return not key or (inside < len(keys) and keys[inside].startswith(f"{key}/"))


def align_labels(labels: Labels, keys: Sequence[str]) -> Sequence[Any] | None:
    """The label of each of `keys`, in their order; None if no labels were given.

    Functions are called here, once: a missing label is an error of the constructor and not of
    mid-epoch, and a dataset can be pickled whatever function it was given.
    """
    if labels is None:
        return None
    if callable(labels):
        return compact(labels(key) for key in keys)  # not `map`, which a StopIteration would end
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
        given = type(labels).__name__
        raise TypeError(
            f'labels= must be "folder", a function of a key, a mapping or a sequence, not {given}'
        )
    if len(labels) != len(keys):
        raise ValueError(
            f"labels= has {len(labels)} labels for {len(keys)} keys; they are matched in the order of `keys`"
        )
    return labels


def folders_of(keys: Iterable[str]) -> tuple[str, ...]:
    """The first parts of the keys, sorted; raises `ValueError` if a key has one part only."""
    folders = set()
    for key in keys:
        folder, slash, _ = key.partition("/")
        if not slash:
            raise ValueError(
                f'classes and labels="folder" need each key in the folder of its class: {key!r} is in none'
            )
        folders.add(folder)
    return tuple(sorted(folders))


class KeyedSamples:
    """The public methods of a dataset whose samples have keys."""

    _keys: Sequence[str]
    _classes: tuple[str, ...] | None = None  # that labels are numbers of
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
        """The key of each sample, in the order of their indices."""
        return self._keys

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the numbers in labels: `classes=`, or the folders that keys begin with, sorted.

        Raises:
            ValueError: a key is in no folder.
        """
        return folders_of(self._keys) if self._classes is None else self._classes

    def __len__(self) -> int:
        return len(self._keys)

    def sample_key(self, index: int) -> str:
        """The key at `index`."""
        return self._keys[index]


def compact(labels: Iterable[Any]) -> Sequence[object]:
    """Labels in less memory: numbers of one type in an array, equal strings as one object. Types are preserved."""
    interned: dict[str, str] = {}
    row = [interned.setdefault(label, label) if type(label) is str else label for label in labels]
    kinds = set(map(type, row))
    if kinds == {int}:
        try:
            return array("q", row)
        except OverflowError:  # more than 64 bits
            return row
    return array("d", row) if kinds == {float} else row


async def list_objects(store: Store, suffix: str | tuple[str, ...] | None) -> Catalog:
    """All objects of a store whose keys end in `suffix`, sorted, without markers of folders; raises `StoreError`."""
    return Catalog.from_buffers(await _list_objects(store, suffix))


@answerable
async def _list_objects(store: Store, suffix: str | tuple[str, ...] | None) -> list[memoryview]:
    def take(page: Sequence[ObjectMeta]) -> Catalog:
        return catalog_of_page(
            [entry for entry in page if suffix is None or entry["path"].endswith(suffix)]
        )

    catalog = join_pages(await _list_in_parts(store, "", take), store.url)
    if len(catalog.keys):
        return catalog.buffers()
    named = "" if suffix is None else f" whose key ends in suffix={suffix!r}"
    message = f"no object{named} is listed; a URL names a whole directory, not a file or the beginning of a name"
    raise nothing_listed(store, message, store.url)


def nothing_listed(store: Store, problem: str, url: str) -> EmptyListingError:
    """The error for a listing without a match; a web server that cannot list may answer as one without files."""
    return EmptyListingError(
        f"{problem}; {NO_LISTING}" if store.traits.web_server else problem, url=url
    )


@answerable
async def list_heads(store: Store, prefix: str) -> list[Head]:
    """The metadata of all objects in a directory of a store, sorted by key; errors are those of `list_objects`."""
    return _distinct(await _list_in_parts(store, prefix.strip("/"), _heads), store)


def _heads(page: Sequence[ObjectMeta]) -> list[Head]:
    return [Head.of(entry["path"], entry) for entry in page]


def _distinct(pages: Iterable[Sequence[Head]], store: Store) -> list[Head]:
    heads = [*chain.from_iterable(pages)]
    keys = [head.key for head in heads]
    return [
        heads[each]
        for each in _positions(keys, [(head.size, head.etag) for head in heads], store.url)
    ]


@answerable
async def list_level(store: Store, glob: re.Pattern[str], folder: str) -> list[Head]:
    """The objects in a directory whose names match, and the directories whose names do, whose keys end in a slash.

    `folder` is empty or ends in a slash. Errors are those of `list_objects`.
    """
    level = await store.level(folder)
    folders = [Head(f"{each}/", 0, None) for each in level["common_prefixes"]]
    heads = _distinct((_heads(level["objects"]), folders), store)
    inside = [head for head in heads if head.key.startswith(folder) and head.key != folder]
    return [head for head in inside if glob.fullmatch(head.key[len(folder) :].removesuffix("/"))]


class _UnorderedError(Exception):
    """This store's keys do not come sorted, so that they cannot be listed in parts."""


async def _list_in_parts(
    store: Store, prefix: str, take: Callable[[Sequence[ObjectMeta]], T]
) -> list[T]:
    """List a directory, in parts if its first page is full.

    Each page of a listing names the start of the next, so a million keys take a thousand round
    trips in sequence. But a listing may begin after any key, and directories give such keys.
    """
    folder = prefix or None

    async def list_between(bounds: tuple[str, str]) -> list[T]:
        """List the keys that are after the first bound and not after the second, which is empty for none."""
        part, (after, until) = list[T](), bounds
        async with aclosing(store.pages(folder, after=after)) as pages:
            async for page in pages:
                keys = [entry["path"] for entry in page]
                if keys != sorted(keys):
                    raise _UnorderedError
                inside = bisect.bisect_right(keys, until) if until else len(keys)
                part.append(take(page[:inside]))
                if inside < len(keys):
                    break
        return part

    async with aclosing(store.pages(folder)) as pages:
        first = await anext(pages, None) or ()
        bounds = await _find_bounds(store, prefix, first) if store.traits.list_in_order else []
        if not bounds:
            return [take(first), *[take(page) async for page in pages]]
    try:
        parts = await map_all(list_between, pairwise([*bounds, ""]))
    except _UnorderedError:
        return [take(page) async for page in store.pages(folder)]
    return [take(first), *chain.from_iterable(parts)]


async def _find_bounds(store: Store, prefix: str, page: Sequence[ObjectMeta]) -> list[str]:
    """The keys after which the parts of a listing begin, by its first page; empty if there would be one part only.

    Requested are the directories in those that hold the whole page, but for one whose own objects
    fill it: they would all come a second time.
    """
    keys = [entry["path"] for entry in page]
    if len(keys) < PAGE or keys != sorted(keys):  # the last page, or a store of another order
        return []
    first, last = (key.split("/")[:-1] for key in (keys[0], keys[-1]))
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))])
    outermost = len(prefix.split("/")) if prefix else 0
    paths = ["/".join(first[:depth]) for depth in range(outermost, shared + (first != last))]
    levels = await asyncio.gather(
        *map(store.level, paths), return_exceptions=True
    )  # the listing itself reports errors
    found = {
        border
        for level in levels
        if not isinstance(level, BaseException)
        for border in level["common_prefixes"]
    }
    borders = sorted(found)
    passed = bisect.bisect_right(borders, keys[-1])
    ahead = borders[passed:]
    count = min(
        AT_ONCE, len(page) * len(ahead) // (max(1, passed) * PART)
    )  # by the objects between borders so far
    return (
        [keys[-1], *(ahead[len(ahead) * part // count] for part in range(1, count))]
        if count > 1
        else []
    )


def require_pyarrow(what: str) -> Any:
    """Pyarrow's Parquet module, which `what` needs; raises `MissingExtraError` if it is not installed."""
    return require("pyarrow.parquet", what, "pyarrow", "parquet")
