"""The public description of an object store: where it is, and how requests to it are made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from headrace._core.retry_policy import RetryPolicy, as_policy
from headrace._core.store.client import StoreClient
from headrace._core.store.open import check_shared
from headrace._core.store.options import traits_of
from headrace._core.store.redaction import redact_url, url_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class Store:
    """An object store, or a directory of one, and how requests to it are made.

    Every dataset over a store takes one. Datasets that share a `Store` share its connections and its retry budget.
    Nothing is opened or requested before a dataset is made of it. It can be pickled; each process opens its own
    connections.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``http(s)://``, ``file:///directory``, or a directory's path.
        options: for `obstore.store.from_url`: credentials, region, endpoint, `client_options`, `retry_config`; and
            ``"allow_redirects"``, whether the store may redirect its clients to another host, and ``"profile"``, an AWS
            profile (docs/stores.md).
        backend: a ready store of obstore's. `url` is then only a name for messages. ``memory://`` needs one. Its own
            time-outs and retries stay as they are.
        timeout: seconds without a byte after which a request has failed, however long it takes in all. Time-outs in
            `options` take precedence.
        retry: how failed requests are retried: a `RetryPolicy`, or the maximum number of attempts. A loader's `retry`
            takes precedence.
        if_match: whether reads are conditional on the entity tag that was listed, or compared with the modification
            time if there is none, so that an object that was overwritten by one of the same length is an error too.
            False saves about 50 µs of CPU time a sample.
        list_concurrency: the maximum number of requests in flight of one listing.

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
        list_concurrency: int = 16,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r} must be more than zero seconds")
        if backend is not None and options is not None:
            raise ValueError("backend= is a store that is open already; options= would be ignored. Give one of the two")
        if list_concurrency < 1:
            raise ValueError(f"list_concurrency={list_concurrency!r} must be at least 1")
        named = os.fspath(url)
        if backend is None:
            check_shared(named)
            named = url_of(named)
        policy = None if retry is None else as_policy(retry)
        self._client = StoreClient(
            named,
            options or {},
            backend=backend,
            timeout=timeout,
            retry=policy,
            if_match=if_match,
            list_concurrency=list_concurrency,
        )

    @property
    def url(self) -> str:
        """The URL, without user name, password and query string."""
        return redact_url(self._client.url)

    def key_of(self, place: str | os.PathLike[str]) -> str:
        """The key of an object of this store, from its key, or from its URL or absolute path under this store's.

        Raises:
            ValueError: the URL is not under that of this store.

        Example:
            >>> Store("s3://bucket/data").key_of("s3://bucket/data/train/0.tar")
            'train/0.tar'
        """
        name = os.fspath(place)
        root = self._client.url
        if "://" not in name:
            if not (os.path.isabs(name) and root.startswith("file:")):
                return name.strip("/")
            name = url_of(name)
        inside = root if root.endswith("/") else f"{root}/"
        if not name.startswith(inside):
            raise ValueError(f"{redact_url(name)} is not under the URL of store=, {self.url}. Give keys of that store")
        key = name[len(inside) :]
        return unquote(key) if traits_of(root).quoted else key

    def __repr__(self) -> str:
        return f"Store({self.url!r})"


StoreLike = str | os.PathLike[str] | Store


def as_store(store: StoreLike) -> Store:
    """The store itself, or one with defaults for a URL or a path."""
    return store if isinstance(store, Store) else Store(store)
