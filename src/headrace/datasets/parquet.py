"""Rows of Parquet files, map-style, read by ranged requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from headrace._base.array_types import IntArray, Uint32Array
from headrace._base.text import check_names, whole_number
from headrace._records.batches import Rows
from headrace._shards.discovery import (
    OnOpeningError,
    Shard,
    Shards,
    find_shards,
    open_each,
)
from headrace._shards.parquet import SUFFIXES, RowGroup, read_footer, read_footer_or_list
from headrace._shards.tables import (
    Selection,
    TableFile,
    as_expression,
    filter_columns,
    filter_text,
    passing_rows,
    select_columns,
)
from headrace._shards.unpacked import UNPACKED_BYTES, UnpackedShards, loaded
from headrace._store.listing import require_pyarrow
from headrace._store.ranges import map_all
from headrace._store.store import StoreLike
from headrace._streams.kinds import Blocks
from headrace.datasets.cached import IndexedShards

_FEW = 16  # rows to convert on the event loop
_FILTERED_AT_ONCE = 4  # row groups of a file with filter columns read at the same time


class TableDataset(IndexedShards[Any]):
    """Base of `ParquetDataset` and `ArrowDataset`.

    `ParquetDataset` describes the options.

    Attributes:
        gives_tables: whether a sample is a table with one row.
    """

    _parts_name: ClassVar[str] = "row groups"
    # Divides the row groups side by side, for the row groups with rows that are planned ahead. Rows
    # are Python objects and take five times the memory of tables. All row groups of tables are
    # planned.
    _rows_ahead: ClassVar[int] = 8
    _suffixes: ClassVar[tuple[str, ...]]
    _open_files: Callable[[Sequence[Shard], OnOpeningError], Sequence[TableFile]]

    def __init__(
        self,
        shards: Shards,
        *,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        format: Literal["rows", "arrow"] = "rows",
        unpacked_bytes: int = UNPACKED_BYTES,
        on_error: OnOpeningError = "raise",
        store: StoreLike | None = None,
    ) -> None:
        if format not in ("rows", "arrow"):
            raise ValueError(f"format={format!r} must be 'rows' or 'arrow'")
        require_pyarrow(f"reading {type(self).__name__}")
        check_names("columns", columns)
        names = None if columns is None else tuple(columns)
        if names is not None and (not names or len(set(names)) < len(names)):
            raise ValueError(
                f"columns={list(names)} must be at least one name, without repetition"
            )
        self.gives_tables = format == "arrow"
        self._unpacked = UnpackedShards(whole_number("unpacked_bytes", unpacked_bytes, 1))
        filters = as_expression(filters)
        self._filters = filter_text(filters)
        files = self._open_files(
            find_shards(shards, suffixes=self._suffixes, store=store), on_error
        )
        # The columns of all files agree.
        selections = select_columns(files, names, as_rows=not self.gives_tables)
        self._groups: list[RowGroup] = []
        # Numbers of the rows of each row group that pass the filter. Empty without a filter.
        self._passing: list[Uint32Array] = []
        if filters is None:
            for file, selection in zip(files, selections, strict=True):
                self._groups += file.row_groups(selection)
        else:
            self._filter(files, selections, filters, on_error)
        counts = (
            [*map(len, self._passing)]
            if self._passing
            else [group.rows for group in self._groups]
        )
        super().__init__([group.footer.shard for group in self._groups], counts)
        self._schemas = {selection.serialized: selection for selection in selections}

    def _filter(
        self,
        files: Sequence[TableFile],
        selections: Sequence[Selection],
        filters: Any,
        on_error: OnOpeningError,
    ) -> None:
        async def read(
            file: tuple[TableFile, Selection, Selection],
        ) -> list[tuple[RowGroup, Uint32Array]]:
            table_file, needed, given = file
            groups = table_file.row_groups(needed, filters)
            found = await map_all(partial(_passing, filters), groups, _FILTERED_AT_ONCE)
            pairs = zip(groups, found, strict=True)
            return [
                (replace(group, selection=given), rows)
                for group, rows in pairs
                if len(rows)
            ]

        needed = filter_columns(files, filters)
        found = open_each(
            [*zip(files, needed, selections, strict=True)], read, on_error=on_error
        )
        for group, rows in chain.from_iterable(found):
            self._groups.append(group)
            self._passing.append(rows)

    def __repr__(self) -> str:
        passing = "" if self._filters is None else f", those with {self._filters}"
        parts = f"{len(self._groups)} {self._parts_name}"
        return f"{type(self).__name__}({parts}, {len(self)} rows{passing})"

    @property
    def schema(self) -> Any:
        """`pyarrow.Schema` for the rows of all files."""
        import pyarrow

        schemas = [selection.given for selection in self._schemas.values()]
        return pyarrow.unify_schemas(schemas, promote_options="permissive")

    @cached_property
    def blocks(self) -> Blocks:
        """Row groups, as blocks of a random order."""
        nbytes = sum(group.nbytes for group in self._groups)
        ahead = 1 if self.gives_tables else self._rows_ahead
        return Blocks.whole(
            self._unpacked.limit, nbytes, self.counts, self._filters or "", ahead=ahead
        )

    def sample_key(self, index: int) -> str:
        """Return the file and the row of a sample."""
        number, row = self.locate(index)
        group = self._groups[number]
        row = int(self._passing[number][row]) if self._passing else row
        return f"{group.footer.shard.key}[{sum(group.footer.rows[: group.number]) + row}]"

    async def aget(self, index: int) -> Any:
        """Read a row, as dict or table."""
        return (await self.agets([index]))[0]

    async def agets(self, indices: Sequence[int]) -> Sequence[Any]:
        """Read rows, in the order of `indices`.

        Row groups not in memory are read concurrently.
        """
        order: IntArray | None = None
        if (
            isinstance(indices, range)
            and len(indices)
            and indices.start >= 0
            and indices.step == 1
        ):
            wanted = self._neighbours(indices)
        else:
            wanted, order = self._by_group(indices)
        read = await self._tables([number for number, _ in wanted])
        parts: list[_Part] = []
        for number, rows in wanted:
            passing = self._passing[number][rows] if self._passing else rows
            parts.append(_Part(self._groups[number], read[number], passing))
        # A thread would take longer for few rows, and for slices. Slices are not copied.
        if len(indices) <= _FEW or (self.gives_tables and isinstance(indices, range)):
            return self._samples(parts, order)
        return await asyncio.to_thread(self._samples, parts, order)

    def _samples(self, parts: Sequence[_Part], order: IntArray | None) -> Sequence[Any]:
        """Return the rows of several row groups, as one table or as Python objects.

        Args:
            parts: the rows.
            order: position ``order[n]`` of the result gets row n. None if the rows are in order.
        """
        import pyarrow

        if self.gives_tables:
            table = pyarrow.concat_tables([part.take() for part in parts])
            return Rows(
                table
                if order is None
                else _take(table.combine_chunks(), np.argsort(order))
            )
        made = [*chain.from_iterable(part.as_rows() for part in parts)]
        if order is None:
            return made
        return [made[place] for place in np.argsort(order).tolist()]

    def _neighbours(self, indices: range) -> list[_Wanted]:
        """Return the rows of each row group, for consecutive indices."""
        left, wanted = len(indices), list[_Wanted]()
        number, row = self.locate(indices.start)
        self.locate(indices.stop - 1)  # may raise an IndexError
        while left > 0:
            rows = range(
                row, min(row + left, int(self._ends[number] - self._firsts[number]))
            )
            wanted.append((number, rows))
            number, row, left = number + 1, 0, left - len(rows)
        return wanted

    def _by_group(self, indices: Sequence[int]) -> tuple[list[_Wanted], IntArray | None]:
        """Return the rows of each row group, and the rows' order.

        The order has the position of each row in `indices`. None if the rows are in order.
        """
        numbers, rows, _ = self._rows(indices)
        order = None
        if bool((np.diff(numbers) < 0).any()):
            order = np.argsort(numbers, kind="stable")
            numbers, rows = numbers[order], rows[order]
        wanted, begins = np.unique(numbers, return_index=True)
        # For no indices, `np.split` returns one empty part: `strict=False` drops the part.
        return [*zip(wanted.tolist(), np.split(rows, begins[1:]), strict=False)], order

    async def _tables(self, numbers: Sequence[int]) -> dict[int, Any]:
        """Return the tables of row groups."""
        missing = [number for number in numbers if self._unpacked.peek(number) is None]
        read = dict(zip(missing, await map_all(self._load, missing), strict=True))
        return {
            number: read[number] if number in read else await self._load(number)
            for number in numbers
        }

    async def _load(self, number: int) -> Any:
        """Return the table of a row group.

        The row group is read and decoded once for all waiting calls.
        """
        return await self._unpacked.get(number, self._groups[number].load)


class ParquetDataset(TableDataset):
    """The rows of Parquet files, map-style. Needs ``headrace[parquet]``.

    Files must have the same columns. If types differ, tables have common types for the values of
    all files (`pyarrow.unify_schemas`, permissive: int32 and int64 give int64). A dictionary in
    only some files gives the plain values.

    A row group is read as a whole: only the bytes of the requested columns, and neighbouring ranges
    by one request. A row group is decoded once for all waiting rows. A loader without a sampler
    reads row groups ahead. With ``shuffle=True`` the loader reads row groups side by side, as many
    as fit in half of `unpacked_bytes`. An order that is random over all rows would read a row group
    for almost each row. `stream` gives the rows as a stream.

    The constructor reads the footers, one request for each file. The footers are pickled with the
    dataset, so other processes do not read the footers again. In an async program use ``await
    asyncio.to_thread(ParquetDataset, ...)``.

    A row is a dict of Python objects, as made by `pyarrow.Table.to_pylist`: nulls are None, lists
    are lists, structs dicts, decimals `decimal.Decimal`, timestamps `datetime.datetime`. Dictionary
    columns give the values. The default collate does not accept None: transform rows with None, or
    give a `collate_fn`.

    The rows of a corrupt row group raise a `ShardError` with file and row group. Other row groups
    can be read. A row with a value that Python's types cannot hold also raises a `ShardError`: for
    example a date after the year 9999, or text in another encoding than UTF-8. ``format="arrow"``
    converts no values. Flipped bits are certain to be detected only if the writer stored checksums
    (``write_page_checksum=True`` in pyarrow). A changed file raises `ObjectChangedError`.

    Args:
        shards: URLs or paths, as for `TarDataset`. In a directory, files ending in ``.parquet``,
            ``.pq`` or ``.parq``.
        columns: names of columns to read, ``"a.b"`` for a part of a nested column. None reads all
            columns. A directory called ``label=cat`` on the way to a file (Hive partitions) is a
            column `label` of the file's rows.
        filters: rows to give, as for `pyarrow.parquet.read_table`: an expression of
            `pyarrow.compute`, or conditions (``[("x", ">", 3), ("label", "in", ["cat"])]``). The
            constructor reads the columns named by the filters. Row groups without matching rows, by
            their statistics, are not read. As in pyarrow, statistics leave out NaN. Only a negation
            would let NaN pass. The numbers of the passing rows are kept, 4 bytes each.
        format: ``"rows"``: dicts. ``"arrow"``: a sample is a `pyarrow.Table` with one row. A batch
            of a loader reaches `collate_fn` as one table. Without a `collate_fn` the batch is this
            table. `headrace.collate_table` makes tensors of the columns. In the order of the
            dataset, the table is a slice of a row group. The row group stays in memory as long as
            the batch.
        unpacked_bytes: bytes of decoded row groups kept by each process.
        on_error: how the constructor treats a broken or missing file. ``"raise"`` raises the error.
            ``"skip"`` leaves out the file, with one warning for all. Failed requests, and columns
            missing in some files, are always errors.
        store: store of all files, a `headrace.Store` or its URL. `shards` are then keys in the
            store, or URLs under the store's URL. By default each URL's own store is opened with
            default options.

    Raises:
        MissingExtraError: pyarrow is not installed.
        ShardError: a file is not Parquet, corrupt, encrypted, or has other columns than the first.
            For tables: no common type holds the values of a column.
        StoreError: a request failed.
        ValueError: an invalid argument, or a file lacks a column.

    Example:
        >>> import pathlib, tempfile, pyarrow, pyarrow.parquet
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> table = pyarrow.table({"x": [1, 2, None], "y": ["a", "b", "c"], "z": [0.0, 0.5, 1.0]})
        >>> pyarrow.parquet.write_table(table, folder / "0.parquet")
        >>> dataset = ParquetDataset(folder, columns=["x", "y"])
        >>> len(dataset), dataset[2]
        (3, {'x': None, 'y': 'c'})
    """

    _suffixes = SUFFIXES

    @staticmethod
    def _open_files(
        shards: Sequence[Shard], on_error: OnOpeningError
    ) -> Sequence[TableFile]:
        found = chain.from_iterable(
            open_each(shards, read_footer_or_list, on_error=on_error)
        )
        return open_each([*found], read_footer, on_error=on_error)


_Rows = range | IntArray | Uint32Array
_Wanted = tuple[int, _Rows]
"""Number of a row group, and rows in the row group."""


async def _passing(filters: Any, group: RowGroup) -> Uint32Array:
    table = await loaded(group.load)
    return await asyncio.to_thread(passing_rows, table, filters)


class _Part(NamedTuple):
    """Some rows of a row group."""

    group: RowGroup
    table: Any  # all rows of the row group
    rows: _Rows  # numbers of the wanted rows

    def take(self) -> Any:
        """Return the rows as a table, without a copy if consecutive."""
        if isinstance(self.rows, range):
            return self.table.slice(self.rows.start, len(self.rows))
        return _take(self.table, self.rows)

    def as_rows(self) -> list[Any]:
        """Return the rows as Python objects."""
        try:
            return self.take().to_pylist()  # type: ignore[no-any-return]
        except Exception as error:  # OverflowError, UnicodeDecodeError and others
            cause = f"{type(error).__name__}: {error}"
            which = (
                f"row {self.rows[0]:,} of it"
                if len(self.rows) == 1
                else "some of its rows"
            )
            remedy = "read it with format='arrow'"
            what = f"{which} cannot be converted to Python objects; {remedy}: {cause}"
            raise self.group.error(what) from None


def _take(table: Any, rows: Any) -> Any:
    """Copy rows of a table."""
    import pyarrow

    try:
        return table.take(rows)
    except pyarrow.ArrowNotImplementedError:  # `take` does not support string views
        return pyarrow.concat_tables(
            [table.slice(row, 1) for row in rows.tolist()] or [table.slice(0, 0)]
        )
