"""Rows and columns that a dataset reads from files of tables.

Covers filters, Hive partitions, and a common schema for all files.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from urllib.parse import unquote

import numpy as np

from headrace._base.array_types import Uint32Array
from headrace._base.text import short_repr
from headrace._shards.discovery import Shard
from headrace._shards.reading import names_digest
from headrace._store.listing import require_pyarrow

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_LONGEST_TEXT = 500  # characters of a filter in a repr and in a checksum
_NUMBER = "headrace: number of the row"  # name of a temporary column


class TableFile(ABC):
    """File of a table with groups of rows."""

    shard: Shard  # in the version that was opened
    schema: Any
    rows: tuple[int, ...]  # number of rows of each group

    @abstractmethod
    def row_groups(self, selection: Selection, filters: Any = None) -> Sequence[Any]:
        """Return the groups with rows that may pass an expression.

        `selection` has the columns of the groups.
        """

    def selected(self, columns: Sequence[str]) -> Any:
        """Return the schema of the columns that are read for `columns`.

        Raises:
            KeyError: a column is missing; with the first missing column.
        """
        import pyarrow

        if unknown := [column for column in columns if column not in self.schema.names]:
            raise KeyError(unknown[0])
        return pyarrow.schema([field for field in self.schema if field.name in columns])


@dataclass(frozen=True, slots=True)
class Selection:
    """Columns that a dataset reads and gives from a file."""

    columns: tuple[str, ...] | None  # names of the columns to read; None for all
    # Columns of a single value (an Arrow scalar), not in the file.
    added: Mapping[str, Any]
    # The schema of the given columns, with the types of the file. As bytes: a pickled dataset does
    # not name pyarrow, which each template of worker processes would import.
    serialized: bytes
    schema: Any = None  # the types to give, in order; None for the types of the file

    @property
    def given(self) -> Any:
        """The `pyarrow.Schema` of the given columns, with the types of the file."""
        import pyarrow

        return pyarrow.ipc.read_schema(pyarrow.py_buffer(self.serialized))

    def apply(self, table: Any) -> Any:
        """Select columns of a table, and make each column a single array.

        Raises errors of pyarrow.
        """
        import pyarrow

        for name, value in self.added.items():
            table = table.append_column(name, pyarrow.repeat(value, table.num_rows))
        table = table.combine_chunks()
        names = self.given.names
        table = table.select(
            [number for number, name in enumerate(table.column_names) if name in names]
        )
        if self.schema is None:
            return table
        return table.select(self.schema.names).cast(self.schema)


def as_expression(filters: Any) -> Any:
    """Return filters as a `pyarrow.compute.Expression`, or None."""
    if filters is None:
        return None
    parquet = require_pyarrow("filters=")
    from pyarrow.compute import Expression

    if not isinstance(filters, Expression):
        try:
            filters = parquet.filters_to_expression(_conditions(filters))
        except (TypeError, ValueError, LookupError) as error:
            what = (
                "an expression of pyarrow.compute, or conditions as [('x', '>', 3)]; "
                "None for all rows"
            )
            raise ValueError(
                f"filters={short_repr(filters)} must be {what}: {error}"
            ) from None
    if "FieldPath(" in str(filters):
        raise ValueError(
            f"filters={filters} must name columns; their numbers change with columns="
        )
    return filters


def _conditions(filters: Any) -> list[list[tuple[str, str, Any]]]:
    """Return filters as lists of conditions.

    A row passes if the row fulfils all conditions of some list. `filters` may also be a single
    condition or a single list.
    """
    for _ in range(2):
        if isinstance(filters[0], str) or isinstance(filters[0][0], str):
            filters = [filters]
    # The order of a set changes with the process, and so would the text of the expression.
    return [
        [(n, op, sorted(v, key=repr) if isinstance(v, set) else v) for n, op, v in each]
        for each in filters
    ]


def filter_text(filters: Any) -> str | None:
    """Return an expression as text, with a checksum if the text is shortened."""
    if filters is None:
        return None
    text = " ".join(str(filters).split())
    shortened = "..." in text or len(text) > _LONGEST_TEXT
    if shortened:
        return f"{text[:_LONGEST_TEXT]} {names_digest([pickle.dumps(filters, 4).hex()])}"
    return text


def passing_rows(table: Any, filters: Any) -> Uint32Array:
    """Return the numbers of the rows of a table that pass a filter."""
    import pyarrow
    from pyarrow import acero

    numbers = pyarrow.array(np.arange(len(table), dtype=np.uint32))
    table = table.append_column(_NUMBER, numbers)
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    passing = acero.Declaration(
        "filter", acero.FilterNodeOptions(filters), [source]
    ).to_table(use_threads=False)
    found: Uint32Array = passing[_NUMBER].to_numpy()
    return found


def filter_columns(files: Sequence[TableFile], filters: Any) -> list[Selection]:
    """Return the columns of each file that an expression needs."""
    return _select_all(
        files, lambda file, there: _columns_of(filters, there, file.shard.name)
    )


def _select_all(
    files: Sequence[TableFile],
    columns_of: Callable[[TableFile, Any], Sequence[str] | None],
) -> list[Selection]:
    """Return the selection of each file.

    `columns_of` returns the columns to select, or None for all. The arguments are a file, and the
    schema of the columns of the file and of the directories. The function is called once for all
    files with the same columns.
    """
    import pyarrow

    made: dict[Any, Selection] = {}
    found: list[Selection] = []
    for file, values in zip(
        files, _hive_values([file.shard.key for file in files]), strict=True
    ):
        added = {
            name: value for name, value in values.items() if name not in file.schema.names
        }
        fields = [pyarrow.field(name, value.type) for name, value in added.items()]
        there = pyarrow.schema([*file.schema, *fields])
        if there not in made:
            made[there] = _select(file, there, added, columns_of(file, there))
        selection = made[there]
        found.append(
            replace(selection, added={name: added[name] for name in selection.added})
        )
    return found


def select_columns(
    files: Sequence[TableFile], columns: Sequence[str] | None, *, as_rows: bool
) -> list[Selection]:
    """Return the columns to read and to give of each file.

    For tables (not `as_rows`), the types of the files are unified.
    """
    found = _select_all(files, lambda file, there: columns)
    first = unified = found[0].given
    schemas: dict[bytes, Any] = {}  # different ones
    for file, selection in zip(files, found, strict=True):
        if selection.serialized in schemas:
            continue
        given = schemas[selection.serialized] = selection.given
        name, times = Counter([*given.names, ""]).most_common(1)[0]
        if as_rows and times > 1:
            what = f"several columns called {name!r}, of which a dict could have one"
            remedy = "use format='arrow', or leave it out of columns="
            raise ValueError(f"{file.shard.name} has {what}; {remedy}")
        try:
            if {*given.names} != {*first.names}:
                raise ValueError("names differ")
            # Rows are Python objects: equal for string and large_string.
            if not as_rows and given != unified:
                unified = _unify(unified, given)
        except (ValueError, TypeError, LookupError) as error:
            listed, expected = (
                ", ".join(f"{f.name} {f.type}" for f in each) for each in (given, first)
            )
            what = f"columns {listed}, but {expected} in {files[0].shard.name}"
            cause = " ".join(str(error).split())
            remedy = "give columns= that all files have, or read rows of different types"
            raise file.shard.error(f"{what}: {cause}; {remedy} (format='rows')") from None
    if not as_rows and any(schema != unified for schema in schemas.values()):
        unified = unified.with_metadata(files[0].schema.metadata)
        return [replace(selection, schema=unified) for selection in found]
    return found


def _select(
    file: TableFile, there: Any, added: Mapping[str, Any], columns: Sequence[str] | None
) -> Selection:
    """Return the selection of files with the columns `there`."""
    import pyarrow

    if columns is None:
        return Selection(None, added, there.serialize().to_pybytes())
    wanted = {name: value for name, value in added.items() if name in columns}
    read = tuple(name for name in columns if name not in added)
    try:
        selected = file.selected(read)
    except KeyError as error:
        names = ", ".join(map(repr, there.names))
        raise ValueError(
            f"{file.shard.name} has no column {error.args[0]!r}; it has {names}"
        ) from None
    given = pyarrow.schema(
        [*selected, *(pyarrow.field(name, value.type) for name, value in wanted.items())]
    )
    return Selection(read, wanted, given.serialize().to_pybytes())


def _columns_of(filters: Any, there: Any, name: str) -> list[str]:
    """Return the columns that the text of an expression names."""
    import pyarrow

    try:
        passing_rows(there.empty_table(), filters)
    except pyarrow.ArrowException as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"filters={filters} does not fit {name}: {cause}") from None
    text = str(filters)
    return [
        column
        for column in dict.fromkeys(there.names)
        if re.search(rf"(?<!\w){re.escape(column)}(?!\w)", text)
    ]


def _unify(one: Any, other: Any) -> Any:
    """Return a common schema of two schemas.

    If a column has a dictionary in one schema and plain values in the other, the result has plain
    values.
    """
    import pyarrow
    from pyarrow.types import is_dictionary, is_null

    if len(one) != len(other):
        raise ValueError("columns of one name are in some files only")
    schemas: tuple[list[Any], list[Any]] = ([], [])
    for fields in zip(one, map(other.field, one.names), strict=True):
        kinds = [field.type for field in fields]
        plain = not (any(map(is_null, kinds)) or all(map(is_dictionary, kinds)))
        for schema, field in zip(schemas, fields, strict=True):
            kind = (
                field.type.value_type
                if plain and is_dictionary(field.type)
                else field.type
            )
            schema.append(field.with_type(kind))
    return pyarrow.unify_schemas(
        [*map(pyarrow.schema, schemas)], promote_options="permissive"
    )


def _hive_values(keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the values of the directories ``column=value`` for each key.

    Hive and Spark write partitions in this way. The values of a column are integers if all values
    are integers.
    """
    import pyarrow

    parts = [
        dict(part.split("=", 1) for part in key.split("/")[:-1] if part.find("=") > 0)
        for key in keys
    ]
    found: list[dict[str, Any]] = [{} for _ in keys]
    for name in dict.fromkeys(chain.from_iterable(parts)):
        texts = [each.get(name, _HIVE_NULL) for each in parts]
        column = pyarrow.array(
            [None if text == _HIVE_NULL else unquote(text) for text in texts],
            pyarrow.string(),
        )
        if column.null_count < len(column):
            with contextlib.suppress(pyarrow.ArrowInvalid):  # not all are integers
                column = column.cast(pyarrow.int64())
        for values, each, value in zip(found, parts, column, strict=True):
            if name in each:
                values[unquote(name)] = value
    return found
