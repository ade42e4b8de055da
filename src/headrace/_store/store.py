"""An object store: connection options and requests.

A request gives a complete result or raises an error. A store is opened once in a process. All
requests share a retry policy and raise the same kind of error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore import get_range_async
from obstore.exceptions import AlreadyExistsError
from obstore.store import LocalStore

from headrace._base.cgroup import CgroupLimits, available_memory
from headrace._store.backoff import RetryGate, Tries
from headrace._store.errors import (
    CREDENTIAL_HOST,
    FAILURES,
    HUB_REMEDY,
    IN_BUCKET,
    NATIVE_ERRORS,
    NO_CREDENTIALS,
    NO_LISTING,
    PROFILE,
    Cause,
    RequestFailure,
    classify_error,
    describe_error,
    failure_of,
)
from headrace._store.head import (
    Head,
    InitialRead,
    check_bytes,
    check_version,
    matches,
    strong,
)
from headrace._store.open import (
    StoreTraits,
    check_shared,
    open_store,
    store_id,
    traits_of,
)
from headrace._store.ranges import map_all
from headrace._store.redaction import redact_text, redact_url, secrets_in, url_of
from headrace._store.request_stats import RequestStats, session_stats
from headrace._store.retry_policy import RetryPolicy, as_policy
from headrace.errors import (
    ForkedError,
    NotPicklableError,
    StoreError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from obstore import GetResult, ListResult, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

PAGE = 1000  # objects on a page of a listing: the maximum of S3, GCS and Azure, or nearly
# Bytes. A longer range is read in parts. The guides of S3 and GCS recommend 8 to 16 MiB a request.
LARGE = 16 * 2**20
PART = 8 * 2**20  # bytes
AT_ONCE = 8  # parts of an object in flight; 64 MiB in flight cover 10 Gbit/s at 50 ms
# Bytes. Largest object to receive whole for a part, from a store that ignores ranges.
LARGEST_WHOLE = 64 * 2**20
_NOTHING = memoryview(b"")
# Seconds; requests with the old credentials fail a few seconds later.
RENEWAL_INTERVAL = 5.0

forked_from: int | None = None
"""Process ID of the ancestor that used a store before forking, or None.

