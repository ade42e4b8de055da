"""Tables of keys and labels that others wrote: CSV, read with Python's own module, every row checked."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from headrace._core.manifest.index_file import text_lines
from headrace._core.manifest.key_validation import KeyValidator
from headrace._core.manifest.labels import compact
from headrace._core.store.catalog import Catalog, first_repeated
from headrace._core.store.string_array import StringArrayBuilder
from headrace.errors import ManifestError

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMMENT = "# {"
"""How the line above the header begins in which a manifest says what it is."""

Column = str | int | Callable[[Any], Any]
"""A column by its name or number, or a function of the row: a dict by names, a list where there are none."""

Where = Callable[[Any], object] | Mapping[str | int, str | Iterable[str]] | None
"""Which rows: a predicate of the row, or columns with the value that they have to have, or several such values."""

Duplicates = Literal["error", "keep"]


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV, and how it is written.

    Attributes:
        name: what errors call it.
        data: its bytes, packed as its name says.
        header: whether its first row has the names of the columns.
        delimiter: between fields; None for a tab in ``.tsv``, a comma elsewhere.
        quotechar: around fields that have delimiters or ends of lines in them.
        encoding: of its text.
    """

    name: str
    data: Buffer
    header: bool = True
    delimiter: str | None = None
    quotechar: str = '"'
    encoding: str = "utf-8-sig"

    def rows(self) -> tuple[list[str] | None, Iterator[tuple[int, list[str]]]]:
        """The names of the columns, None where there are none; and the rows, each with its line.

        Raises:
            ManifestError: it is empty, or the header has a name twice; in the rows: one is not valid CSV, or has more
                or fewer fields than the first.
        """
        rows = self._rows()
        if not self.header:
            return None, rows
        line, names = next(rows, (None, None))
        if names is None:
            raise ManifestError("it is empty; even one without rows has a header", source=self.name)
        twice = [name for place, name in enumerate(names) if name in names[:place]]
        if twice:
            raise ManifestError(f"the header has {twice[0]!r} twice", source=self.name, line=line)
        return names, rows

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        lines = text_lines(self.data, self.name, self.encoding)
        first = next(lines, "")
        passed = int(first.startswith(COMMENT))
        lines = lines if passed else chain((first,) if first else (), lines)
        delimiter = self.delimiter or delimiter_of(self.name)
        # Strict, since otherwise a quote that is never closed makes one field of the rest of the file.
        reader = csv.reader(lines, delimiter=delimiter, quotechar=self.quotechar, strict=True)
        width = 0
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                what = f"this is not valid CSV: {error}"
                raise ManifestError(what, source=self.name, line=reader.line_num + passed) from None
            if row is None:
                return
            if not row:
                continue  # an empty line
            width = width or len(row)
            line = reader.line_num + passed
            if len(row) != width:
                what = f"{len(row)} fields, where the first row has {width}"
                raise ManifestError(what, source=self.name, line=line)
            yield line, row


