"""Keys and labels from a user's CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from headrace._core.manifest.csv_table import CsvTable
from headrace._core.manifest.key_validation import KeyValidator
from headrace._core.manifest.labels import compact
from headrace._core.store.catalog import Catalog, first_repeated
from headrace._core.store.string_array import StringArrayBuilder
from headrace.errors import ManifestError

Column = str | int | Callable[[Any], object]
"""Name or number of a column, or a function of the row: of a dict, or of a list if the table has no header."""

Where = Callable[[Any], object] | Mapping[str | int, str | Iterable[str]] | None
"""Filter of rows: a predicate of the row, or the required value, or several allowed values, of columns."""

Duplicates = Literal["error", "keep"]

_Fields = list[str]


def read_annotations(
    table: CsvTable,
    url: str,
    *,
    key: Column,
    label: Column | Sequence[str | int] | None,
    prefix: str,
    suffix: str,
    where: Where,
    duplicates: Duplicates,
) -> Catalog:
    """The objects named by a table, in its order.

    Raises:
        ManifestError: the table is invalid, lacks a column, names no object, one twice, or one outside `url`.
        ValueError: unknown `duplicates`.
    """
    if duplicates not in ("error", "keep"):
        raise ValueError(f"duplicates={duplicates!r} must be 'error' or 'keep'")
    validator = KeyValidator(url, prefix, suffix)
    names, rows = table.rows()
    get_key = _getter(key, names, table, "key")
    get_label = _label_getter(label, names, table)
    matches = _filter(where, names, table)
    key_column = None if callable(key) else key
    label_column = label if isinstance(label, str | int) else None
    keys, labels, lines = StringArrayBuilder(), [], []
    interned: dict[object, object] = {}
    for line, row in rows:
        try:
            if matches is not None and not matches(row):
                continue
        except Exception as error:
            raise _row_error(error, table, line, None, "where=") from error
        try:
            value = get_key(row)
            if not isinstance(value, str):
                raise TypeError(f"key= must give a str, not {type(value).__name__}")
            keys.append(validator.key(value))
        except Exception as error:
            raise _row_error(error, table, line, key_column, "key=" if callable(key) else "the key") from error
        lines.append(line)
        if get_label is not None:
            try:
                value = get_label(row)
            except Exception as error:
                raise _row_error(error, table, line, label_column, "label=") from error
            # A million rows have a few thousand different labels: each is kept once.
            labels.append(value if callable(label) else interned.setdefault(value, value))
    packed = keys.build()
    if not len(packed):
        raise ManifestError("there are no rows" if where is None else "where= leaves no rows", source=table.name)
    if duplicates == "error":
        refuse_repeated(packed, table.name, lines.__getitem__, key_column)
    return Catalog(packed, labels=None if get_label is None else compact(labels))


def refuse_repeated(keys: Sequence[str], source: str, line_of: Callable[[int], int], column: str | int | None) -> None:
    """Raise `ManifestError` if a key is repeated. `line_of` is the line of a position in `keys`."""
    found = first_repeated(keys)
    if found is not None:
        first, again = map(line_of, found)
        what = f"key {keys[found[1]]!r} is also on line {first}"
        raise ManifestError(what, source=source, line=again, column=column)


def _filter(where: Where, names: list[str] | None, table: CsvTable) -> Callable[[_Fields], object] | None:
    if where is None:
        return None
    if callable(where):
        return _getter(where, names, table, "where")
    allowed = [
        (_getter(column, names, table, "where"), {values} if isinstance(values, str) else set(values))
        for column, values in where.items()
    ]
    return lambda row: all(get(row) in values for get, values in allowed)


def _label_getter(
    label: Column | Sequence[str | int] | None, names: list[str] | None, table: CsvTable
) -> Callable[[_Fields], object] | None:
    if label is None:
        return None
    if isinstance(label, str | int) or callable(label):
        return _getter(label, names, table, "label")
    several = [_getter(column, names, table, "label") for column in label]
    return lambda row: tuple(get(row) for get in several)


def _getter(column: Column, names: list[str] | None, table: CsvTable, argument: str) -> Callable[[_Fields], object]:
    if callable(column):
        function = column
        if names is None:
            return function
        header = names
        return lambda row: function(dict(zip(header, row, strict=True)))
    there = "" if names is None else f"the columns are {', '.join(map(repr, names))}"
    if isinstance(column, int):
        if names is not None and not -len(names) <= column < len(names):
            raise ManifestError(f"{argument}={column}: no such column; {there}", source=table.name)
        position = column
    elif names is None:
        what = f"{argument}={column!r}: without a header columns have no names; give {argument}= as a number, from 0"
        raise ManifestError(what, source=table.name)
    elif column not in names:
        remedy = "; give label=None if there are no labels" if argument == "label" else ""
        raise ManifestError(f"{argument}={column!r}: no such column; {there}{remedy}", source=table.name)
    else:
        position = names.index(column)
    return lambda row: row[position]


def _row_error(error: Exception, table: CsvTable, line: int, column: str | int | None, what: str) -> ManifestError:
    if isinstance(error, IndexError) and column is not None:
        text = f"{what}: no such column"
    elif isinstance(error, ValueError):
        text = f"{what}: {error}"
    else:
        text = f"{what}: {type(error).__name__}: {error}"
    return ManifestError(text, source=table.name, line=line, column=column)
