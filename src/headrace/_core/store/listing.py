"""Listing a store for a dataset of objects."""

from __future__ import annotations

import os

from obstore.store import HTTPStore

from headrace._core.store.catalog import Catalog, CatalogBuilder
from headrace._core.store.prefix_listing import PrefixListing, UnorderedError
from headrace._core.store.reader import StoreReader
from headrace._core.store.redaction import path_of, redact_url
from headrace.errors import EmptyListingError, StoreError, StoreUnreachableError


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
    failure: StoreError | None = None
    try:
        found, seen = await _found(reader, suffix)
    except StoreUnreachableError:
        raise
    except StoreError as error:
        if not isinstance(reader.store, HTTPStore):
            raise
        failure = _cannot_list(error, reader)
    else:
        if not len(found.keys):
            failure = _nothing_listed(suffix, seen, reader)
    if failure is not None:
        raise failure
    return found.sorted()


async def _found(reader: StoreReader, suffix: str | tuple[str, ...] | None) -> tuple[CatalogBuilder, int]:
    """The objects that end so, in any order; and how many there are in all."""
    if reader.lists_in_order:
        sweep = PrefixListing(reader, suffix)
        try:
            return await sweep.run(), sweep.seen
        except UnorderedError:
            pass  # then from one end to the other
    found, seen = CatalogBuilder(), 0
    async for page in reader.list():
        seen += len(page)
        found.take(page, suffix)
    return found, seen


def _cannot_list(error: StoreError, reader: StoreReader) -> StoreError:
    url = redact_url(reader.url)
    message = (
        f"this server cannot list, over HTTP that takes WebDAV; name objects with keys=[...], or, if it speaks S3, use "
        f"Store('s3://bucket', options={{'endpoint': 'https://host'}}): {str(error).removesuffix(f' ({url})')}"
    )
    return StoreError(message, url=url, status=error.status)


def _nothing_listed(suffix: str | tuple[str, ...] | None, seen: int, reader: StoreReader) -> EmptyListingError:
    if (path := path_of(reader.url)) is not None and os.path.isfile(path):
        message = "this is a file, and a dataset of objects is of a directory"
    elif suffix is None or not seen:
        message = "the listing is empty; a URL names a whole directory, not the beginning of a name"
    else:
        message = f"{seen} objects were listed, but no key ends in suffix={suffix!r}"
    return EmptyListingError(message, url=redact_url(reader.url))
