"""Lines of text and JSON lines, streamed out of shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from headrace._core.shards.discovery import Shard, Shards
from headrace._core.shards.stream import ShardedStream, StreamOptions
from headrace.errors import ShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LinesDataset"]

Format = Literal["auto", "json", "text", "bytes"]

_KINDS = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv")
_JSON = (".jsonl", ".ndjson", ".json")
_PACKED = ("", ".gz", ".zst", ".zstd")
LINE_LIMIT = 64 << 20  # bytes; a line is held in memory whole, so a longer one is damage, an attack or a mistake


class LinesDataset(ShardedStream[Any]):
    r"""A stream of the lines of files: parsed JSON, text, or bytes.

    Files are read as `TarDataset` reads shards: several at once, by ranged requests, plain, gzip or zstd, in the same
    order in every run, split over ranks. Lines end with ``\n`` or ``\r\n``; the last may lack it. Empty lines of JSON
    are passed over, as its readers do; those of text are samples.

    A line that is not valid, and a packed file that is damaged or cut short, raises a `ShardError` with the file and
    the offset; the rest of that file is left out, the others are read on.

    Args:
        shards: URLs or paths, as for `ShardedStream`; in a directory, what ends in ``.jsonl``, ``.ndjson``, ``.json``,
            ``.txt``, ``.csv`` or ``.tsv``, packed or not.
        format: ``"json"``: each line parsed. ``"text"``: `str`, UTF-8. ``"bytes"``: as it is. ``"auto"``: JSON where
            the name says so, else text.
        line_limit: bytes; a longer line is an error.
        options: see `ShardedStream`.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
        >>> list(LinesDataset(folder / "a.jsonl"))
        [{'x': 1}, {'x': 2}]
    """

    suffixes = tuple(kind + packed for kind in _KINDS for packed in _PACKED)

    def __init__(
        self,
        shards: Shards | Sequence[Shard],
        *,
        format: Format = "auto",
        line_limit: int = LINE_LIMIT,
        **options: Unpack[StreamOptions],
    ) -> None:
        if format not in get_args(Format):
            raise ValueError(f"format={format!r} must be one of {', '.join(map(repr, get_args(Format)))}")
        self._format = format
        self._line_limit = line_limit
        super().__init__(shards, **options)

    def _decoder(self, shard: Shard) -> _Lines:
        format = self._format
        if format == "auto":
            format = "json" if any(part in shard.key.lower() for part in _JSON) else "text"
        return _Lines(shard.name, format, self._line_limit)


class _Lines:
    """Takes the bytes of a file in any pieces, gives its lines."""

    def __init__(self, shard: str, format: str, limit: int) -> None:
        self._shard = shard
        self._format = format
        self._limit = limit
        self._parts: list[bytes] = []  # of a line whose end has not come
        self._held = 0
        self._offset = 0  # of that line

    def feed(self, data: Buffer) -> Iterator[Any]:
        first, *rest = bytes(data).split(b"\n")
        self._parts.append(first)
        self._held += len(first)
        for following in rest:
            yield from self._line(b"".join(self._parts), 1)
            self._parts, self._held = [following], len(following)
        if self._held > self._limit:
            self._fail(f"a line is longer than line_limit={self._limit} bytes")

    def finish(self) -> Iterator[Any]:
        last = b"".join(self._parts)
        if last:
            yield from self._line(last, 0)

    def _line(self, line: bytes, ending: int) -> Iterator[Any]:
        if len(line) > self._limit:
            self._fail(f"a line is longer than line_limit={self._limit} bytes")
        content = line.removesuffix(b"\r")
        try:
            if self._format == "bytes":
                yield content
            elif self._format == "text":
                yield content.decode()
            elif content.strip():
                yield json.loads(content)
        except (ValueError, RecursionError) as error:  # of JSON, also where it is nested too deep, and of UTF-8
            self._fail(f"a line is not valid: {error}")
        self._offset += len(line) + ending

    def _fail(self, what: str) -> None:
        raise ShardError(what, shard=self._shard, offset=self._offset) from None