def delimiter_of(name: str) -> str:
    """What stands between the fields of a file, by its name.

    Example:
        >>> delimiter_of("train.csv.gz")
        ','
    """
    return "\t" if ".tsv" in name.lower() else ","


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
    """The objects that a table names, in its order.

    Args:
        table: the CSV.
        url: the dataset's.
        key: where the key is.
        label: where the label is; several columns for a tuple; None for no labels.
        prefix: what is put before each key.
        suffix: what is put behind it.
        where: which rows; None for all.
        duplicates: whether an object may be named by several rows.

    Raises:
        ManifestError: the table is not valid, lacks a column, or names an object twice, none, or one that is not under
            `url`.
        ValueError: `duplicates` is neither of its values.
    """
    if duplicates not in ("error", "keep"):
        raise ValueError(f"duplicates={duplicates!r} must be 'error' or 'keep'")
    rules = KeyValidator(url, prefix, suffix)
    names, rows = table.rows()
    key_of = _getter(key, names, table, "key")
    label_of: Callable[[list[str]], Any] | None
    if label is None or isinstance(label, str | int) or callable(label):
        label_of = None if label is None else _getter(label, names, table, "label")
    else:
        several = [_getter(column, names, table, "label") for column in label]

        def label_of(row: list[str]) -> Any:
            return tuple(get(row) for get in several)

    keys, labels, lines = StringArrayBuilder(), [], []
    same: dict[Any, Any] = {}
    chosen = _chooser(where, names, table)
    key_column = None if callable(key) else key
    label_column = label if isinstance(label, str | int) else None
    for line, row in rows:
        try:
            if chosen is not None and not chosen(row):
                continue
        except Exception as error:
            raise _at(error, table, line, None, "where=") from error
        try:
            said = key_of(row)
            if not isinstance(said, str):
                raise TypeError(f"key= must give a str, not {type(said).__name__}")
            keys.append(rules.key(said))
        except Exception as error:
            raise _at(error, table, line, key_column, "key=" if callable(key) else "the key") from error
        lines.append(line)
        if label_of is not None:
            try:
                given = label_of(row)
            except Exception as error:
                raise _at(error, table, line, label_column, "label=") from error
            # A million rows have a few thousand labels: each is kept once.
            labels.append(given if callable(label) else same.setdefault(given, given))
    packed = keys.build()
    if not len(packed):
        raise ManifestError("it has no rows" if where is None else "where= leaves no rows", source=table.name)
    if duplicates == "error":
        refuse_repeated(packed, table.name, lines.__getitem__, key_column)
    return Catalog(packed, labels=None if label_of is None else compact(labels))


def _chooser(where: Where, names: list[str] | None, table: CsvTable) -> Callable[[list[str]], object] | None:
    if where is None:
        return None
    if callable(where):
        return _getter(where, names, table, "where")
    wanted = [
        (_getter(column, names, table, "where"), {values} if isinstance(values, str) else set(values))
        for column, values in where.items()
    ]
    return lambda row: all(get(row) in values for get, values in wanted)


def refuse_repeated(keys: Sequence[str], source: str, line_of: Callable[[int], int], column: str | int | None) -> None:
    """Refuse a file that names an object twice.

    Args:
        keys: in the order of the file.
        source: what errors call it.
        line_of: the line of a position.
        column: where the keys are.

    Raises:
        ManifestError: it does.
    """
    found = first_repeated(keys)
    if found is not None:
        first, again = map(line_of, found)
        what = f"key {keys[found[1]]!r} is there already, on line {first}"
        raise ManifestError(what, source=source, line=again, column=column)


def _getter(column: Column, names: list[str] | None, table: CsvTable, argument: str) -> Callable[[list[str]], Any]:
    if callable(column):
        function = column
        if names is None:
            return function
        header = names
        return lambda row: function(dict(zip(header, row, strict=True)))
    if isinstance(column, int):
        position = column
        if names is not None and not -len(names) <= position < len(names):
            raise ManifestError(f"{argument}={column}: {_there(names)}", source=table.name)
        return lambda row: row[position]
    if names is None:
        what = f"{argument}={column!r}: without a header columns have no names; give {argument}= as a number, from 0"
        raise ManifestError(what, source=table.name)
    if column not in names:
        remedy = "; give label=None where there are no labels" if argument == "label" else ""
        raise ManifestError(
            f"{argument}={column!r}: there is no such column: {_there(names)}{remedy}", source=table.name
        )
    place = names.index(column)
    return lambda row: row[place]


def _there(names: list[str]) -> str:
    return f"it has {', '.join(map(repr, names))}"


def _at(error: Exception, table: CsvTable, line: int, column: str | int | None, what: str) -> ManifestError:
    if isinstance(error, IndexError) and column is not None:
        said = f"{what}: there is no such column"
    elif isinstance(error, ValueError):
        said = f"{what}: {error}"
    else:
        said = f"{what}: {type(error).__name__}: {error}"
    return ManifestError(said, source=table.name, line=line, column=column)
