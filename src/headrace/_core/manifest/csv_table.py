"""CSV tables, read with Python's own module; every row is checked."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from headrace._core.manifest.table_file import text_lines
from headrace.errors import ManifestError

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMMENT = "# {"
"""Start of the line above the header in which a manifest names its origin."""


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV and its dialect.

    Attributes:
        name: name in errors; its suffix tells the compression.
        data: bytes of the file.
        header: whether the first row has the names of the columns.
        delimiter: field delimiter; None for a tab in ``.tsv``, else a comma.
        quotechar: quotes fields that contain delimiters or line breaks.
        encoding: text encoding.
    """

    name: str
    data: Buffer
    header: bool = True
    delimiter: str | None = None
    quotechar: str = '"'
    encoding: str = "utf-8-sig"

    def rows(self) -> tuple[list[str] | None, Iterator[tuple[int, list[str]]]]:
        """The names of the columns, None without a header; and the rows, each with its line number.

        Raises:
            ManifestError: an empty file or a repeated column; from the iterator: invalid CSV, or a row with more or
                fewer fields than the first.
        """
        rows = self._rows()
        if not self.header:
            return None, rows
        line, names = next(rows, (None, None))
        if names is None:
            raise ManifestError("the file is empty; even a table without rows has a header", source=self.name)
        repeated = [name for position, name in enumerate(names) if name in names[:position]]
        if repeated:
            raise ManifestError(f"the header has {repeated[0]!r} twice", source=self.name, line=line)
        return names, rows

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        lines = text_lines(self.data, self.name, self.encoding)
        first = next(lines, "")
        skipped = int(first.startswith(COMMENT))
        lines = lines if skipped else chain((first,) if first else (), lines)
        delimiter = self.delimiter or delimiter_of(self.name)
        # Strict: otherwise a quote that is never closed makes one field of the rest of the file.
        reader = csv.reader(lines, delimiter=delimiter, quotechar=self.quotechar, strict=True)
        width = 0
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                line = reader.line_num + skipped
                raise ManifestError(f"not valid CSV: {error}", source=self.name, line=line) from None
            if row is None:
                return
            if not row:
                continue  # an empty line
            width = width or len(row)
            line = reader.line_num + skipped
            if len(row) != width:
                what = f"{len(row)} fields, where the first row has {width}"
                raise ManifestError(what, source=self.name, line=line)
            yield line, row


def delimiter_of(name: str) -> str:
    """Field delimiter, by the suffix of a file's name."""
    return "\t" if ".tsv" in name.lower() else ","
