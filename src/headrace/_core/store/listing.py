"""Lists of objects: complete listings of a store, the file that keeps one, and tables of a user's program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
from headrace._core.store.head import Head, check_form, strong
from headrace._core.store.ranges import map_all
from headrace._core.store.redaction import redact_url
from headrace._core.store.store import PAGE, Store
from headrace.errors import EmptyListingError, MissingExtraError, StoreError, StoreUnreachableError

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")

AT_ONCE = 16  # parts of a listing
PART = 2 * PAGE  # objects, at least, as expected
_BARE_MD5 = re.compile(r"[0-9a-f]{32}(?:-\d+)?")  # S3's tags in inventories; in responses they are quoted
_METADATA_KEY = b"headrace.listing"


async def list_objects(store: Store, suffix: str | tuple[str, ...] | None) -> Catalog:
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

    catalog = without_folder_markers(join_pages(await _list(store, "", take)))
    if len(catalog.keys):
        return catalog
    if suffix is None or not count:
        message = "the listing is empty; a URL names a whole directory, not a file or the beginning of a name"
    else:
        message = f"{count} objects were listed, but no key ends in suffix={suffix!r}"
    raise EmptyListingError(message, url=store.url)


async def list_heads(store: Store, prefix: str) -> list[Head]:
    """The metadata of all objects in a directory of a store, sorted by key; errors are those of `list_objects`."""
    pages = await _list(store, prefix, lambda page: [Head.of(entry["path"], entry) for entry in page])
    latest = {head.key: head for page in pages for head in page}  # an object may come twice
    return sorted(latest.values(), key=lambda head: head.key)


async def _list(store: Store, prefix: str, take: Callable[[Sequence[ObjectMeta]], T]) -> list[T]:
    """What `take` makes of each page of the objects in a directory, nearly always in the order of keys."""
    try:
        return await _list_in_parts(store, prefix.strip("/"), take)
    except StoreUnreachableError:
        raise
    except StoreError as error:
        if not store.traits.web_server:
            raise
        message = (
            f"this server cannot list, over HTTP that takes WebDAV; name objects with keys=[...] and shards as in "
            f"'{{000..127}}.tar', or, if it speaks S3, use Store('s3://bucket', "
            f"options={{'endpoint': 'https://host'}}): {str(error).removesuffix(f' ({store.url})')}"
        )
        failure = StoreError(message, url=store.url, status=error.status)
    raise failure


class _UnorderedError(Exception):
    """This store's keys do not come sorted, so that they cannot be listed in parts."""


async def _list_in_parts(store: Store, prefix: str, take: Callable[[Sequence[ObjectMeta]], T]) -> list[T]:
    """List a directory, in parts if its first page is full.

    Each page of a listing names the start of the next, so a million keys take a thousand round trips in sequence. But a
    listing may begin after any key, and directories give such keys.
    """
    async with aclosing(store.pages(prefix or None)) as pages:
        first = await anext(pages, None) or ()
        bounds = await _find_bounds(store, prefix, first) if store.traits.list_in_order else []
        if not bounds:
            return [take(first), *[take(page) async for page in pages]]

    async def list_part(bounds: tuple[str, str]) -> list[T]:
        part, (after, until) = [], bounds
        async with aclosing(store.pages(prefix or None, after=after)) as pages:
            async for page in pages:
                keys = [entry["path"] for entry in page]
                if keys != sorted(keys):
                    raise _UnorderedError
                inside = bisect_right(keys, until) if until else len(keys)
                part.append(take(page[:inside]))
                if inside < len(keys):
                    break
        return part

    try:
        parts = await map_all(list_part, pairwise([*bounds, ""]))
    except _UnorderedError:
        return [take(page) async for page in store.pages(prefix or None)]
    return [take(first), *chain.from_iterable(parts)]


async def _find_bounds(store: Store, prefix: str, page: Sequence[ObjectMeta]) -> list[str]:
    """The keys after which the parts of a listing begin, by its first page; empty if there would be one part only.

    Requested are the directories in those that hold the whole page, but for one whose own objects fill it: they would
    all come a second time.
    """
    keys = [entry["path"] for entry in page]
    if len(keys) < PAGE or keys != sorted(keys):  # the last page, or a store of another order
        return []
    first, last = (key.split("/")[:-1] for key in (keys[0], keys[-1]))
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))])
    outermost = len(prefix.split("/")) if prefix else 0
    paths = ["/".join(first[:depth]) for depth in range(outermost, shared + (first != last))]
    store.stats.requests += len(paths)
    requests = [obstore.list_with_delimiter_async(store.backend(), path or None) for path in paths]
    levels = await asyncio.gather(*requests, return_exceptions=True)  # the listing itself reports errors
    found = {border for level in levels if not isinstance(level, BaseException) for border in level["common_prefixes"]}
    borders = sorted(found)
    passed = bisect_right(borders, keys[-1])
    ahead = borders[passed:]
    count = min(AT_ONCE, len(page) * len(ahead) // (max(1, passed) * PART))  # by the objects between borders so far
    return [keys[-1], *(ahead[len(ahead) * part // count] for part in range(1, count))] if count > 1 else []


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
    """A Parquet file that keeps the listing of a store; its methods block."""

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
