"""Complete listings of a store: of many objects for a dataset of them, or of the few that are its shards.

Each page of a listing names the start of the next, so a million keys take a thousand round trips in sequence. But a
listing may begin after any key. While the first pages come, the store is asked for its directories; the stretch of
keys that is left is split at one of them, and each part is listed by itself and split again while requests are to
spare. A store without directories is listed page after page, by the same requests as without this module.
"""

from __future__ import annotations

import asyncio
import operator
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import obstore

from headrace._core.store.catalog import Catalog, CatalogBuilder, without_folder_markers
from headrace._core.store.client import PAGE, StoreClient
from headrace._core.store.errors import NATIVE_ERRORS
from headrace._core.store.head import Head
from headrace._core.store.redaction import path_of, redact_url
from headrace.errors import EmptyListingError, StoreError, StoreUnreachableError

if TYPE_CHECKING:
    from obstore import ObjectMeta

MIN_SPLIT = 2 * PAGE  # keys that are expected in a stretch that is split, by the number between directories so far


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
        unordered = client.traits.unordered_suffix
        if client.traits.list_in_order and (unordered is None or unordered not in client.url):
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


class Sink(Protocol):
    """Takes the objects of a listing."""

    def add_page(self, page: Sequence[ObjectMeta]) -> None:
        """Take the objects of a page."""

    def extend(self, other: Self, /) -> None:
        """Take the objects of another sink."""


S = TypeVar("S", bound=Sink)


class UnorderedError(Exception):
    """This store's keys do not come sorted, so that they cannot be listed in stretches."""


@dataclass(slots=True, eq=False)
class _Stretch(Generic[S]):
    """Keys that are listed in sequence.

    Attributes:
        after: the key after which it begins; empty for the first stretch.
        until: its last key; None for the last stretch. Moves down when the stretch is split.
        last: the last key that has been listed.
        found: the objects that have been listed.
    """

    after: str
    until: str | None
    last: str
    found: S


class PrefixListing(Generic[S]):
    """One listing of a store that lists in order."""

    def __init__(self, client: StoreClient, prefix: str, new_sink: Callable[[], S]) -> None:
        self.count = 0
        """How many objects were listed."""
        self._client = client
        self._prefix = prefix.strip("/")
        self._new_sink = new_sink
        self._stretches: list[_Stretch[S]] = []
        self._listing: set[_Stretch[S]] = set()
        self._borders: list[str] = []  # directories, sorted: where a stretch may be split
        self._directories: dict[str, asyncio.Task[None]] = {}  # requests for directories, by their path
        self._pending: set[asyncio.Task[None]] = set()  # those that have not ended

    async def run(self) -> S:
        """List all objects, nearly always sorted by key.

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
        found = self._stretches[0].found
        for stretch in self._stretches[1:]:
            found.extend(stretch.found)
            stretch.found = self._new_sink()  # frees its memory
        return found

    def _start(self, after: str, until: str | None) -> None:
        stretch = _Stretch(after, until, after, self._new_sink())
        self._stretches.append(stretch)
        self._listing.add(stretch)
        self._group.create_task(self._list(stretch))

    async def _list(self, stretch: _Stretch[S]) -> None:
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
            for task in self._pending:
                task.cancel()

    def _add_page(self, stretch: _Stretch[S], page: Sequence[ObjectMeta]) -> bool:
        """Take a page; return whether it reached the end of the stretch."""
        keys = [entry["path"] for entry in page]
        if keys[0] < stretch.last or not all(first <= second for first, second in pairwise(keys)):
            raise UnorderedError
        inside = len(keys) if stretch.until is None else bisect_right(keys, stretch.until)
        stretch.last = keys[-1]
        self.count += inside
        stretch.found.add_page(page[:inside] if inside < len(keys) else page)
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
                task = self._directories[path] = self._group.create_task(self._add_borders(path))
                self._pending.add(task)
                task.add_done_callback(self._pending.discard)

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
        return self._client.list_concurrency - len(self._listing) - len(self._pending)

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

    def _ahead(self, stretch: _Stretch[S]) -> range:
        """The borders that are still to come in a stretch."""
        stop = len(self._borders) if stretch.until is None else bisect_left(self._borders, stretch.until)
        return range(bisect_right(self._borders, stretch.last), stop)

    def _objects_per_border(self) -> float:
        """The number of objects between two borders, on average over what has been listed."""
        passed = sum(
            bisect_right(self._borders, stretch.last) - bisect_right(self._borders, stretch.after)
            for stretch in self._stretches
        )
        return self.count / max(1, passed)


def _parents(key: str) -> list[str]:
    """The directories that a key is in, the topmost first.

    Example:
        >>> _parents("train/cats/1.jpg")
        ['', 'train', 'train/cats']
    """
    parts = key.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
