"""Complete listings of a store: of many objects for a dataset of them, or of the few that are its shards.

Each page of a listing names the start of the next, so a million keys take a thousand round trips in sequence. But a
listing may begin after any key. While the first pages come, the store is asked for its directories; the stretch of
keys that is left is split at one of them, and each part is listed by itself and split again while requests are to
spare. A store without directories is listed page after page, by the same requests as without this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

import obstore

from headrace._core.store.catalog import Catalog, catalog_of_page, join_pages, without_folder_markers
from headrace._core.store.client import PAGE, StoreClient
from headrace._core.store.errors import NATIVE_ERRORS
from headrace._core.store.head import Head
from headrace._core.store.redaction import redact_url
from headrace.errors import EmptyListingError, StoreError, StoreUnreachableError

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")

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
