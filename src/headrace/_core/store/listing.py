"""Lists of objects: complete listings of a store, the file that keeps one, and tables of a user's program.

Each page of a listing names the start of the next, so a million keys take a thousand round trips in sequence. But a
listing may begin after any key. While the first pages come, the store is asked for its directories; the stretch of
keys that is left is split at one of them, and each part is listed by itself and split again while requests are to
spare. A store without directories is listed page after page, by the same requests as without this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import obstore

from headrace._core.store.catalog import (
    UNKNOWN,
    Catalog,
    StringArray,
    catalog_of_page,
    compact,
    join_pages,
    without_folder_markers,
)
from headrace._core.store.client import PAGE, StoreClient
from headrace._core.store.errors import NATIVE_ERRORS
from headrace._core.store.head import Head, check_form, strong
from headrace._core.store.redaction import redact_url
from headrace._core.store.store import Store
from headrace.errors import EmptyListingError, MissingExtraError, StoreError, StoreUnreachableError

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")

_BARE_MD5 = re.compile(r"[0-9a-f]{32}(?:-\d+)?")  # S3's tags in inventories; in responses they are quoted
_METADATA_KEY = b"headrace.listing"
MIN_SPLIT = 2 * PAGE  # keys that are expected in a stretch that is split, by the number between directories so far


async def list_objects(client: StoreClient, suffix: str | tuple[str, ...] | None) -> Catalog:
    """All objects of a store whose keys end in `suffix`, sorted by their keys, without the markers of folders.

    Raises:
        EmptyListingError: there is none.
        StoreUnreachableError: no answer within the time-out, on every attempt.
        StoreError: the store refused, failed, or cannot list.
    """
    count = 0

    def take(page: Sequence[ObjectMeta]) -> Catalog:
        nonlocal count
        count += len(page)
        return catalog_of_page([entry for entry in page if suffix is None or entry["path"].endswith(suffix)])

    catalog = without_folder_markers(join_pages(await _list(client, "", take)))
    if len(catalog.keys):
        return catalog
    if suffix is None or not count:
        message = "the listing is empty; a URL names a whole directory, not a file or the beginning of a name"
    else:
        message = f"{count} objects were listed, but no key ends in suffix={suffix!r}"
    raise EmptyListingError(message, url=redact_url(client.url))


async def list_heads(client: StoreClient, prefix: str) -> list[Head]:
    """The metadata of all objects in a directory of a store, sorted by key; errors are those of `list_objects`."""
    pages = await _list(client, prefix, lambda page: [Head.of(entry["path"], entry) for entry in page])
    latest = {head.key: head for page in pages for head in page}  # an object may come twice
    return sorted(latest.values(), key=lambda head: head.key)


async def _list(client: StoreClient, prefix: str, take: Callable[[Sequence[ObjectMeta]], T]) -> list[T]:
    """What `take` makes of each page of the objects in a directory, nearly always in the order of keys."""
    try:
        if client.traits.list_in_order:
            with contextlib.suppress(UnorderedError):  # then page after page, from the first
                return await PrefixListing(client, prefix, take).run()
        return [take(page) async for page in client.pages(prefix or None)]
    except StoreUnreachableError:
        raise
    except StoreError as error:
        if not client.traits.web_server:
            raise
        url = redact_url(client.url)
        message = (
            f"this server cannot list, over HTTP that takes WebDAV; name objects with keys=[...] and shards as in "
            f"'{{000..127}}.tar', or, if it speaks S3, use "
            f"Store('s3://bucket', options={{'endpoint': 'https://host'}}): {str(error).removesuffix(f' ({url})')}"
        )
        failure = StoreError(message, url=url, status=error.status)
    raise failure


class UnorderedError(Exception):
    """This store's keys do not come sorted, so that they cannot be listed in stretches."""


@dataclass(slots=True, eq=False)
class _Stretch(Generic[T]):
    """Keys that are listed in sequence.

    Attributes:
        after: the key after which it begins; empty for the first stretch.
        until: its last key; None for the last stretch. Moves down when the stretch is split.
        last: the last key that has been listed.
        pages: of the objects that have been listed.
    """

    after: str
    until: str | None
    last: str
    pages: list[T] = field(default_factory=list)


