"""Rows of Lance datasets, map-style."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio.lowlevel
import anyio.to_thread

from headrace._core.extras import require
from headrace._core.shards.discovery import is_panic
from headrace._core.store.redaction import redact_text, redact_url, secrets_in
from headrace._core.streams.map_style import AsyncDataset, positions
from headrace._core.text import check_names, short_repr
from headrace.errors import StoreError

__all__ = ["LanceDataset"]

_THREADS = (
    64  # of an event loop, which wait for requests; of asyncio's own there are six on two cores
)
_limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("headrace.lance")


class LanceDataset(AsyncDataset[Any]):
    """The rows of a Lance dataset, map-style, as dicts of Python objects. Needs ``headrace[lance]``.

    A loader takes the rows of a batch by one call of lance, which requests only their bytes of the
    columns. A list of indices as one index gives a `pyarrow.Table`, as do samplers of batches with
    ``batch_size=None``.

    One version is read, in every process: what is appended, deleted or overwritten later is not
    seen, and a version that is cleaned up meanwhile is an error. Give a job that is to be resumed
    its `version`. Requests are lance's own: without headrace's retries, limits and statistics.

    Args:
        url: URL or path of the dataset.
        columns: names of columns to read; None for all.
        version: number or tag of the version; None for the latest.
        storage_options: for lance: credentials, region, endpoint. Those of `headrace.Store` that
            are strings.

    Raises:
        MissingExtraError: pylance is not installed.
        StoreError: the dataset or the version cannot be opened, or lacks a column; when it is read,
            that a request failed.

    Example:
        >>> import pathlib, tempfile, lance, pyarrow
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "table.lance"
        >>> _ = lance.write_dataset(pyarrow.table({"x": [1, 2, 3], "y": ["a", "b", "c"]}), path)
        >>> dataset = LanceDataset(path, columns=["x"])
        >>> len(dataset), dataset[-1], dataset[[2, 0]]["x"].to_pylist()
        (3, {'x': 3}, [3, 1])
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        version: int | str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        check_names("columns", columns)
        lance = require("lance", "LanceDataset", "pylance", "lance")
        options = dict(storage_options or {})
        self._name, parts = redact_url(os.fspath(url)), urlsplit(os.fspath(url))
        shown = filter(None, (parts.username, parts.password, parts.query, parts.fragment))
        self._secrets = (*secrets_in(options), *(shown if parts.scheme else ()))
        with self._converted(f"cannot open Lance dataset {self._name}"):
            # Pickled with its manifest, so that each process reads the same files.
            self._dataset = lance.dataset(os.fspath(url), version, storage_options=options)
            self._length: int = self._dataset.count_rows()
            self._columns = None if columns is None else list(columns)
            self._dataset.take([], self._columns)  # an unknown column

    @property
    def version(self) -> int:
        """The number of the version that is read."""
        return int(self._dataset.version)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, version={self.version}, {len(self)} rows)"

    @contextlib.contextmanager
    def _converted(self, what: str) -> Iterator[None]:
        """Raise lance's errors, and the panics of its Rust code, as `StoreError` without secrets."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, OSError | ValueError | RuntimeError) and not is_panic(error):
                raise
            raise StoreError(f"{what}: {redact_text(str(error), self._secrets)}") from None

    async def aget(self, index: int | list[int]) -> Any:
        """Take the row at `index`, or a table of the rows at several; negative indices count from the end."""
        return (
            await self._take(index) if isinstance(index, list) else (await self.agets([index]))[0]
        )

    async def agets(self, indices: Sequence[int]) -> list[Any]:
        """Take the rows at `indices`, in order."""
        return list((await self._take(indices)).to_pylist())

    async def _take(self, indices: Sequence[int]) -> Any:
        rows = positions(indices, len(self)).tolist()
        if (limiter := _limiter.get(None)) is None:
            _limiter.set(limiter := anyio.CapacityLimiter(_THREADS))
        take = anyio.to_thread.run_sync(self._take_rows, rows, limiter=limiter)
        taking = asyncio.ensure_future(take)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # A thread that is in lance while the interpreter exits would abort the process.
            await asyncio.gather(taking, return_exceptions=True)
            raise

    def _take_rows(self, rows: list[int]) -> Any:
        with self._converted(f"cannot read {self!r}, rows {short_repr(rows)}"):
            return self._dataset.take(rows, self._columns)
