"""Rows or tables of Arrow IPC files and streams."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace._shards.discovery import (
    HeaderReader,
    OnOpeningError,
    Shard,
    map_shards,
    open_each,
    shard_errors,
)
from headrace._shards.parquet import Pieces, RowGroup, SparseFile
from headrace._shards.tables import Selection, TableFile
from headrace._shards.unpacked import check_unpacked
from headrace._store.ranges import Ranges
from headrace.datasets.parquet import TableDataset

if TYPE_CHECKING:
    from typing_extensions import Buffer


# First bytes of a message, and kinds of messages.
_MARK, _DICTIONARY, _BATCH = b"\xff" * 4, 2, 3
# `_PIECE`: bytes of a request for the header of a message.
_MAGIC, _PIECE = b"ARROW1", 16 << 10
_SAVED = re.compile(r"(.*)/data-\d{5}-of-(\d{5})\.arrow")  # names given by `save_to_disk`


@dataclass(frozen=True)
class _ArrowFile(TableFile):
    """Positions of the messages of a file."""

    shard: Shard
    schema: Any
    schema_message: bytes
    rows: tuple[int, ...]  # of each record batch
    # Byte ranges to read for each record batch: the dictionaries before the batch, then the batch.
    extents: tuple[tuple[tuple[int, int], ...], ...]

    def row_groups(self, selection: Selection, filters: Any = None) -> list[RowGroup]:
        return [
            _RecordBatch(self, number, selection)
            for number, rows in enumerate(self.rows)
            if rows
        ]


class _RecordBatch(RowGroup):
    """A record batch of a file, read with all columns."""

    kind = "record batch"

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.footer.extents[self.number])

    def _ranges(self) -> Ranges:
        return Ranges.of(self.footer.extents[self.number])

    def _table(self, pieces: Pieces) -> Any:
        import pyarrow

        stored = SparseFile(pieces, self.footer.shard.size)
        parts, size = (
            [(0, memoryview(self.footer.schema_message))],
            len(self.footer.schema_message),
        )
        for start, stop in self.footer.extents[self.number]:
            stored.seek(start)
            part = memoryview(stored.read_buffer(stop - start))
            prefix = _prefix(part)
            body = prefix + int.from_bytes(part[prefix - 4 : prefix], "little")
            check_unpacked(unpacked_size(part[prefix:body], part[body:]), len(part))
            parts.append((size, part))
            size += stop - start
        columns, names = self.selection.columns, self.footer.schema.names
        wanted = [
            number
            for number, name in enumerate(names)
            if columns is None or name in columns
        ]
        options = pyarrow.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        reader = pyarrow.ipc.open_stream(
            pyarrow.PythonFile(SparseFile(parts, size), mode="r"), options=options
        )
        table = reader.read_all()
        # Without the check, wrong offsets would lead outside the table's memory.
        table.validate(full=True)
        return table if wanted else table.select([])


def _prefix(message: memoryview) -> int:
    """Return the number of bytes before the header: mark and length.

    Arrow wrote no mark before version 0.15.
    """
    return 8 if message[:4] == _MARK else 4


def _field(data: Buffer, table: int, number: int, form: str) -> int:
    """Return a field of a flatbuffers table, or 0 if absent.

    With ``form="*"`` the field is a reference. The result is then the position of the referenced
    object in `data`.
    """
    fields = table - int(struct.unpack_from("<i", data, table)[0])
    at = 4 + 2 * number
    place = (
        struct.unpack_from("<H", data, fields + at)[0]
        if at < memoryview(data)[fields]
        else 0
    )
    if not place:
        return 0
    (value,) = struct.unpack_from("<I" if form == "*" else form, data, table + place)
    return int(value) + (table + place) * (form == "*")


def unpacked_size(header: Buffer, body: memoryview) -> int:
    """Return the declared bytes of a message's compressed buffers, unpacked.

    Raises:
        ValueError: the message is corrupt.
    """
    try:
        (root,) = struct.unpack_from("<I", header)
        kind, batch = _field(header, root, 1, "<B"), _field(header, root, 2, "*")
        batch = _field(header, batch, 1, "*") if kind == _DICTIONARY else batch
        if kind not in (_DICTIONARY, _BATCH) or not _field(header, batch, 3, "*"):
            return 0
        buffers = _field(header, batch, 2, "*")
        (count,) = struct.unpack_from("<I", header, buffers)
        places = [
            struct.unpack_from("<qq", header, buffers + 4 + 16 * number)
            for number in range(count)
        ]
        return sum(
            max(0, struct.unpack_from("<q", body, start)[0])
            for start, length in places
            if length >= 8
        )
    except (struct.error, IndexError) as error:
        raise ValueError(f"corrupt message: {error}") from None


async def _open(shard: Shard) -> _ArrowFile:
    """Find the messages of a file.

    Each message says where the next message begins.
    """
    import pyarrow

    shard, first = await shard.read_version(_PIECE)
    reader, size = HeaderReader(shard, first, _PIECE), shard.size
    is_file = first[: len(_MAGIC)] == _MAGIC
    at = 8 * is_file
    schema, message = None, b""
    rows = list[int]()
    extents = []
    dictionaries = list[tuple[int, int]]()
    if bytes(first[:4]) == b"FEA1":
        raise shard.error("Feather 1: read it with pyarrow.feather, and write it again")
    while True:
        start = at
        prefix = _prefix(await reader.take(at, at + 4))
        (length,) = struct.unpack("<i", await reader.take(at + prefix - 4, at + prefix))
        at += prefix + length
        if length <= 0:
            break
        header = bytes(await reader.take(start, at))
        with shard_errors("corrupt message", shard.name, start):
            fields = header[prefix:]
            (root,) = struct.unpack_from("<I", fields)
            kind, body = _field(fields, root, 1, "<B"), _field(fields, root, 3, "<q")
            count = _field(fields, _field(fields, root, 2, "*"), 0, "<q")
            at += body
            if schema is None:
                schema, message = (
                    pyarrow.ipc.read_schema(pyarrow.BufferReader(header)),
                    header,
                )
                # Decode the names here, so a corrupt name is an error now.
                any(schema.names)
            elif kind not in (_DICTIONARY, _BATCH) or count < 0 or body < 0 or at > size:
                raise ValueError("no record batch, or outside the file")
            elif kind == _DICTIONARY:
                dictionaries.append((start, at))
            else:
                rows.append(count)
                extents.append((*dictionaries, (start, at)))
    ends = (
        await reader.take(max(0, size - len(_MAGIC)), size) == _MAGIC
        if is_file
        else at == size
    )
    if length or schema is None or not ends:
        what = (
            "corrupt, or not Arrow IPC (Feather 2): no message, "
            f"or no end with at most a footer and {_MAGIC!r}"
        )
        raise shard.error(what, start)
    return _ArrowFile(shard, schema, message, tuple(rows), tuple(extents))


def _one_split(shards: Sequence[Shard]) -> list[Shard]:
    """Leave out the cached results from a listed folder of `save_to_disk`.

    Raises:
        ValueError: the listing has several splits or saves.
        StoreError: a file of the split is missing.
    """
    given = list(shards)
    saved = {
        named.groups(): one
        for one in shards
        if one.head and (named := _SAVED.fullmatch(one.name))
    }
    if len(saved) > 1:
        raise ValueError(
            f"several splits or saves, {sorted(saved)}: "
            "give the folder of one, or files by their names"
        )
    for (folder, count), one in saved.items():
        kept = {
            f"{folder}/data-{number:05}-of-{count}.arrow" for number in range(int(count))
        }
        given = [
            each
            for each in given
            if not each.head
            or each.name in kept
            or each.name.rpartition("/")[0] != folder
        ]
        others = kept - {each.name for each in given}
        keys = [
            one.key.rpartition("data-")[0] + name[len(folder) + 1 :] for name in others
        ]
        # An existing file was left out by the user's pattern. A missing file raises an error here.
        map_shards(one.store.head, keys)
    return given


class ArrowDataset(TableDataset):
    """The rows of Arrow IPC files, map-style. Needs ``headrace[parquet]``.

    Reads files (Feather 2) and streams, also compressed with lz4 or zstd, and of old versions of
    Arrow (before 0.15). Feather 1 is refused. Also reads a folder of Hugging Face's `save_to_disk`:
    one split, without results cached there by `datasets`. Features (Image, Audio, ClassLabel) are
    given as stored.

    Options and errors are those of `ParquetDataset`, with record batches in place of row groups.
    One request reads a whole record batch, whatever the `columns`. Each dictionary takes one more
    request. Record batches have no statistics and no checksums. `columns` cannot name parts of
    nested columns.

    The constructor reads the headers of all record batches of a file, one after the other.

    Example:
        >>> import pathlib, tempfile, pyarrow.feather
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> table = pyarrow.table({"x": [1, 2], "y": ["a", "b"]})
        >>> pyarrow.feather.write_feather(table, folder / "0.feather")
        >>> ArrowDataset(folder, filters=[("x", ">", 1)])[0]
        {'x': 2, 'y': 'b'}
    """

    _parts_name = "record batches"
    _suffixes = (".arrow", ".feather", ".ipc", ".arrows")

    @staticmethod
    def _open_files(
        shards: Sequence[Shard], on_error: OnOpeningError
    ) -> Sequence[TableFile]:
        return open_each(_one_split(shards), _open, on_error=on_error)
