"""The objects under a URL that a benchmark reads, and the dataset that reads and times them."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import obstore

from headrace._core.interface.background_loop import background_loop
from headrace._core.interface.map_style import AsyncDataset
from headrace._core.store.catalog import Catalog, CatalogBuilder
from headrace._core.store.client import AT_ONCE, LARGE, PART, StoreClient
from headrace._core.store.errors import RequestFailure
from headrace._core.store.head import Head, check_bytes, check_version
from headrace._core.store.redaction import redact_url
from headrace._core.store.request_stats import RequestStats, session_stats
from headrace._core.store.store import Store
from headrace.datasets.objects import ObjectDataset
from headrace.errors import EmptyListingError, StoreError, StoreUnreachableError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Listing", "Reads", "list_some"]

MOST_RANGES = 20_000  # of large objects, so that a thousand of a terabyte do not fill the memory
CANNOT_LIST = (
    "this server cannot list, over HTTP that takes WebDAV. If it speaks S3: headrace bench s3://bucket/prefix "
    "--store-option endpoint=https://host"
)
TOO_FEW = "of one object a store and its caches give other figures than of many: name a prefix with more objects"


@dataclass(frozen=True, slots=True)
class Listing:
    """The first objects under a URL.

    Attributes:
        dataset: those that are not empty.
        complete: whether there are no others.
        empty: number of empty objects, which are left out.
        seconds: that the listing took.
        ranges: what is read: the position of an object, the first byte, and the byte after the last.
    """

    dataset: ObjectDataset
    complete: bool
    empty: int
    seconds: float
    ranges: list[tuple[int, int, int]]

    @property
    def url(self) -> str:
        """The URL, without secrets."""
        return redact_url(self.dataset._client.url)

    @property
    def mean_size(self) -> float:
        """Mean number of bytes of a read."""
        return float(np.mean([stop - start for _, start, stop in self.ranges]))

    @property
    def in_parts(self) -> int:
        """Number of objects of which ranges are read."""
        return len({position for position, start, stop in self.ranges if stop - start < self.dataset._size(position)})

    @property
    def parts_at_once(self) -> float:
        """Mean number of requests that `ObjectDataset` has in flight for an object."""
        sizes = [self.dataset._size(position) for position in range(len(self.dataset))]
        return float(np.mean([1 if size <= LARGE else min(AT_ONCE, -(-size // PART)) for size in sizes]))


async def list_some(store: Store, most: int, *, seconds: float) -> Listing:
    """List at most `most` objects under a store's URL, in the order of its listing.

    Raises:
        EmptyListingError: there is none, or all are empty.
        StoreUnreachableError: no page came within `seconds`.
        StoreError: the store refused, failed, or cannot list; or there is one object only.
    """
    client = store._client
    pages = _Pages(client, most)
    began = time.perf_counter()
    listing = background_loop().start(pages.take())
    try:
        await asyncio.wait_for(asyncio.wrap_future(listing), seconds)
    except TimeoutError:
        if not pages.count:
            raise StoreUnreachableError(
                f"listing: no answer from the store within {seconds:.0f} s", url=redact_url(client.url)
            ) from None
    finally:
        listing.cancel()
    catalog = pages.found.sorted()
    if not pages.count:
        raise EmptyListingError(
            "the listing is empty; a URL names a whole directory, not the beginning of a name, nor an object",
            url=redact_url(client.url),
        )
    if not len(catalog.keys):
        said = "the only object listed is" if pages.count == 1 else f"all {pages.count:,} objects listed are"
        raise EmptyListingError(f"{said} empty: there is nothing to read", url=redact_url(client.url))
    assert catalog.sizes is not None
    if len(catalog.keys) == 1 and catalog.sizes[0] <= LARGE:
        raise StoreError(f"only one object was listed that is not empty; {TOO_FEW}", url=redact_url(client.url))
    dataset = _dataset_of(store, catalog)
    return Listing(dataset, pages.complete, pages.empty, time.perf_counter() - began, [*_ranges(catalog.sizes)])


def _dataset_of(store: Store, catalog: Catalog) -> ObjectDataset:
    dataset, _ = ObjectDataset._of(store, {})
    dataset._hold(catalog, None, None)
    return dataset


class _Pages:
    """The first pages of a listing."""

    def __init__(self, client: StoreClient, most: int) -> None:
        self._client = client
        self._most = most
        self.found = CatalogBuilder()
        self.count = self.empty = 0
        self.complete = False

    async def take(self) -> None:
        pages = self._client.pages()
        try:
            async for page in pages:
                self.count += len(page)
                filled = [entry for entry in page if entry["size"] > 0]
                self.empty += len(page) - len(filled)
                room = self._most - len(self.found.sizes)
                self.found.add_page(filled[:room])
                if len(filled) >= room:
                    return
            self.complete = True
        except StoreUnreachableError:
            raise
        except StoreError as error:
            if self._client.traits.may_list:
                raise
            failure = StoreError(f"{CANNOT_LIST}: {error}", url=redact_url(self._client.url), status=error.status)
        else:
            return
        finally:
            await pages.aclose()
        raise failure


class Reads(AsyncDataset[memoryview]):
    """Reads of objects: whole, or ranges of 8 MiB of those that headrace reads in parts. Times each of them.

    Args:
        listing: the objects.
        part: the part of each read's bytes that is read, from 0 to 1.
        first_byte: whether the time to the first byte is taken too, which needs a few more lines of Python a read.

    Attributes:
        count: reads completed since `reset`.
        nbytes: of them.
        seconds: the duration of each.
        first: the seconds to the first byte of each.
    """

    def __init__(self, listing: Listing, *, part: float = 1.0, first_byte: bool = False) -> None:
        self._dataset = listing.dataset
        self._client: StoreClient = listing.dataset._client
        self._part = part
        self._first_byte = first_byte
        self._ranges = listing.ranges
        self.reset()

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def throttle_events(self) -> int:
        """Requests that were throttled or timed out, in this iteration."""
        return 0 if self._requests is None else self._requests.throttle_events

    def reset(self) -> None:
        """Begin a new trial."""
        self.count = self.nbytes = 0
        self.seconds: list[float] = []
        self.first: list[float] = []
        self._requests: RequestStats | None = None

    async def aget(self, index: int) -> memoryview:
        """Read, and note the time that it took."""
        if self._requests is None:
            self._requests = session_stats.get(None)
        began = time.perf_counter()
        position, start, stop = self._ranges[index]
        if self._part < 1.0:
            stop = start + max(1, int((stop - start) * self._part))
        if self._first_byte:
            data = await self._timed(position, start, stop, began)
        elif start == 0 and stop == self._dataset._size(position):
            data = await self._dataset.read_bytes(position)
        else:
            key, (size, etag) = self._dataset._key(position), self._version(position)
            data = await self._client.read(key, start, stop, index=position, size=size, etag=etag)
        self.seconds.append(time.perf_counter() - began)
        self.count += 1
        self.nbytes += len(data)
        return data

    def _version(self, position: int) -> tuple[int, str | None]:
        etags = self._dataset._etags
        return self._dataset._size(position), None if etags is None else etags[position]

    async def _timed(self, position: int, start: int, stop: int, began: float) -> memoryview:
        """As `StoreClient.read` of one range, in two steps."""
        key, (size, etag) = self._dataset._key(position), self._version(position)

        async def request(store: ObjectStore) -> memoryview | RequestFailure:
            result = await obstore.get_async(store, key, options={"range": (start, stop)})
            first = time.perf_counter() - began
            changed = check_version(size, etag, None, Head.of(key, result.meta))
            if changed is not None:
                return changed
            data = check_bytes(memoryview(await result.bytes_async()), stop - start)
            if not isinstance(data, RequestFailure):
                self.first.append(first)
            return data

        return await self._client.attempt(request, doing=f"reading object {key!r}", key=key, index=position)


def _ranges(sizes: array[int]) -> Iterator[tuple[int, int, int]]:
    parts = sum(size // PART for size in sizes if size > LARGE)
    step = max(1, parts // MOST_RANGES)
    for position, size in enumerate(sizes):
        if size <= LARGE:
            yield position, 0, size
        else:
            yield from ((position, start, start + PART) for start in range(0, size - PART + 1, step * PART))