obstore's I/O runs on threads of a native runtime. A forked process has none of the threads. Even a
new store in the forked process would wait for the threads forever, so the store raises an error
instead.
"""
_used_in: int | None = None


def _after_fork_in_child() -> None:
    global forked_from
    if forked_from is None:
        forked_from = _used_in


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Range(NamedTuple):
    """Bytes to read."""

    key: str
    start: int
    stop: int
    sample: object = None  # index of the sample
    head: Head | None = None  # the expected version, if known
    checksum: str | None = None


class Store:
    """An object store, or a directory of a store, with options for requests.

    Every dataset over a store takes a `Store`. Datasets with the same `Store` share connections and
    the retry budget. Nothing is opened or requested before a dataset is made from the store. A
    store can be pickled; each process opens its own connections. A store may be used from several
    event loops and threads.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``http(s)://``, ``file:///directory``, or
            a directory's path.
        options: for `obstore.store.from_url`: credentials, region, endpoint, `client_options`,
            `retry_config`. Two options are headrace's own: ``"allow_redirects"``, whether the store
            may redirect clients to another host, and ``"profile"``, an AWS profile
            (docs/stores.md).
        backend: a ready obstore store. `url` is then only a name for messages. The time-outs and
            retries of the backend stay unchanged. ``memory://`` needs a `backend`.
        timeout: seconds without a byte after which a request fails. The whole request may take
            longer. Time-outs in `options` take precedence.
        retry: how failed requests are retried: a `RetryPolicy`, or the maximum number of attempts.
            A loader's `retry` takes precedence.
        if_match: whether answers are compared with the listed entity tag, or with the listed
            modification time if there is no tag. Then an overwritten object of the same length is
            an error too. False saves about 30 µs of CPU time a sample.

    Raises:
        ValueError: an argument is out of range or contradicts another, or the URL names no store.

    Example:
        >>> import pathlib, tempfile
        >>> from headrace import ObjectDataset
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "7.bin").write_bytes(b"seven")
        >>> dataset = ObjectDataset(Store(folder, timeout=10.0, retry=3))
        >>> bytes(dataset[0].data)
        b'seven'
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        options: Mapping[str, object] | None = None,
        backend: ObjectStore | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | int | None = None,
        if_match: bool = True,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r} must be more than zero seconds")
        if backend is not None and options is not None:
            raise ValueError(
                "backend= is a store that is open already; options= would be ignored. Give one of "
                "the two"
            )
        named = os.fspath(url)
        if backend is None:
            check_shared(named)
            named = url_of(named)
        self._url = named
        self._options = dict(options or {})
        self._backend = backend
        self._timeout = timeout
        self._retry = RetryPolicy() if retry is None else as_policy(retry)
        self.if_match = if_match
        self.traits: StoreTraits = traits_of(named, backend)
        # True once the store is known to send whole objects instead of ranges.
        self._ranges_ignored = False
        self._opened: ObjectStore | None = None
        self._gate = RetryGate()
        self._last_renewal = -RENEWAL_INTERVAL
        self._own_stats = RequestStats()

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.traits.shared:
            remedy = (
                "Use a directory or another store to take a dataset to other processes."
            )
            raise NotPicklableError(
                what=repr(self),
                reason="its store is the memory of this process",
                remedy=remedy,
            )
        opened = partial(
            type(self),
            self._url,
            options=self._options if self._backend is None else None,
            backend=self._backend,
            timeout=self._timeout,
            retry=self._retry,
            if_match=self.if_match,
        )
        return opened, ()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @cached_property
    def url(self) -> str:
        """URL without user name, password and query string."""
        return redact_url(self._url)

    def name(self, key: str) -> str:
        """Return the URL of an object, without secrets."""
        return f"{self.url.rstrip('/')}/{key}"

    @property
    def local_root(self) -> str | None:
        """Path of the directory on this machine; None for other stores."""
        if self.traits.backend is not LocalStore:
            return None
        root = (
            unquote(urlsplit(self._url).path)
            if self._backend is None
            else getattr(self._backend, "prefix", None)
        )
        return str(root or "/")

    def key_of(self, place: str | os.PathLike[str]) -> str:
        """Return the key of an object of this store.

        Args:
            place: a key, or a URL or an absolute path below the URL of this store.

        Raises:
            ValueError: the URL or path is not below the URL of this store.

        Example:
            >>> Store("s3://bucket/data").key_of("s3://bucket/data/train/0.tar")
            'train/0.tar'
        """
        name = os.fspath(place)
        root = self._url
        if "://" not in name:
            if not (os.path.isabs(name) and root.startswith("file:")):
                return name.lstrip("/")
            name = url_of(name)
        inside = root if root.endswith("/") else f"{root}/"
        if not name.startswith(inside):
            raise ValueError(
                f"{redact_url(name)} is not under the URL of store=, {self.url}. Give keys of that "
                f"store"
            )
        key = name[len(inside) :]
        return unquote(key) if traits_of(root).quoted else key

    def backend(self) -> ObjectStore:
        """Return obstore's store, opened at the first use in this process.

        Raises:
            ForkedError: an ancestor of this process used a store before forking.
        """
        global _used_in
        if forked_from is not None:
            raise ForkedError(
                what="obstore, which reads object stores,",
                made_in=forked_from,
                used_in=os.getpid(),
            )
        if self._opened is None:
            _used_in = os.getpid()
            self._opened = self._backend or open_store(
                self._url, self._options, timeout=self._timeout
            )
        return self._opened

    @cached_property
    def store_id(self) -> str | None:
        """Identity of the store, equal in every process.

        See `headrace._store.open.store_id`.
        """
        return store_id(self._url, self._options, self._backend)

    @property
    def stats(self) -> RequestStats:
        """Counters of the running loader; outside a loader, of this store."""
        return session_stats.get(self._own_stats)

    def _tries(
        self,
        doing: str,
        key: str | None = None,
        index: object = None,
        whole: Tries | None = None,
    ) -> Tries:
        return Tries(self.stats.retry or self._retry, doing, key, index, whole=whole)

    async def _attempt(
        self, request: Callable[[ObjectStore], Awaitable[T]], tries: Tries
    ) -> T:
        """Make a request, with retries."""
        while True:
            store = self.backend()
            self.stats.requests += 1
            try:
                answer = await request(store)
            except FAILURES as error:
                failure = failure_of(error)
            else:
                self._gate.successes += 1
                tries.progress()
                return answer
            await self._retry_or_raise(failure, tries)

    async def _retry_or_raise(self, failure: RequestFailure, tries: Tries) -> None:
        """Wait until a failed request may be repeated, or raise its error."""
        stats, cause = self.stats, failure.cause
        stats.throttled += cause is Cause.THROTTLED
        stats.timed_out += cause is Cause.TIMED_OUT
        stats.throttle_events += cause in (Cause.THROTTLED, Cause.TIMED_OUT)
        now = time.monotonic()
        if (
            cause is Cause.EXPIRED
            and self._backend is None
            and now - self._last_renewal >= RENEWAL_INTERVAL
        ):
            # The next opening asks the provider for credentials, once for all waiting requests.
            self._last_renewal = now
            self._opened = None
        if not await self._gate.may_try_again(failure, tries):
            raise self._error(failure, tries)
        stats.retries += 1

    def _error(self, failure: RequestFailure, tries: Tries) -> StoreError:
        cause, password = failure.cause, unquote(urlsplit(self._url).password or "")
        secrets = secrets_in({"password": password, **self._options})
        kind, remedy = cause.error, cause.remedy
        answer = "" if failure.error is None else describe_error(failure.error, secrets)
        if CREDENTIAL_HOST in answer:
            kind, remedy = StoreUnreachableError, NO_CREDENTIALS
            if self.traits.prefix == "aws_":
                remedy += (
                    ". AWS profiles are read if one is named: AWS_PROFILE=default, or "
                    f"options={{{PROFILE!r}: …}}"
                )
        elif cause is Cause.REDIRECTED:
            pass
        elif tries.doing == "listing" and self.traits.web_server and kind is StoreError:
            remedy = f"This server cannot list; {NO_LISTING}"
        elif cause is Cause.REFUSED and self.traits.commit:
            remedy = HUB_REMEDY
        elif cause is Cause.NOT_FOUND and self.traits.bucket:
            remedy = IN_BUCKET
        doing = (
            tries.doing if tries.index is None else f"{tries.doing} (index {tries.index})"
        )
        message = ": ".join(
            filter(
                None, (doing, cause.text, redact_text(failure.detail, secrets), answer)
            )
        )
        return kind(
            f"{message}. {remedy}" if remedy else message,
            url=self.url,
            key=tries.key,
            index=tries.index,
            attempts=max(1, tries.attempts),
            elapsed=time.monotonic() - tries.began,
            status=failure.status,
        )

    async def read(
        self,
        key: str,
        start: int,
        stop: int,
        *,
        index: object = None,
        head: Head | None = None,
        checksum: str | None = None,
    ) -> memoryview:
        """Read the bytes of an object from `start` up to `stop`.

        More than 16 MiB are read as several ranges at once.

        Args:
            key: key of the object, relative to the store's URL.
            start: first byte, from 0.
            stop: end, exclusive. An empty range needs no request.
            index: index of the sample, for errors.
            head: the version of the object, if known. Only this version is read.
            checksum: ``algorithm:hexadecimal`` of the requested bytes; None for no check.

        Raises:
            ObjectNotFoundError: there is no such object.
            ObjectChangedError: the object has another version or size, or the bytes another length.
            ChecksumError: the bytes did not match `checksum`, on every attempt.
            StoreUnreachableError: no answer, or no byte within the time-out, on every attempt.
            StoreError: the store refused or failed, or ignores ranges and the object is large.
        """
        if stop <= start:
            return _NOTHING
        wanted = _Range(
            key, start, stop, index, head if self.if_match else None, checksum
        )
        if stop - start > LARGE and not self._ranges_ignored:
            return await self._read_parts(wanted)
        return await self._read(wanted, None)

    async def _read(self, wanted: _Range, whole: Tries | None) -> memoryview:
        """Read a range by a single request.

        `whole` has the deadline of the object if the range is a part of a longer read.
        """
        doing = f"reading bytes {wanted.start} to {wanted.stop} of {wanted.key!r}"
        if (
            not wanted.start
            and wanted.head is not None
            and wanted.stop == wanted.head.size
        ):
            doing = f"reading object {wanted.key!r}"
        tries = self._tries(doing, wanted.key, wanted.sample, whole)
        data, _ = await self._attempt(partial(self._get, wanted, False), tries)
        return data

    async def _get(
        self, wanted: _Range, initial: bool, store: ObjectStore
    ) -> tuple[memoryview, Any]:
        """Read a range by a single request, and return the object's metadata.

        The metadata is None if no version was compared. An `initial` read does not know the size of
        the object. An initial read returns all bytes of a shorter object, and all bytes if the
        store ignores ranges. A negative `start` means the last bytes. The checksum of an initial
        read is of the whole object.
        """
        key, start, stop, known = wanted.key, wanted.start, wanted.stop, wanted.head
        if initial and not key.strip("/"):  # a web server would answer with a page
            raise RequestFailure(Cause.NO_KEY, detail="it is empty")
        stats, whole = self.stats, self._ranges_ignored
        tag = None if known is None else strong(known.etag)
        if known is None and not (initial or whole):
            try:
                data = memoryview(
                    await get_range_async(store, key, start=start, end=stop)
                )
            except NATIVE_ERRORS as error:
                if classify_error(error).cause is not Cause.RANGE_IGNORED:
                    raise
                stats.requests += 1
            else:
                check_bytes(data, stop - start, wanted.checksum)
                return data, None
        options: dict[str, Any] = {}
        if not whole:
            options["range"] = (start, stop) if start >= 0 else {"suffix": -start}
            # For remote stores, the tag of the answer is compared instead.
            if tag is not None and not self.traits.remote:
                options["if_match"] = tag
        try:
            result = await obstore.get_async(store, key, options=options)  # type: ignore[arg-type]
        except NATIVE_ERRORS as error:
            failure = classify_error(error)
            ignored = failure.cause is Cause.RANGE_IGNORED
            # An empty object has no range to request: stores refuse the request in different ways,
            # or send the whole object.
            empty = failure.status == 416 or (
                failure.cause is Cause.OTHER and not self.traits.remote
            )
            if whole or not (ignored or (initial and empty)):
                raise
            stats.requests += 1
            # Not a HEAD: servers may leave out the size there.
            result = await obstore.get_async(store, key)
            if not ignored and result.meta["size"]:
                raise
            whole = ignored
        meta = result.meta
        # The answer has no entity tag, so only the store can compare.
        if meta["e_tag"] is None and tag is not None and not whole:
            stats.requests += 1
            options["if_match"] = tag
            result = await obstore.get_async(store, key, options=options)  # type: ignore[arg-type]
            meta = result.meta
        if known is not None:
            # Most answers are equal to the listing, and the comparison is a twentieth of the CPU
            # time.
            is_listed = meta["e_tag"] == known.etag and meta["size"] == known.size
            if not is_listed or known.modified is not None:
                check_version(known, Head.of(key, meta), sized=not initial)
        length = min(stop - start, meta["size"]) if initial else stop - start
        if whole:
            data = await self._take_whole(result)
            data, length = (data, len(data)) if initial else (data[start:stop], length)
        else:
            bodies = stats.bodies
            data = memoryview(
                await (
                    result.bytes_async()
                    if bodies is None
                    else bodies.read(result, length)
                )
            )
        check_bytes(
            data, length, None if initial and length < meta["size"] else wanted.checksum
        )
        return data, meta

    async def _take_whole(self, answer: GetResult) -> memoryview:
        size = answer.meta["size"]
        # Not for an empty object: servers that support ranges may ignore ranges there.
        if size and not self._ranges_ignored:
            self._ranges_ignored = True
            what = (
                f"{self.url} does not do ranges (python -m http.server does not, nginx does): "
                f"for a part of an object, all of it is sent."
            )
            # The user's filter may turn the warning into an error. The sample must not be lost.
            with contextlib.suppress(Warning):
                warnings.warn(what, stacklevel=2)
        if size > LARGEST_WHOLE:
            what = (
                f"all {size} bytes come for a range of them, and at most {LARGEST_WHOLE >> 20} MiB "
                f"are taken so"
            )
            raise RequestFailure(Cause.UNUSABLE, detail=what)
        data = memoryview(await answer.bytes_async())
        check_bytes(data, size)
        return data

    async def _read_parts(
        self, wanted: _Range, first: memoryview = _NOTHING
    ) -> memoryview:
        """Read a long range in parallel parts.

        A single connection rarely saturates a network. `first` has the first bytes of the range, if
        already read.
        """
        start, stop = wanted.start, wanted.stop
        tries = self._tries(f"reading object {wanted.key!r}", wanted.key, wanted.sample)
        known = wanted.head
        is_versioned = known is not None and known.version is not None
        # All parts must come from the same version, so an unknown version is requested first.
        if not (first or is_versioned or self.traits.commit):
            found = await self.head(wanted.key, index=wanted.sample)
            wanted = wanted._replace(
                head=replace(found, size=found.size if known is None else known.size)
            )
        view = self._allocate(stop - start, tries)
        view[: len(first)] = first

        async def fill(offset: int) -> None:
            end = min(offset + PART, stop)
            part = wanted._replace(start=offset, stop=end, checksum=None)
            view[offset - start : end - start] = await self._read(part, tries)

        await map_all(fill, range(start + len(first), stop, PART), AT_ONCE)
        data = view.toreadonly()
        if wanted.checksum is None or matches(data, wanted.checksum):
            return data
        # All parts came complete. Repeating so many requests would most likely give the same
        # damaged bytes.
        raise self._error(RequestFailure(Cause.DAMAGED), tries)

    def _allocate(self, length: int, tries: Tries) -> memoryview:
        memory = min(available_memory(), CgroupLimits.here().memory)
        with contextlib.suppress(MemoryError, ValueError):
            if length <= memory:
                # NumPy allocates huge pages: a fifth of the time of a `bytearray`.
                return np.empty(length, np.uint8).data
        detail = f"{length:,} bytes are claimed, and {memory:,.0f} bytes of memory are available"
        raise self._error(RequestFailure(Cause.UNUSABLE, detail=detail), tries)

    async def read_all(
        self,
        key: str,
        *,
        index: object = None,
        etag: str | None = None,
        checksum: str | None = None,
    ) -> memoryview:
        """Read an object of unknown size.

        The first request reads up to 16 MiB. The rest of a larger object is read in parallel parts.
        All parts come from the same version of the object, also without `etag`. Arguments and
        errors are as in `read`; `checksum` is of the whole object.
        """
        known = None if etag is None else Head(key, 0, etag)
        wanted = _Range(key, 0, LARGE, index, known, checksum)
        first, found = await self._read_initial(wanted, f"reading object {key!r}")
        if len(first) == found.size:
            return first
        return await self._read_parts(wanted._replace(stop=found.size, head=found), first)

    async def read_start(self, key: str, stop: int) -> InitialRead:
        """Read bytes up to `stop` of an object of unknown size.

        Returns all bytes if the store ignores ranges. The errors are as in `read`.
        """
        doing = f"reading object {key!r}"
        return await self._read_initial(_Range(key, 0, stop), doing)

    async def read_end(
        self, key: str, length: int, *, head: Head | None = None
    ) -> InitialRead:
        """Read the last `length` bytes of an object.

        Returns all bytes of a shorter object. `head` is the metadata of the object, if known.
        Without `head`, a store that ignores ranges gives all bytes, and a second request is needed
        if the object is empty or the store cannot read from the end. The errors are as in `read`.
        """
        if head is None and not self.traits.suffix_ranges:
            head = await self.head(key)
        if head is not None:
            start = max(0, head.size - length)
            return InitialRead(await self.read(key, start, head.size, head=head), head)
        doing = f"reading the end of {key!r}"
        return await self._read_initial(_Range(key, -length, 0), doing)

    async def _read_initial(self, wanted: _Range, doing: str) -> InitialRead:
        request = partial(self._get, wanted, True)
        data, meta = await self._attempt(
            request, self._tries(doing, wanted.key, wanted.sample)
        )
        return InitialRead(data, Head.of(wanted.key, meta))

    async def pages(
        self, prefix: str | None = None
    ) -> AsyncGenerator[Sequence[ObjectMeta], None]:
        """List the store, a page at a time.

        If a page fails, the listing continues after the last key so far. Some stores must begin the
        listing again, so an object may come twice: identify objects by `path`.

        Raises:
            StoreUnreachableError: no page came within the time-out, on every attempt.
            StoreError: the store refused or failed, or lists without end.
        """
        tries = self._tries("listing")
        last: str | None = None
        pages: Any = None  # the listing that goes on; None to begin after `last`
        returns: Counter[str] = Counter()

        async def request(store: ObjectStore) -> Sequence[ObjectMeta]:
            nonlocal pages
            going, pages = pages, None
            if going is None:
                returns.clear()
                offset = (
                    last if self.traits.remote and not self.traits.web_server else None
                )
                going = obstore.list(store, prefix, offset=offset, chunk_size=PAGE)
            try:
                found: Any = await asyncio.wait_for(anext(going, None), self._timeout)
            except TimeoutError:
                detail = f"no page with keys within {self._timeout} s"
                raise RequestFailure(Cause.TIMED_OUT, detail=detail) from None
            page: Sequence[ObjectMeta] = found or ()
            begin = page[0]["path"] if page else ""
            returns[begin] += 1
            if returns[begin] > 3:  # keys that differ by a slash at an end are equal here
                raise RequestFailure(Cause.ENDLESS, detail=repr(begin))
            pages = going
            return page

        while True:
            page = await self._attempt(request, tries)
            if not page:
                return
            tries.attempts = 0
            last = page[-1]["path"]
            yield page

    async def level(self, folder: str) -> ListResult[Sequence[ObjectMeta]]:
        """List the objects and the directories directly in a directory.

        Raises `StoreError`.
        """
        prefix, tries = folder or None, self._tries("listing")
        # The client reads all pages, and the pages may have no end.
        seconds = max(self._timeout, tries.policy.deadline)
        return await self._attempt(
            lambda store: asyncio.wait_for(
                obstore.list_with_delimiter_async(store, prefix), seconds
            ),
            tries,
        )

    async def head(self, key: str, *, index: object = None) -> Head:
        """Request the size and the version of an object.

        `index` is the index of the sample, for errors. Raises `StoreError`.
        """
        tries = self._tries(f"requesting the metadata of {key!r}", key, index)
        meta = await self._attempt(lambda store: obstore.head_async(store, key), tries)
        return Head.of(key, meta)

    async def put(self, key: str, data: bytes | Path, *, create: bool = False) -> None:
        """Write an object. A file is written in parts. Raises `StoreError`.

        With `create`, an object that exists stays unchanged.
        """

        async def write(store: ObjectStore) -> None:
            with contextlib.suppress(AlreadyExistsError):
                mode: Any = "create" if create else "overwrite"
                await obstore.put_async(store, key, data, mode=mode)

        await self._attempt(write, self._tries(f"writing {key!r}", key))


StoreLike = str | os.PathLike[str] | Store


def as_store(store: StoreLike) -> Store:
    """Return a store; make a store with defaults for a URL or a path."""
    return store if isinstance(store, Store) else Store(store)
