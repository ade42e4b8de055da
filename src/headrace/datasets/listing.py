"""Listing a store for a dataset of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from obstore.store import HTTPStore

from headrace.datasets.catalog import Catalog, CatalogBuilder
from headrace.errors import EmptyListingError, StoreError, StoreUnreachableError
from headrace.io.etags import strong
from headrace.io.reader import StoreReader
from headrace.io.urls import redact_url

if TYPE_CHECKING:
    from obstore import ObjectMeta

__all__ = ["list_objects"]


async def list_objects(reader: StoreReader, suffix: str | tuple[str, ...] | None) -> Catalog:
    """All objects of a store, sorted by their keys.

    Args:
        reader: of the store.
        suffix: how the keys end that are wanted; None for all.

    Raises:
        EmptyListingError: nothing was listed, or nothing that ends so.
        StoreUnreachableError: no answer within the time-out, on every attempt.
        StoreError: the store refused, failed, or cannot list.
    """
    found = CatalogBuilder()
    seen = 0
    failure: StoreError | None = None
    try:
        async for page in reader.list():
            seen += len(page)
            _take(page, found, suffix)
    except StoreUnreachableError:
        raise
    except StoreError as error:
        if not isinstance(reader.store, HTTPStore):
            raise
        failure = _cannot_list(error, reader)
    if failure is None and not len(found.keys):
        failure = _nothing_listed(suffix, seen, reader)
    if failure is not None:
        raise failure
    return found.sorted()


def _take(page: Sequence[ObjectMeta], found: CatalogBuilder, suffix: str | tuple[str, ...] | None) -> None:
    for entry in page:
        if suffix is None or entry["path"].endswith(suffix):
            found.append(entry["path"], entry["size"], strong(entry["e_tag"]))


def _cannot_list(error: StoreError, reader: StoreReader) -> StoreError:
    message = f"this server cannot list, over HTTP that takes WebDAV; say which objects with keys=[...]: {error}"
    return StoreError(message, url=redact_url(reader.url), status=error.status)


def _nothing_listed(suffix: str | tuple[str, ...] | None, seen: int, reader: StoreReader) -> EmptyListingError:
    if suffix is None or not seen:
        message = "the listing is empty; a URL names a whole directory, not the beginning of a name"
    else:
        message = f"{seen} objects were listed, but no key ends in suffix={suffix!r}"
    return EmptyListingError(message, url=redact_url(reader.url))
