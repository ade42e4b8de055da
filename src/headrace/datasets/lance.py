"""Rows of Lance datasets, map-style."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread

from headrace._base.text import check_names, short_repr
from headrace._extras import require
from headrace._shards.discovery import is_panic
from headrace._store.redaction import redact_text, redact_url, secrets_in
from headrace._streams.map_style import AsyncDataset, positions
from headrace.errors import StoreError

__all__ = ["LanceDataset"]


class LanceDataset(AsyncDataset[Any]):
    """The rows of a Lance dataset, map-style. Needs ``headrace[lance]``.

    A sample is a dict of Python objects. A loader takes the rows of a batch by one call of lance.
    Lance requests only the bytes of the rows in the columns. An index that is a list of indices
    gives a `pyarrow.Table`. So does a sampler of batches with ``batch_size=None``.

    All processes read the same version. Rows appended, deleted or overwritten later are not seen.
    If the version is cleaned up meanwhile, reads raise an error. Give a `version` for a job to be
    resumed.

    Lance makes the requests, without headrace's retries, limits and statistics.

    Args:
        url: URL or path of the dataset.
        columns: names of columns to read; None for all.
        version: number or tag of the version; None for the latest.
        storage_options: options of lance: credentials, region, endpoint. Accepts the options of
            `headrace.Store` with string values.

    Raises:
        MissingExtraError: pylance is not installed.
        StoreError: the dataset or the version cannot be opened, or lacks a column. While reading: a
            request failed.

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
            # Pickled with the manifest, so each process reads the same files.
            self._dataset = lance.dataset(os.fspath(url), version, storage_options=options)
            self._length: int = self._dataset.count_rows()
            self._columns = None if columns is None else list(columns)
            self._dataset.take([], self._columns)  # raises an error for an unknown column

    @property
    def version(self) -> int:
        """Number of the version of the dataset."""
        return int(self._dataset.version)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, version={self.version}, {len(self)} rows)"

    @contextlib.contextmanager
    def _converted(self, what: str) -> Iterator[None]:
        """Raise errors and Rust panics of lance as `StoreError` without secrets."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, OSError | ValueError | RuntimeError) and not is_panic(error):
                raise
            raise StoreError(f"{what}: {redact_text(str(error), self._secrets)}") from None

    async def aget(self, index: int | list[int]) -> Any:
        """Take the row at `index`, or a table of several rows.

        Negative indices count from the end.
        """
        return (
            await self._take(index) if isinstance(index, list) else (await self.agets([index]))[0]
        )

    async def agets(self, indices: Sequence[int]) -> list[Any]:
        """Take the rows at `indices`, in order."""
        return list((await self._take(indices)).to_pylist())

    async def _take(self, indices: Sequence[int]) -> Any:
        rows = positions(indices, len(self)).tolist()
        # On two cores asyncio's own pool has six threads, and anyio's pool has forty.
        taking = asyncio.ensure_future(anyio.to_thread.run_sync(self._take_rows, rows))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # Wait for the thread: a thread in lance at the interpreter's exit aborts the process.
            await asyncio.gather(taking, return_exceptions=True)
            raise

    def _take_rows(self, rows: list[int]) -> Any:
        with self._converted(f"cannot read {self!r}, rows {short_repr(rows)}"):
            return self._dataset.take(rows, self._columns)
