"""Streams of rows or Arrow tables of Parquet files, read by ranged requests of the requested columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

from headrace._core.ranks.distributed import RankChoice
from headrace._core.shards.discovery import Shard, Shards, find_shards
from headrace._core.shards.parquet import (
    SUFFIXES,
    RowGroup,
    RowGroupStream,
    TableReading,
    read_footer,
    read_footer_or_list,
)
from headrace._core.shards.stream import PartStream
from headrace._core.shards.tables import TableFile, as_expression, filter_text, select_columns
from headrace._core.store.listing import require_pyarrow
from headrace._core.store.store import StoreLike
from headrace._core.text import check_names, whole_number
from headrace.datasets.opening import OnOpeningError, opened

__all__ = ["ParquetDataset", "TableStream"]


class TableStream(PartStream[Any]):
    """Base of `ParquetDataset` and `ArrowDataset`; its options are described in the former."""

    parts_name = "row groups"
    _remedies = ("prefetch_row_groups",)

    _suffixes: ClassVar[tuple[str, ...]]
    _open_files: Callable[[Sequence[Shard], OnOpeningError], Sequence[TableFile]]

    def __init__(
        self,
        shards: Shards,
        *,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        format: Literal["rows", "arrow"] = "rows",
        table_rows: int | None = None,
        shuffle: bool = False,
        buffer_size: int = 0,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch_row_groups: int = 16,
        prefetch_bytes: int = 256 << 20,
        on_error: OnOpeningError = "raise",
        store: StoreLike | None = None,
    ) -> None:
        if format not in ("rows", "arrow"):
            raise ValueError(f"format={format!r} must be 'rows' or 'arrow'")
        if table_rows is not None and (table_rows < 1 or format == "rows"):
            raise ValueError(f"table_rows={table_rows} must be at least 1, and goes with format='arrow'")
        require_pyarrow(f"reading {type(self).__name__}")
        check_names("columns", columns)
        names = None if columns is None else tuple(columns)
        if names is not None and (not names or len(set(names)) < len(names)):
            raise ValueError(f"columns={list(names)} must be at least one name, without repetition")
        super().__init__(RankChoice(rank, world_size), shuffle, buffer_size, seed)
        self._format, self._table_rows = format, table_rows
        row_groups = whole_number("prefetch_row_groups", prefetch_row_groups, 1)
        most_bytes = whole_number("prefetch_bytes", prefetch_bytes, 1)
        self._reading = TableReading(table_rows, format == "rows", row_groups, most_bytes)
        filters = as_expression(filters)
        self._filters = filter_text(filters)
        files = self._open_files(find_shards(shards, suffixes=self._suffixes, store=store), on_error)
        selections = select_columns(files, names, filters, as_rows=format == "rows")  # columns of all files agree
        self._parts = [group for file, one in zip(files, selections, strict=True) for group in file.row_groups(one)]

    def __repr__(self) -> str:
        rows = sum(group.rows for group in self._parts)
        passing = "" if self._filters is None else f", those with {self._filters}"
        return f"{type(self).__name__}({len(self._parts)} {self.parts_name}, {rows} rows{passing})"

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` that holds the rows of all files."""
        import pyarrow

        selections = {group.selection.serialized: group.selection for group in self._parts}.values()
        return pyarrow.unify_schemas([each.given for each in selections], promote_options="permissive")

    def _sample_counts(self) -> Sequence[int] | None:
        return None if self._filters is not None else [self._samples_of(group) for group in self._parts]

    def _name_of(self, part: int, number: int) -> str:
        group = self._parts[part]
        if self._filters is not None:
            return f"{group.footer.shard.name}, {group.kind} {group.number}, sample {number + 1:,} that passes filters="
        rows = 1 if self._format == "rows" else self._table_rows or group.rows
        return f"{group.footer.shard.name}, row {sum(group.footer.rows[: group.number]) + number * rows:,} from 0"

    def _part_names(self) -> Iterator[str]:
        return (f"{group.footer.shard.name} {group.number} {group.rows}" for group in self._parts)

    def _options(self) -> dict[str, object]:
        own = {"format": self._format, "table_rows": self._table_rows, "filters": self._filters}
        return {**super()._options(), **own}

    def _read(self, parts: Sequence[int]) -> RowGroupStream:
        return RowGroupStream(self._parts, parts, self._reading)

    def _samples_of(self, group: RowGroup) -> int:
        if self._format == "rows":
            return group.rows
        return -(-group.rows // (self._table_rows or group.rows))


class ParquetDataset(TableStream):
    """A stream of the rows of Parquet files, or of their row groups as Arrow tables. Needs ``headrace[parquet]``.

    Files must have the same columns. Tables have the types that hold those of all files (`pyarrow.unify_schemas`,
    permissive: int32 and int64 give int64); a dictionary in some files only gives its values. Only the bytes of the
    requested columns are read, neighbours by one request, some row groups ahead of the consumer.
    Rows are in the order of the files, or with `shuffle` and `buffer_size` in one derived from the seed and the epoch.
    The constructor reads the footers, one request for each file; they are pickled with the dataset, so that no other
    process reads them again. In an async program use ``await asyncio.to_thread(ParquetDataset, ...)``.

    A row is a dict of Python objects, as `pyarrow.Table.to_pylist` makes them: nulls are None, lists are lists, structs
    dicts, decimals `decimal.Decimal`, timestamps `datetime.datetime`; dictionary columns give the values. The default
    collate does not accept None: transform such rows, or give a `collate_fn`.

    A corrupt row group raises a `ShardError` with file and row group, after the blocks of rows that could be decoded;
    the stream continues with the other row groups. So does a block of 1,024 rows with a value that Python's types
    cannot hold, such as a date after the year 9999, or text that is not UTF-8; ``format="arrow"`` converts no values.
    Flipped bits are certain to be detected only if the writer stored checksums (``write_page_checksum=True`` in
    pyarrow). A file that has changed raises `ObjectChangedError`.

    Args:
        shards: URLs or paths, as for `TarDataset`; in a directory, files ending in ``.parquet``, ``.pq`` or ``.parq``.
        columns: names of columns to read, ``"a.b"`` for a part of a nested one; None for all. A directory called
            ``label=cat`` on the way to a file (Hive partitions) is a column `label` of its rows.
        filters: rows to give, as for `pyarrow.parquet.read_table`: an expression of `pyarrow.compute`, or conditions
            (``[("x", ">", 3), ("label", "in", ["cat"])]``). Row groups without such rows by their statistics are not
            read; as in pyarrow, these leave out NaN, which only a negation would let pass. Columns that are not in
            `columns` are read and not given. The numbers of rows are then unknown: there is no `len`.
        format: ``"rows"``: dicts. ``"arrow"``: a `pyarrow.Table` for each row group with rows to give.
        table_rows: maximum rows of a table, for ``format="arrow"``; None for whole row groups, where pyarrow cannot
            decode nested strings of more than 2 GiB. Each table has memory of its own.
        shuffle: whether to shuffle the row groups at each epoch, equally on all ranks.
        buffer_size: samples of the shuffle buffer; 0 for none.
        seed: seed of both orders, together with the epoch; None for that of the loader, which is then to be the same on
            all ranks, else 0.
        rank: the share of the stream to read; as for `TarDataset`.
        world_size: number of ranks.
        prefetch_row_groups: maximum row groups read at once; they are ahead of the one whose samples are given out.
        prefetch_bytes: maximum compressed bytes of all these; at least one row group is read whatever its size.
        on_error: what a broken or missing file is for the constructor: ``"raise"``, or ``"skip"``: left out,
            with one warning. Failed requests, and columns that files do not share, are errors always.
        store: store of all files, a `headrace.Store` or its URL. `shards` are then keys in it, or URLs under its URL.
            By default each URL's own store is opened with default options.

    Raises:
        MissingExtraError: pyarrow is not installed.
        ShardError: a file is not Parquet, corrupt, encrypted, or has other columns than the first; for tables, also
            columns of types that no one type holds.
        StoreError: a request failed.
        ValueError: an invalid argument, or a file lacks a column.

    Example:
        >>> import pathlib, tempfile, pyarrow, pyarrow.parquet
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> table = pyarrow.table({"x": [1, 2, None], "y": ["a", "b", "c"], "z": [0.0, 0.5, 1.0]})
        >>> pyarrow.parquet.write_table(table, folder / "0.parquet")
        >>> list(ParquetDataset(folder, columns=["x", "y"]))
        [{'x': 1, 'y': 'a'}, {'x': 2, 'y': 'b'}, {'x': None, 'y': 'c'}]
    """

    _suffixes = SUFFIXES

    @staticmethod
    def _open_files(shards: Sequence[Shard], on_error: OnOpeningError) -> Sequence[TableFile]:
        found = chain.from_iterable(opened(shards, read_footer_or_list, on_error=on_error))
        return opened([*found], read_footer, on_error=on_error)
