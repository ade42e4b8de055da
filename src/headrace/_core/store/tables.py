"""Tables of objects: those of a user's program, and the file that keeps a listing."""

from __future__ import annotations

import contextlib
import json
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace._core.store.catalog import UNKNOWN, Catalog, StringArray, compact
from headrace._core.store.head import check_form, strong
from headrace._core.store.redaction import redact_url
from headrace._core.store.store import Store
from headrace.errors import MissingExtraError

_BARE_MD5 = re.compile(r"[0-9a-f]{32}(?:-\d+)?")  # S3's tags in inventories; in responses they are quoted
_METADATA_KEY = b"headrace.listing"


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
