"""A single GET of a part of an object, and the check of its answer."""

from __future__ import annotations

import mimetypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import obstore

from headrace._core.store.bodies import BodyReader
from headrace._core.store.errors import NATIVE_ERRORS, Cause, RequestFailure
from headrace._core.store.etags import strong
from headrace._core.store.head import Head, InitialRead, check_bytes, check_version
from headrace._core.store.request_stats import RequestStats
from headrace._core.store.requests import StoreRequests, failure_of

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore

_PAGES = frozenset({"text/html", "application/xhtml+xml"})


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """The arguments of `StoreClient.read`, for the reads that one request does not do."""

    key: str
    start: int
    stop: int
    index: object
    size: int | None
    etag: str | None
    modified: str | None
    checksum: str | None
    whole: bool

    @property
    def is_complete(self) -> bool:
        """Whether it is of all bytes of the object."""
        return self.start == 0 and self.stop == self.size

    @property
    def doing(self) -> str:
        """The operation, for errors."""
        if self.is_complete:
            return f"reading object {self.key!r}"
        return f"reading bytes {self.start} to {self.stop} of {self.key!r}"

    async def get(self, store: ObjectStore) -> memoryview | RequestFailure:
        """Read the bytes by one request."""
        answer = await get_version(store, self.key, self.start, self.stop, self.size, self.etag, self.modified)
        return check_bytes(answer, self.stop - self.start, self.checksum)


async def get_version(
    store: ObjectStore,
    key: str,
    start: int,
    stop: int,
    size: int | None,
    etag: str | None,
    modified: str | None,
    bodies: BodyReader | None = None,
    times: RequestStats | None = None,
) -> memoryview | RequestFailure:
    """Read a range of an object of known version, its body by `bodies`; its times are recorded in `times`.

    The version is checked by `check_version`.
    """
    began = 0.0 if times is None else time.perf_counter()
    result = await obstore.get_async(store, key, options=_options((start, stop), etag))  # type: ignore[arg-type]
    meta = result.meta
    if meta["e_tag"] != etag or meta["size"] != size or modified is not None:
        failure = check_version(size, etag, modified, Head.of(key, meta))
        if failure is not None:
            return failure
    first_byte = 0.0 if times is None else time.perf_counter() - began
    data = memoryview(await (result.bytes_async() if bodies is None else bodies.read(result, stop - start)))
    if times is not None:
        times.add_times(first_byte, time.perf_counter() - began)
    return data


async def get_start(
    requests: StoreRequests,
    key: str,
    requested: tuple[int, int] | dict[str, int],
    length: int,
    etag: str | None,
    checksum: str | None,
    store: ObjectStore,
) -> InitialRead | RequestFailure:
    """Read the first or the last bytes of an object of unknown size, with its metadata; `checksum` is of all of it."""
    timed = requests.stats.begin_timing()
    try:
        began = time.perf_counter()
        result = await obstore.get_async(store, key, options=_options(requested, etag))  # type: ignore[arg-type]
        head = Head.of(key, result.meta)
        first_byte = time.perf_counter() - began
        data = memoryview(await result.bytes_async())
        if timed:
            requests.stats.add_times(first_byte, time.perf_counter() - began)
        requests.ranges_of_pages = requests.ranges_of_pages or _is_page(key, result)
    except NATIVE_ERRORS as error:
        failure, _ = failure_of(error)
        # An empty object has no range that could be requested: stores refuse it in different ways, or send all.
        local = failure.cause is Cause.OTHER and not requests.traits.remote
        if failure.status != 416 and failure.cause is not Cause.RANGE_IGNORED and not local:
            raise
        requests.stats.requests += 1
        whole = await obstore.get_async(store, key)  # servers may not say it to a HEAD
        head = Head.of(key, whole.meta)
        if requests.ranges_of_pages is False and _is_page(key, whole):
            return RequestFailure(Cause.ERROR_PAGE)
        if head.size:
            requests.ranges_ignored = requests.ranges_ignored or failure.cause is Cause.RANGE_IGNORED
            raise
        data = memoryview(b"")
    changed = check_version(None, etag, None, head)
    if changed is not None:
        return changed
    checked = check_bytes(data, min(length, head.size), checksum if len(data) == head.size else None)
    return checked if isinstance(checked, RequestFailure) else InitialRead(checked, head)


def _is_page(key: str, result: GetResult) -> bool:
    """Whether an answer is an HTML page, and the key does not say so."""
    sent = str(result.attributes.get("Content-Type", "")).partition(";")[0].strip().lower()
    return sent in _PAGES and mimetypes.guess_type(key)[0] not in _PAGES


def _options(requested: tuple[int, int] | dict[str, int], etag: str | None) -> dict[str, object]:
    tag = strong(etag)
    return {"range": requested} if tag is None else {"range": requested, "if_match": tag}
