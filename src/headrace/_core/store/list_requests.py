"""Listing requests of one store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import obstore

from headrace._core.store.errors import NATIVE_ERRORS, Cause, RequestFailure
from headrace._core.store.requests import StoreRequests, failure_of

if TYPE_CHECKING:
    from obstore import ObjectMeta

PAGE = 1000  # objects of a page of a listing: the maximum of S3, GCS and Azure, or nearly


class ListRequests(StoreRequests):
    """Lists one store, page by page; arguments are those of `StoreRequests`."""

    @property
    def lists_in_order(self) -> bool:
        """Whether its listings are sorted by key, and can begin after any key at no more than the cost of a page."""
        unordered = self.traits.unordered_suffix
        return self.traits.list_in_order and (unordered is None or unordered not in self.url)

    async def directories(self, path: str) -> list[str]:
        """The directories directly under a path, sorted, by one attempt; none if that fails.

        They are only used to split a long listing. The listing itself, with its retries, reports what is wrong.
        """
        self.stats.requests += 1
        try:
            level = await obstore.list_with_delimiter_async(self.store, path or None)
        except NATIVE_ERRORS:
            return []
        return sorted(level["common_prefixes"])

    async def pages(
        self, prefix: str | None = None, *, after: str | None = None
    ) -> AsyncGenerator[Sequence[ObjectMeta], None]:
        """List the store, a page at a time. A page that fails is requested again, after the last key of those before.

        An object may come twice where a listing had to begin again: keep them by their `path`.

        Raises:
            StoreUnreachableError: no page came within the time-out, on every attempt.
            StoreError: the store refused or failed.
        """
        tries = self.tries()
        last = after
        while True:
            self.stats.requests += 1
            offset = last if self.traits.list_resumes else None
            pages = obstore.list(self.store, prefix, offset=offset, chunk_size=PAGE)
            error: BaseException | None = None
            while True:
                try:
                    async with asyncio.timeout(self.timeout):
                        page = await anext(pages, None)
                except TimeoutError:
                    failure = RequestFailure(Cause.TIMED_OUT, detail=f"no page came within {self.timeout} s")
                    break
                except NATIVE_ERRORS as caught:
                    failure, error = failure_of(caught)
                    break
                if page is None:
                    return
                self._gate.successes += 1
                tries.progress()
                tries.attempts = 0
                if page:
                    last = page[-1]["path"]
                    yield page
            await self.retry_or_raise(failure, error, tries, "listing")
