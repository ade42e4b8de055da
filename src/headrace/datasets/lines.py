"""Streams of lines of text and of JSON lines."""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from headrace._shards.compression import also_compressed, compression_of
from headrace._shards.discovery import Shard, Shards
from headrace._shards.reading import BadRecord, RecordDecoder
from headrace.datasets.sharded import ShardedStream, StreamOptions

if TYPE_CHECKING:
    from typing_extensions import Buffer


Format = Literal["auto", "json", "text", "bytes"]

_TYPES = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv")
_JSON = (".jsonl", ".ndjson", ".json")
_DOCUMENT = "write each record on a line (jq -c '.[]'), or give format='json' for one sample a line"
# Bytes. A whole line is held in memory, so a longer line is corruption, an attack or a mistake.
LINE_LIMIT = 64 << 20


class LinesDataset(ShardedStream[Any]):
    r"""A stream of lines: parsed JSON, text, or bytes.

    Files are read as `TarDataset` reads shards: several at once, by ranged requests, plain, gzip or
    zstd, in the same order in every run, split over ranks. Lines end with ``\n`` or ``\r\n``. The
    last line may lack an ending. Empty lines of JSON are ignored, as usual. Empty lines of text are
    samples.

    An index of JSON lines has no empty lines. An index of text has the empty lines.

    An invalid line raises a `ShardError` with the file, the line and the offset. The stream
    continues with the next line. A corrupt or truncated compressed file also raises a `ShardError`.
    The rest of the file is lost, and the stream continues with the other files.

    Args:
        shards: URLs or paths, as for `TarDataset`. In a directory, only files ending in ``.jsonl``,
            ``.ndjson``, ``.json``, ``.txt``, ``.csv`` or ``.tsv``, compressed or not.
        format: ``"json"``: each line parsed. ``"text"``: `str`, UTF-8, without a byte order mark.
            ``"bytes"``: undecoded. ``"auto"``: JSON for the first three endings, compressed or not,
            else text. With ``"auto"``, a single JSON document with records, and a web page in place
            of a file, are errors.
        line_limit: maximum length of a line in bytes. A longer line is an error.
        options: as for `TarDataset`.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
        >>> list(LinesDataset(folder / "a.jsonl"))
        [{'x': 1}, {'x': 2}]
    """

    suffixes = also_compressed(*_TYPES)

    def __init__(
        self,
        shards: Shards,
        *,
        format: Format = "auto",
        line_limit: int = LINE_LIMIT,
        **options: Unpack[StreamOptions],
    ) -> None:
        if format not in get_args(Format):
            raise ValueError(
                f"format={format!r} must be one of {', '.join(map(repr, get_args(Format)))}"
            )
        self._format = format
        self._line_limit = line_limit
        super().__init__(shards, **options)

    def _options(self) -> dict[str, object]:
        return {**super()._options(), "format": self._format}

    def decoder(self, shard: Shard) -> _Lines:
        """Return the decoder of a shard."""
        return _Lines(
            shard.name,
            _format_of(self._format, shard),
            self._line_limit,
            given=self._format != "auto",
        )

    def _name_of(self, part: int, number: int) -> str:
        line = (
            "non-empty line"
            if _format_of(self._format, self._parts[part]) == "json"
            else "line"
        )
        return f"{self._parts[part].name}, {line} {number + 1:,}"


def _format_of(format: str, shard: Shard) -> str:
    if format != "auto":
        return format
    key = shard.key.lower()
    if compression_of(key) is not None:
        key = key.rpartition(".")[0]
    return "json" if key.endswith(_JSON) else "text"


def _is_document(value: Any) -> bool:
    """Return whether a value looks like a whole document.

    A document is or has a list of records, or is a table by columns, as written by pandas.
    """
    if isinstance(value, list):
        return any(isinstance(each, dict | list) for each in value)
    if not isinstance(value, dict):
        return False
    lists = [each for each in value.values() if isinstance(each, list)]
    columns = [each for each in value.values() if isinstance(each, dict)]
    return any(isinstance(each, dict) for part in lists for each in part) or 0 < len(
        columns
    ) == len(value)


class _Lines(RecordDecoder):
    record = "line"

    def __init__(self, shard: str, format: str, limit: int, *, given: bool) -> None:
        super().__init__(shard)
        self.pages = given and format != "json"
        # Whether the next value may be the whole file.
        self._first = format == "json" and not given
        # The first value, and the byte after the line.
        self._held: list[tuple[Any, int]] = []
        self._format = format
        self.format = "lines of JSON" if format == "json" else "lines of text"
        self._limit = limit

    def feed(self, data: Buffer) -> Iterator[Any]:
        first, *rest = bytes(data).split(b"\n")
        self._parts.append(first)
        for part in rest:
            yield from self._line(b"".join(self._parts), 1)
            self._parts = [part]
        if sum(map(len, self._parts)) > self._limit:
            raise self._error(
                f"{self._name} is longer than line_limit={self._limit} bytes"
            )

    def finish(self) -> Iterator[Any]:
        last = b"".join(self._parts)
        if last:
            yield from self._line(last, 0)
        if self._held:
            self._offset = 0
            raise self._error(f"one JSON document in place of JSON lines; {_DOCUMENT}")

    def restore(self, position: Any) -> None:
        super().restore(position)
        self._first = False
        self.complete = self._offset

    def whole_sample(self, data: Buffer, offset: int) -> Any:
        line = bytes(data)
        # Fast path for nearly all lines, in a third of the time. Others take the general path.
        if self._format == "json" and offset and len(line) <= self._limit:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(line)
        return super().whole_sample(data, offset)

    def _line(self, line: bytes, ending: int) -> Iterator[Any]:
        content, end = line.removesuffix(b"\r"), self._offset + len(line) + ending
        if not self._offset and self._format != "bytes":
            content = content.removeprefix(codecs.BOM_UTF8)
        if self._format == "json" and not content.strip():
            self._passed(end)
            return
        value: Any = content
        try:
            if len(line) > self._limit:
                raise ValueError(f"longer than line_limit={self._limit} bytes")
            if self._format == "text":
                value = content.decode()
            elif self._format == "json":
                value = json.loads(content)
        except (ValueError, RecursionError) as error:
            # Invalid JSON, JSON nested too deeply, or invalid UTF-8.
            what = f"invalid {self._name}: {str(error).replace('line 1 ', '')}"
            if self._first and content.rstrip().endswith((b"[", b"{", b",")):
                raise self._error(
                    f"{what}; if the file is one JSON document, {_DOCUMENT}"
                ) from None
            value = BadRecord(self._error(what))
        if self._held:
            held, self.complete = self._held.pop()
            yield held
        if self._first and _is_document(value):
            self._held.append((value, end))
        else:
            self.complete = end
            yield value
        self._first = False
        self._passed(end)
