"""Objects by GET through obstore, for loaders without a client of their own, and torch datasets of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
import torch
from contents import key_of
from obstore.store import from_url
from store import BUCKET

__all__ = ["BatchInThreads", "GetRange", "GetRangeIfMatch", "GetWhole", "OneAtATime"]
__all__ += ["allow_http_for_litdata", "raw_litdata"]


class Getter:
    """An object by GET, blocking or not; each process has a client of its own.

    Args:
        url: of the store.
        options: for `obstore.store.from_url`.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        self.options = options
        self._client: Any = None

    @property
    def client(self) -> Any:
        if self._client is None:
            self._client = from_url(self.url, **self.options)
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}


class GetRange(Getter):
    """Objects whose length is known: the answer to one await is all of it.

    Args:
        url: of the store.
        options: for `obstore.store.from_url`.
        size: bytes of an object.
    """

    def __init__(self, url: str, options: Mapping[str, Any], size: int) -> None:
        super().__init__(url, options)
        self.size = size

    def __call__(self, number: int) -> Any:
        return obstore.get_range(self.client, key_of(number), start=0, length=self.size)

    async def aget(self, number: int) -> Any:
        return await obstore.get_range_async(
            self.client, key_of(number), start=0, length=self.size
        )


class GetRangeIfMatch(GetRange):
    """The same of the version that was listed; the bytes are a second await.

    Args:
        url: of the store.
        options: for `obstore.store.from_url`.
        size: bytes of an object.
        tags: entity tags of the objects, by key.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any], size: int, tags: Mapping[str, str]
    ) -> None:
        super().__init__(url, options, size)
        self.tags = tags

    async def aget(self, number: int) -> Any:
        key = key_of(number)
        answer = await obstore.get_async(
            self.client,
            key,
            options={"range": (0, self.size), "if_match": self.tags[key]},
        )
        return await answer.bytes_async()


class GetWhole(Getter):
    """Objects of any length: one await for the beginning of the answer, one for its body."""

    def __call__(self, number: int) -> Any:
        return obstore.get(self.client, key_of(number)).bytes()

    async def aget(self, number: int) -> Any:
        return await (await obstore.get_async(self.client, key_of(number))).bytes_async()


class OneAtATime(torch.utils.data.Dataset[Any]):
    """A torch dataset as it is usually written: a blocking GET in `__getitem__`."""

    def __init__(self, get: Callable[[int], Any], count: int) -> None:
        self.get = get
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


class BatchInThreads(OneAtATime):
    """The best that a torch dataset can do with a blocking client: the GETs of a batch at once, in threads."""

    pool: ThreadPoolExecutor | None = None

    def __init__(self, get: Callable[[int], Any], count: int, threads: int) -> None:
        super().__init__(get, count)
        self.threads = threads

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads)
        return list(self.pool.map(self.get, indices))


def allow_http_for_litdata(worker: int = 0) -> None:
    """LitData passes the endpoint to obstore, but has no option to allow plain HTTP."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def raw_litdata(
    endpoint: str, files: Mapping[str, int], folder: str, **options: Any
) -> Any:
    """A `StreamingRawDataset` of files and their sizes, without the listing that it would make with s3fs."""
    from litdata import StreamingRawDataset
    from litdata.raw.indexer import FileIndexer, FileMetadata

    # Warns that objects of 56 KB are small.
    logging.getLogger("litdata").setLevel(logging.ERROR)

    class Known(FileIndexer):
        def build_or_load_index(self, *_: Any, **__: Any) -> list[FileMetadata]:
            return [
                FileMetadata(f"s3://{BUCKET}/{key}", size) for key, size in files.items()
            ]

        def __reduce__(self) -> Any:
            return FileIndexer, ()  # workers get the dataset with its files

    client = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    client |= dict.fromkeys(("aws_access_key_id", "aws_secret_access_key"), "none")
    return StreamingRawDataset(
        f"s3://{BUCKET}/",
        cache_dir=folder,
        indexer=Known(),
        storage_options=client,
        **options,
    )
