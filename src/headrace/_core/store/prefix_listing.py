"""Listing a large store from several places at once.

A listing is paged, and each page says where the next begins: one after the other, a million keys take a thousand round
trips. But a listing may begin behind any key. So while the first pages come, the store is asked for its directories,
which tell where its keys are; the stretch that is left is split at a directory, and each part is listed by itself and
split again whenever somebody is idle. A store without directories is listed as ever, by the same requests.
"""

from __future__ import annotations

import asyncio
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from headrace._core.store.catalog import CatalogBuilder
from headrace._core.store.reader import PAGE, StoreReader

if TYPE_CHECKING:
    from obstore import ObjectMeta

AT_ONCE = 16  # requests; S3 answers 5,500 a second under one prefix, and a page takes it some 100 ms
WORTH = 2 * PAGE  # keys that must be left in a stretch to split it, by what directories have held so far


class UnorderedError(Exception):
    """This store's keys do not come sorted, so that they cannot be listed in stretches."""


@dataclass(slots=True, eq=False)
class _Span:
    """A stretch of keys that is listed by itself.

    Attributes:
        after: the key behind which it begins; empty for the first of all.
        until: its last key, if there is such; None for the last of all. Comes nearer when it is split.
        last: the last key that came.
        found: what came.
    """

    after: str
    until: str | None
    last: str
    found: CatalogBuilder = field(default_factory=CatalogBuilder)


class PrefixListing:
    """One listing of a store that lists in order.

    Args:
        reader: of the store.
        suffix: how the keys end that are wanted; None for all.
    """

    def __init__(self, reader: StoreReader, suffix: str | tuple[str, ...] | None) -> None:
        self.seen = 0
        """How many objects came, whatever they end in."""
        self._reader = reader
        self._suffix = suffix
        self._spans: list[_Span] = []
        self._listing: set[_Span] = set()
        self._borders: list[str] = []  # directories, sorted: where a span may be split
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._asking: set[asyncio.Task[None]] = set()  # those of them that have not ended

    async def run(self) -> CatalogBuilder:
        """List it all; gives what came, nearly always sorted by key.

        Raises:
            UnorderedError: the keys do not come sorted.
            StoreError: the store refused or failed.
        """
        failure: BaseException | None = None  # raised behind the handler, so that the group is not its context
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._begin("", None)
        except BaseExceptionGroup as errors:
            failure = errors.exceptions[0]  # which ended the others
        if failure is not None:
            raise failure
        self._spans.sort(key=operator.attrgetter("after"))
        found = self._spans[0].found
        for span in self._spans[1:]:
            found.extend(span.found)
            span.found = CatalogBuilder()
        return found

    def _begin(self, after: str, until: str | None) -> None:
        span = _Span(after, until, last=after)
        self._spans.append(span)
        self._listing.add(span)
        self._group.create_task(self._list(span))

    async def _list(self, span: _Span) -> None:
        try:
            async with aclosing(self._reader.list(after=span.after or None)) as pages:
                async for page in pages:
                    if self._take(span, page):
                        break
                    if len(page) >= PAGE:  # a shorter one is the last
                        self._spread(page[0]["path"], span.last)
        except BaseException:
            self._listing.clear()  # nothing is begun any more
            raise
        self._listing.discard(span)
        self._split()
        if not self._listing:
            for asking in self._asking:
                asking.cancel()

    def _take(self, span: _Span, page: Sequence[ObjectMeta]) -> bool:
        """Take a page; whether it reached the span's end."""
        keys = [entry["path"] for entry in page]
        if keys[0] < span.last or not all(first <= second for first, second in pairwise(keys)):
            raise UnorderedError
        inside = len(keys) if span.until is None else bisect_right(keys, span.until)
        span.last = keys[-1]
        self.seen += inside
        span.found.take(page[:inside] if inside < len(keys) else page, self._suffix)
        return span.until is not None and span.last >= span.until

    def _spread(self, first: str, last: str) -> None:
        """Make use of who is idle, on a page of keys from `first` to `last`."""
        self._split()
        common = [one for one, other in zip(_parents(first), _parents(last), strict=False) if one == other]
        innermost = len(common) == len(_parents(last)) == len(_parents(first))
        if innermost and common[-1] in self._asked:
            self._asked[common[-1]].cancel()  # it holds objects by the page, all of which would come a second time
        # What holds a whole page, and directories rather than objects.
        for path in common[:-1] if innermost else common:
            if path not in self._asked and self._idle() > 0:
                asking = self._asked[path] = self._group.create_task(self._ask(path))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)

    async def _ask(self, path: str) -> None:
        borders = await self._reader.directories(path)
        self._borders = sorted({*self._borders, *borders})
        self._split()

    def _idle(self) -> int:
        return AT_ONCE - len(self._listing) - len(self._asking)

    def _split(self) -> None:
        """Split the longest spans, as long as somebody is idle and it is worth a request."""
        while self._listing and self._idle() > 0:
            ahead, span = max(((self._ahead(span), span) for span in self._listing), key=lambda pair: len(pair[0]))
            if len(ahead) * self._objects_in_one() < WORTH:
                return
            middle = self._borders[ahead[len(ahead) // 2]]
            until, span.until = span.until, middle
            self._begin(middle, until)

    def _ahead(self, span: _Span) -> range:
        """The borders that are still to come in a span."""
        stop = len(self._borders) if span.until is None else bisect_left(self._borders, span.until)
        return range(bisect_right(self._borders, span.last), stop)

    def _objects_in_one(self) -> float:
        """How many objects lie between two borders, by what has been listed."""
        passed = sum(
            bisect_right(self._borders, span.last) - bisect_right(self._borders, span.after) for span in self._spans
        )
        return self.seen / max(1, passed)


def _parents(key: str) -> list[str]:
    """The directories that a key is in, the topmost first.

    Example:
        >>> _parents("train/cats/1.jpg")
        ['', 'train', 'train/cats']
    """
    parts = key.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
