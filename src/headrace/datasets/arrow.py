"""Streams of rows or tables of Arrow IPC files and streams, and of what Hugging Face's `save_to_disk` writes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace._core.shards.discovery import Shard
from headrace._core.shards.parquet import Pieces, RowGroup, SparseFile
from headrace._core.shards.tables import Selection, TableFile
from headrace._core.store.ranges import Ranges, map_all
from headrace._core.store.store import Store
from headrace.datasets.parquet import TableStream
from headrace.errors import ObjectNotFoundError, ShardError, TruncatedShardError

__all__ = ["ArrowDataset"]

_MAGIC = b"ARROW1"
_DICTIONARY, _BATCH = 2, 3  # kinds of messages
_PIECE = 16 << 10  # bytes read at once to find the header of a message
_AT_ONCE = 32  # files
_SAVED = re.compile(r"(?:.*/)?data-\d+-of-\d+\.arrow")  # by `save_to_disk`


@dataclass(frozen=True)
class _ArrowFile(TableFile):
    """Where the messages of a file are."""

    shard: Shard
    schema: Any
    schema_message: bytes
    rows: tuple[int, ...]  # of each record batch
    extents: tuple[tuple[tuple[int, int], ...], ...]  # of each, its message, after those of dictionaries

    def selected(self, columns: Sequence[str]) -> Any:
        import pyarrow

        for column in columns:
            if column not in self.schema.names:
                raise KeyError(column)
        return pyarrow.schema([field for field in self.schema if field.name in columns])

    def row_groups(self, selection: Selection) -> list[RowGroup]:
        return [_RecordBatch(self, number, selection) for number, rows in enumerate(self.rows) if rows]


class _RecordBatch(RowGroup):
    """A record batch of a file; all its columns are read."""

    kind = "record batch"

    @property
    def decoded_bytes(self) -> int:
        return self.stored_bytes

    def _ranges(self) -> Ranges:
        return Ranges.of(self.footer.extents[self.number])

    def _batches(self, pieces: Pieces, rows: int) -> Iterator[Any]:
        import pyarrow

        stored = SparseFile(pieces, self.footer.shard.head.size)
        parts, size = [(0, memoryview(self.footer.schema_message))], len(self.footer.schema_message)
        for start, stop in self.footer.extents[self.number]:
            stored.seek(start)
            parts.append((size, memoryview(stored.read_buffer(stop - start))))
            size += stop - start
        source = pyarrow.PythonFile(SparseFile(parts, size), mode="r")
        columns, names = self.selection.columns, self.footer.schema.names
        wanted = [number for number, name in enumerate(names) if columns is None or name in columns]
        options = pyarrow.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        for batch in pyarrow.ipc.open_stream(source, options=options):
            batch.validate(full=True)  # wrong offsets would be followed out of its memory
            given = batch if wanted else batch.select([])
            yield from (given.slice(start, rows) for start in range(0, given.num_rows, rows))


def _message(data: bytes) -> tuple[int, int, int]:
    """Kind, number of rows, and bytes of the body of a message, by its header, a table of flatbuffers."""

    def place(table: int, number: int) -> int:
        fields: int = table - struct.unpack_from("<i", data, table)[0]
        at = 4 + 2 * number
        offset: int = struct.unpack_from("<H", data, fields + at)[0] if at < data[fields] else 0
        return offset and table + offset

    def value(table: int, number: int, form: str) -> int:
        at = place(table, number)
        return int(struct.unpack_from(form, data, at)[0]) if at else 0  # the default

    (root,) = struct.unpack_from("<I", data)
    content = place(root, 2)
    content += struct.unpack_from("<I", data, content)[0]
    return value(root, 1, "<B"), value(content, 0, "<q"), value(root, 3, "<q")


async def _open(shard: Shard) -> _ArrowFile:
    """Find the messages of a file, of which each says where the next begins."""
    import pyarrow

    read = await shard.read_start(_PIECE)
    shard, size, begin, data = replace(shard, head=read.head), read.head.size, 0, bytes(read.data)

    async def take(start: int, stop: int) -> bytes:
        nonlocal begin, data
        if not start <= stop <= size:
            what = f"truncated, or not Arrow IPC: it should have bytes from {start} to {stop}, and has {size}"
            raise TruncatedShardError(what, shard=shard.name, offset=size)
        if not begin <= start <= stop <= begin + len(data):
            begin, data = start, bytes(await shard.read(start, min(size, max(stop, start + _PIECE))))
        return data[start - begin : stop - begin]

    is_file = data.startswith(_MAGIC)
    at, schema, message, rows, extents = 8 * is_file, None, b"", list[int](), []
    dictionaries: list[tuple[int, int]] = []
    while True:
        start = at
        marker, length = struct.unpack("<Ii", await take(at, at + 8))
        if marker != 0xFFFFFFFF:
            what = "corrupt, or not Arrow IPC as since its version 0.15 (Feather 2): no message begins here"
            raise ShardError(what, shard=shard.name, offset=start)
        header, at = await take(start, at + 8 + length), at + 8 + length
        if not length:
            break
        try:
            kind, count, body = _message(header[8:])
            at += body
            if schema is None:
                message = header
                schema = pyarrow.ipc.read_schema(pyarrow.BufferReader(message))
            elif kind not in (_DICTIONARY, _BATCH) or count < 0 or body < 0 or at > size:
                raise ValueError("no record batch, or outside the file")
            elif kind == _DICTIONARY:
                dictionaries.append((start, at))
            else:
                rows.append(count)
                extents.append((*dictionaries, (start, at)))
        except (struct.error, IndexError, ValueError, OSError, pyarrow.ArrowException) as error:
            what = f"corrupt message: {' '.join(str(error).split())}"
            raise ShardError(what, shard=shard.name, offset=start) from None
    if schema is None or (await take(size - len(_MAGIC), size) != _MAGIC if is_file else at != size):
        what = f"no schema, or other bytes after the end of its messages than a footer and {_MAGIC!r}"
        raise ShardError(what, shard=shard.name, offset=at)
    return _ArrowFile(shard, schema, message, tuple(rows), tuple(extents))


async def _read_json(store: Store, key: str) -> dict[str, Any]:
    try:
        return dict(json.loads(bytes(await store.read_all(key))))
    except ObjectNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise ShardError(f"no JSON object: {error}", shard=store.name(key)) from None


async def _open_all(shards: Sequence[Shard]) -> list[_ArrowFile]:
    """Open files; of a listed folder of `save_to_disk` only its data, without the results that are cached beside."""
    given = list(shards)
    saved = {one.name.rpartition("/")[0]: one for one in shards if one.head and _SAVED.fullmatch(one.key)}
    for url, shard in saved.items():
        store, folder = shard.store, shard.key.rpartition("data-")[0]
        above = folder[:-1].rpartition("/")[0]
        if len(saved) > 1 and (splits := await _read_json(store, f"{above}/dataset_dict.json".lstrip("/"))):
            what = f"{url} is one of the splits {splits.get('splits')}"
            raise ValueError(f"{what}: give the folder of one, or several by the names of their files")
        files = (await _read_json(store, f"{folder}state.json")).get("_data_files", ())
        if named := {f"{folder}{file['filename']}" for file in files}:
            given = [one for one in given if one.name.rpartition("/")[0] != url or one.key in named]
            for key in named - {one.key for one in given}:
                await store.head(key)  # not asked for, or missing
    return await map_all(_open, given, _AT_ONCE)


class ArrowDataset(TableStream):
    """A stream of the rows of Arrow IPC files, or of their record batches as Arrow tables. Needs ``headrace[parquet]``.

    Files (Feather 2) and streams, also with lz4 or zstd, and folders of Hugging Face's `save_to_disk`: one split,
    without the results that `datasets` has cached there. Features (Image, Audio, ClassLabel) are given as stored.

    Options, `groups` and errors are those of `ParquetDataset`, with these differences. Parts are record batches; each
    is read whole by one request, whatever the `columns`, and by one more for each dictionary. They have no statistics
    and no checksums, and no parts of nested columns are read. The constructor reads the headers of all record batches,
    in each file one after the other, since each says where the next begins.

    Example:
        >>> import pathlib, tempfile, pyarrow.feather
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> pyarrow.feather.write_feather(pyarrow.table({"x": [1, 2], "y": ["a", "b"]}), folder / "0.feather")
        >>> list(ArrowDataset(folder, filters=[("x", ">", 1)]))
        [{'x': 2, 'y': 'b'}]
    """

    parts_name = "record batches"
    _suffixes = (".arrow", ".feather", ".ipc", ".arrows")
    _read_files = staticmethod(_open_all)