class PrefixListing(Generic[T]):
    """One listing of a store that lists in order; `take` makes of each page what is kept of it."""

    def __init__(self, client: StoreClient, prefix: str, take: Callable[[Sequence[ObjectMeta]], T]) -> None:
        self._client = client
        self._prefix = prefix.strip("/")
        self._take = take
        self._count = 0  # objects that were listed
        self._stretches: list[_Stretch[T]] = []
        self._listing: set[_Stretch[T]] = set()
        self._borders: list[str] = []  # directories, sorted: where a stretch may be split
        self._directories: dict[str, asyncio.Task[None]] = {}  # requests for directories, by their path

    async def run(self) -> list[T]:
        """List all objects; returns their pages, nearly always sorted by key.

        Raises:
            UnorderedError: the keys do not come sorted.
            StoreError: the store refused or failed.
        """
        failure: BaseException | None = None  # raised after the handler, so that the group is not its context
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._start("", None)
        except BaseExceptionGroup as errors:
            failure = errors.exceptions[0]  # which ended the others
        if failure is not None:
            raise failure
        self._stretches.sort(key=operator.attrgetter("after"))
        return [page for stretch in self._stretches for page in stretch.pages]

    def _start(self, after: str, until: str | None) -> None:
        stretch: _Stretch[T] = _Stretch(after, until, after)
        self._stretches.append(stretch)
        self._listing.add(stretch)
        self._group.create_task(self._list(stretch))

    async def _list(self, stretch: _Stretch[T]) -> None:
        try:
            async with aclosing(self._client.pages(self._prefix or None, after=stretch.after or None)) as pages:
                async for page in pages:
                    if self._add_page(stretch, page):
                        break
                    if len(page) >= PAGE:  # a shorter one is the last
                        self._split()
                        self._request_directories(page[0]["path"], stretch.last)
        except BaseException:  # of any kind: nothing more is to be started
            self._listing.clear()
            raise
        self._listing.discard(stretch)
        self._split()
        if not self._listing:
            for task in self._directories.values():
                task.cancel()

    def _add_page(self, stretch: _Stretch[T], page: Sequence[ObjectMeta]) -> bool:
        """Take a page; return whether it reached the end of the stretch."""
        keys = [entry["path"] for entry in page]
        if keys[0] < stretch.last or not all(first <= second for first, second in pairwise(keys)):
            raise UnorderedError
        inside = len(keys) if stretch.until is None else bisect_right(keys, stretch.until)
        stretch.last = keys[-1]
        self._count += inside
        stretch.pages.append(self._take(page[:inside] if inside < len(keys) else page))
        return stretch.until is not None and stretch.last >= stretch.until

    def _request_directories(self, first: str, last: str) -> None:
        """Request the subdirectories of those that hold a whole page, from key `first` to `last`."""
        common = [one for one, other in zip(_parents(first), _parents(last), strict=False) if one == other]
        innermost = len(common) == len(_parents(last)) == len(_parents(first))
        if innermost:
            # This one holds objects by the page, which would all come a second time.
            if common[-1] in self._directories:
                self._directories[common[-1]].cancel()
            common.pop()
        outside = self._prefix.count("/") + 1 if self._prefix else 0  # directories above the prefix
        for path in common[outside:]:
            if path not in self._directories and self._idle() > 0:
                self._directories[path] = self._group.create_task(self._add_borders(path))

    async def _add_borders(self, path: str) -> None:
        """Request the directories under a path by one attempt; the listing itself, with its retries, reports errors."""
        self._client.stats.requests += 1
        try:
            level = await obstore.list_with_delimiter_async(self._client.store, path or None)
        except NATIVE_ERRORS:
            return
        borders = level["common_prefixes"]
        self._borders = sorted({*self._borders, *borders})
        self._split()

    def _idle(self) -> int:
        asking = sum(not task.done() for task in self._directories.values())
        return self._client.list_concurrency - len(self._listing) - asking

    def _split(self) -> None:
        """Split the longest stretches, while requests are to spare and it saves more than it costs."""
        while self._listing and self._idle() > 0:
            ahead, stretch = max(
                ((self._ahead(stretch), stretch) for stretch in self._listing), key=lambda pair: len(pair[0])
            )
            if len(ahead) * self._objects_per_border() < MIN_SPLIT:
                return
            middle = self._borders[ahead[len(ahead) // 2]]
            until, stretch.until = stretch.until, middle
            self._start(middle, until)

    def _ahead(self, stretch: _Stretch[T]) -> range:
        """The borders that are still to come in a stretch."""
        stop = len(self._borders) if stretch.until is None else bisect_left(self._borders, stretch.until)
        return range(bisect_right(self._borders, stretch.last), stop)

    def _objects_per_border(self) -> float:
        """The number of objects between two borders, on average over what has been listed."""
        passed = sum(
            bisect_right(self._borders, stretch.last) - bisect_right(self._borders, stretch.after)
            for stretch in self._stretches
        )
        return self._count / max(1, passed)


def _parents(key: str) -> list[str]:
    """The directories that a key is in, the topmost first.

    Example:
        >>> _parents("train/cats/1.jpg")
        ['', 'train', 'train/cats']
    """
    parts = key.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]


def read_table(
    table: Any,
    store: Store,
    *,
    key: str,
    label: str | Sequence[str] | None,
    size: str | None,
    etag: str | None,
    checksum: str | None,
) -> Catalog:
    """The objects in the rows of a table: the arguments name its columns.

    Raises:
        ValueError: the table has no row or lacks a column, or a value is not a key, a size or a checksum.
    """
    keys = [_key(value, store, row) for row, value in enumerate(_column(table, key))]
    if not keys:
        raise ValueError("the table has no rows: a dataset needs at least one key")
    labels: Sequence[object] | None = None
    if isinstance(label, str):
        labels = compact(_column(table, label))
    elif label is not None:
        labels = list(zip(*(_column(table, name) for name in label), strict=True))
    sizes = None if size is None else array("q", map(_size, _column(table, size)))
    etags = None if etag is None else StringArray(map(_etag, _column(table, etag)))
    checksums = None if checksum is None else StringArray(map(_checksum, _column(table, checksum)))
    for name, column in ((label, labels), (size, sizes), (etag, etags), (checksum, checksums)):
        if column is not None and len(column) != len(keys):
            raise ValueError(f"column {name!r} has {len(column)} rows, and column {key!r} has {len(keys)}")
    return Catalog(StringArray(keys), sizes, etags, labels, checksums)


def _column(table: Any, name: str) -> list[Any]:
    """A column as Python values."""
    names = list(table) if isinstance(table, Mapping) else list(getattr(table, "column_names", None) or table.columns)
    if name not in names:
        raise ValueError(f"the table has no column {name!r}; its columns are {', '.join(map(repr, names))}")
    column = table[name]
    for method in ("to_pylist", "to_list", "tolist"):  # of pyarrow; of polars and pandas; of NumPy
        if hasattr(column, method):
            values: list[Any] = getattr(column, method)()
            return values
    return list(column)


def _key(value: object, store: Store, row: int) -> str:
    """The key, relative to the store's URL; accepts full URLs under it, and paths in its directory."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"row {row}: the key must be text, but got {value!r}")
    try:
        return store.key_of(value) if "://" in value or value.startswith("/") else value
    except ValueError as error:
        raise ValueError(f"row {row}: {error}") from None


def _size(value: Any) -> int:
    if value is None or value != value:  # NaN is pandas's missing value
        return UNKNOWN
    if value < 0 or int(value) != value:
        raise ValueError(f"{value!r} is not a number of bytes")
    return int(value)


def _etag(value: object) -> str:
    if not isinstance(value, str):
        return ""
    return f'"{value}"' if _BARE_MD5.fullmatch(value) else strong(value) or ""


def _checksum(value: object) -> str:
    if not isinstance(value, str):
        return ""
    check_form(value)
    return value


class ListingFile:
    """A Parquet file that keeps the listing of a store; its methods block.

    Args:
        path: the file.
        url: the dataset's.
        suffix: endings of the keys; None if all were listed.
    """

    def __init__(self, path: str | os.PathLike[str], url: str, suffix: str | tuple[str, ...] | None) -> None:
        if "://" in os.fspath(path):
            raise ValueError("listing_file= must be a local path, on a disk that all hosts share or on each host")
        self._path = Path(path).absolute()
        suffixes = [suffix] if isinstance(suffix, str) else suffix
        self._origin = json.loads(json.dumps({"url": redact_url(url).rstrip("/"), "suffix": suffixes}))

    def read(self) -> Catalog | None:
        """The listing, or None if there is no such file.

        Raises:
            ValueError: it is of another listing, damaged, or cannot be read.
        """
        parquet = _require_pyarrow()
        try:
            table = parquet.read_table(self._path, page_checksum_verification=True)
            found = json.loads((table.schema.metadata or {}).get(_METADATA_KEY, b"null"))
            columns = [table[name].to_pylist() for name in ("key", "size", "etag")]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, OSError) as error:  # pyarrow's errors are among these
            raise ValueError(
                f"{self._path} is not a listing, or is damaged; delete it to list again: {error}"
            ) from None
        if found != self._origin:
            raise ValueError(f"{self._path} is of the listing {found}, not of {self._origin}; delete it to list again")
        return Catalog(StringArray(columns[0]), array("q", columns[1]), StringArray(columns[2]))

    def write(self, catalog: Catalog) -> None:
        """Replace the file at once; raises `OSError` if it cannot be written."""
        parquet = _require_pyarrow()
        import pyarrow

        assert catalog.sizes is not None
        etags = catalog.etags or [""] * len(catalog.keys)
        columns = {"key": list(catalog.keys), "size": list(catalog.sizes), "etag": list(etags)}
        table = pyarrow.table(columns).replace_schema_metadata({_METADATA_KEY: json.dumps(self._origin).encode()})
        # In the same directory: a rename works within one file system only.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)
            os.replace(temporary, self._path)
        except BaseException:  # an interruption too leaves no part of a file
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            raise


def _require_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError(what="keeping a listing", package="pyarrow", extra="parquet") from None
    return pyarrow.parquet
