"""Complete listings of a store: of many objects for a dataset of them, or of the few that are its shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace._core.store.catalog import Catalog, CatalogBuilder, without_folder_markers
from headrace._core.store.client import StoreClient
from headrace._core.store.head import Head
from headrace._core.store.prefix_listing import PrefixListing, S, UnorderedError
from headrace._core.store.redaction import path_of, redact_url
from headrace.errors import EmptyListingError, StoreError, StoreUnreachableError

if TYPE_CHECKING:
    from obstore import ObjectMeta


async def list_objects(client: StoreClient, suffix: str | tuple[str, ...] | None) -> Catalog:
    """All objects of a store whose keys end in `suffix`, sorted by their keys, without the markers of folders.

    Raises:
        EmptyListingError: there is none.
        StoreUnreachableError: no answer within the time-out, on every attempt.
        StoreError: the store refused, failed, or cannot list.
    """
    found, count = await _list(client, "", lambda: CatalogBuilder(suffix))
    catalog = without_folder_markers(found.sorted())
    if not len(catalog.keys):
        raise _nothing_listed(suffix, count, client)
    return catalog


async def list_heads(client: StoreClient, prefix: str) -> list[Head]:
    """The metadata of all objects in a directory of a store, sorted by key; errors are those of `list_objects`."""
    found, _ = await _list(client, prefix, _Heads)
    latest = {head.key: head for head in found}  # an object may come twice
    return sorted(latest.values(), key=lambda head: head.key)


class _Heads(list[Head]):
    """The objects of a listing, in its order."""

    def add_page(self, page: Sequence[ObjectMeta]) -> None:
        self.extend(Head.of(entry["path"], entry) for entry in page)


async def _list(client: StoreClient, prefix: str, new_sink: Callable[[], S]) -> tuple[S, int]:
    """The objects in a directory, in any order, and their number before the sink filters them."""
    try:
        if client.lists_in_order:
            listing = PrefixListing(client, prefix, new_sink)
            try:
                return await listing.run(), listing.count
            except UnorderedError:
                pass  # page after page, from the first
        found, count = new_sink(), 0
        async for page in client.pages(prefix or None):
            count += len(page)
            found.add_page(page)
    except StoreUnreachableError:
        raise
    except StoreError as error:
        if client.traits.may_list:
            raise
        failure = _cannot_list(error, client)
    else:
        return found, count
    raise failure


def _cannot_list(error: StoreError, client: StoreClient) -> StoreError:
    url = redact_url(client.url)
    message = (
        f"this server cannot list, over HTTP that takes WebDAV; name objects with keys=[...] and shards as in "
        f"'{{000..127}}.tar', or, if it speaks S3, use Store('s3://bucket', options={{'endpoint': 'https://host'}}): "
        f"{str(error).removesuffix(f' ({url})')}"
    )
    return StoreError(message, url=url, status=error.status)


def _nothing_listed(suffix: str | tuple[str, ...] | None, count: int, client: StoreClient) -> EmptyListingError:
    if (path := path_of(client.url)) is not None and os.path.isfile(path):
        message = "this is a file, and a dataset of objects is of a directory"
    elif suffix is None or not count:
        message = "the listing is empty; a URL names a whole directory, not the beginning of a name"
    else:
        message = f"{count} objects were listed, but no key ends in suffix={suffix!r}"
    return EmptyListingError(message, url=redact_url(client.url))
