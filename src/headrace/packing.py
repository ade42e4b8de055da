"""Pack a dataset into shards.

Packing fetches samples, transforms samples in workers, writes shards in parallel, and continues
after a kill.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import re
import struct
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Unpack, get_args

import numpy as np
from tqdm import tqdm

from headrace._ranks.rankinfo import own_rank
from headrace._shards.discovery import Shard
from headrace._shards.indexing import (
    NAME,
    Indexing,
    IndexingDecoder,
    build_index,
    describe_functions,
    part_key,
    with_heads,
)
from headrace._shards.tar import TarSamples
from headrace._store.listing import require_pyarrow
from headrace._store.store import Store, StoreLike, as_store
from headrace._streams.blocking import background_loop
from headrace._streams.composition import plan
from headrace.datasets.parquet import TableDataset
from headrace.errors import ObjectNotFoundError
from headrace.loader import DataLoader
from headrace.options import LoaderOptions

__all__ = ["Packed", "pack"]

_INDEXING = Indexing(lambda shard: TarSamples(shard.name, uniform=True))

Format = Literal["tar", "parquet", "tokens"]
# Written after each shard. Readers of directories ignore names with an underscore in front.
RECORD = "_pack.json"
BATCH = 16  # number of samples in a batch; a shard may end after each batch
TYPED = 64  # number of Parquet rows to infer column types from
UPLOADS = 4  # number of concurrent shard uploads, each in several parts
PIECE = 1 << 20  # bytes per read of a finished shard
ROW_GROUP = 16 << 20  # bytes of a Parquet row group, counted in Arrow format
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_Json = dict[str, Any]
_MakeWriter = Callable[[Path], "_ShardWriter"]


class Packed(NamedTuple):
    """Result of `pack`.

    Attributes:
        shards: number of shards.
        samples: number of samples in all shards.
        nbytes: size of all shards, in bytes.
    """

    shards: int
    samples: int
    nbytes: int


def pack(
    dataset: Any,
    store: StoreLike,
    *,
    format: Format = "tar",
    shard_size: int | str = "256MB",
    num_workers: int = 0,
    **options: Unpack[LoaderOptions],
) -> Packed:
    """Write the samples of a dataset into shards, in order.

    A `DataLoader` fetches and transforms the samples. A terminal shows a progress bar.
    `pack` writes each shard into a temporary file, and uploads the file in parts while writing
    further shards. ``_pack.json`` beside the shards records the name, number of samples, size and
    SHA-256 of each shard. With tar shards, `pack` also writes the index for `TarDataset.index`.

    After an interruption, also by SIGKILL, the same call continues after the last recorded shard:
    no sample is lost or repeated. A call with another `transform` or `seed` is an error. The
    comparison of a `transform` covers code, closure, arguments and repr, but not the functions that
    the `transform` calls.

    Args:
        dataset: a map-style dataset or a stream. All samples are packed by a single rank.
        store: the directory for the shards: a URL, a path or a `Store`. The directory is empty, or
            belongs to an interrupted call.
        format: ``"tar"`` for WebDataset and `TarDataset`, ``"parquet"``, or ``"tokens"`` for
            Megatron.

            - ``"tar"``: a sample is a dict of fields (bytes, str, numbers, arrays for ``.npy``)
              with ``"__key__"``. An `ObjectSample` or a `FileSample` is a sample too, with the
              label in field ``cls``.
            - ``"parquet"``: a sample is a dict of columns. The types come from the first 64 rows.
              Without a `transform`, a `ParquetDataset` or an `ArrowDataset` keeps its types.
            - ``"tokens"``: a sample is a sequence of integers, a document of Megatron's ``.bin``
              and ``.idx``. Tokens are uint16 if the first sample is uint16, else int32.
        shard_size: size of a shard in bytes, or text such as ``"256MB"``. A shard ends after the
            batch of 16 samples that reaches the size. About five shards are on the local disk at a
            time.
        num_workers: number of processes for `transform`.
        options: options of the `DataLoader`, such as `transform` and `on_error`. `seed` is 0 by
            default; the random numbers of `transform` follow from `seed`.

    Returns:
        Numbers of shards, samples and bytes, including shards of interrupted calls.

    Raises:
        ValueError: an argument is invalid, or the directory has other files, or was begun with
            other arguments.
        TypeError: a sample does not fit the format. The message names the sample.
        HeadraceError: reading or writing failed.

    Example:
        >>> import pathlib, tempfile, headrace as hr
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = [(folder / f"{number}.txt").write_text("x" * number) for number in range(100)]
        >>> pack(hr.FileDataset(folder), folder / "shards", shard_size="64KB")
        Packed(shards=2, samples=100, nbytes=112640)
        >>> len(hr.TarDataset.index(folder / "shards"))
        100
    """
    if format not in get_args(Format):
        raise ValueError(f"format={format!r} must be one of {', '.join(get_args(Format))}")
    if (rank := own_rank()).world_size > 1:
        raise ValueError(
            f"{rank.world_size} ranks would write the same shards: "
            f"pack in one process ({rank.source})"
        )
    size = _bytes(shard_size)
    options.setdefault("seed", 0)
    loader: DataLoader[list[Any]] = DataLoader(
        dataset, BATCH, num_workers=num_workers, collate_fn=list, **options
    )
    writer: _MakeWriter = _WRITERS[format]
    if (
        isinstance(dataset, TableDataset)
        and format == "parquet"
        and options.get("transform") is None
    ):
        writer = functools.partial(_ParquetWriter, schema=dataset.schema)
    source, functions = plan(dataset)
    own = getattr(type(source), "aget", None)
    code = describe_functions(options.get("transform"), *functions, own)
    arguments = {
        "format": format,
        "shard_size": size,
        "seed": options["seed"],
        "transform": hashlib.sha256(code.encode()).hexdigest()[:16],
    }
    with loader, tempfile.TemporaryDirectory(prefix="headrace-pack-") as folder:
        return _run(loader, as_store(store), Path(folder), writer, arguments)


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)B?", str(size).upper())
    if match is None or not (found := int(float(match[1]) * _UNITS[match[2]])):
        raise ValueError(f"shard_size={size!r} must be a positive number of bytes, or as '256MB'")
    return found


def _run(
    loader: DataLoader[Any], store: Store, folder: Path, make: _MakeWriter, arguments: _Json
) -> Packed:
    """Pack the remaining shards and record each complete shard."""
    record = _begun(store, arguments)
    if record["state"] is not None:
        loader.load_state_dict(record["state"])  # raises StateError for another dataset
    uploads: deque[tuple[Future[_Json], _Json]] = deque()

    def write() -> None:
        background_loop().run(store.put(RECORD, json.dumps(record, indent=1).encode()))

    def commit(most: int) -> None:
        """Record complete shards, in order.

        Wait until at most `most` shards are incomplete.
        """
        while uploads and (len(uploads) > most or uploads[0][0].done()):
            shard, position = uploads.popleft()
            record["shards"].append(shard.result())
            record.update(position)
            write()

    def shards() -> Iterator[tuple[Path, _ShardWriter, _Json]]:
        """Yield complete shards, each with the loader's state after the shard."""
        before = record["shards"]
        number = sum(shard["samples"] for shard in before)
        bar = tqdm(loader, "pack", initial=number // BATCH, unit="batch", disable=None)
        batches = iter(bar)
        for count, first in zip(itertools.count(len(before)), batches):
            path, position = folder / f"{count:06d}", _Json()
            with contextlib.closing(make(path)) as writer:
                for batch in itertools.chain([first], batches):
                    for sample in batch:
                        writer.add(sample, number)
                        number += 1
                    if writer.nbytes >= arguments["shard_size"]:
                        break
                else:
                    position["complete"] = True
            yield path, writer, position | {"state": loader.state_dict()}

    if not record["complete"]:
        write()  # before the first shard, to mark the directory as begun by this call
        with ThreadPoolExecutor(UPLOADS, "headrace-pack") as threads:
            for path, writer, position in shards():
                uploads.append((threads.submit(_upload, store, path, writer), position))
                commit(UPLOADS)
            commit(0)
        record["complete"] = True
        write()
    if arguments["format"] == "tar":
        _index(store, record["shards"])
    written = record["shards"]
    return Packed(
        len(written), *(sum(shard[name] for shard in written) for name in ("samples", "bytes"))
    )


def _index(store: Store, shards: list[_Json]) -> None:
    """Join the index parts from `_upload`, and build missing parts."""
    loop, place = background_loop(), Shard(store, NAME)
    with contextlib.suppress(ObjectNotFoundError):
        loop.run(store.head(NAME))
        return
    found = loop.run(with_heads([Shard(store, shard["name"]) for shard in shards]))
    if found:
        loop.run(build_index(found, _INDEXING, place))


def _begun(store: Store, arguments: _Json) -> _Json:
    """Return the record of an interrupted call, or a new record."""
    loop = background_loop()
    if (folder := store.local_root) is not None:
        os.makedirs(folder, exist_ok=True)
    try:
        record: _Json = json.loads(bytes(loop.run(store.read_all(RECORD))))
    except ObjectNotFoundError:
        if there := loop.run(store.level(""))["objects"]:
            raise ValueError(
                f"{store.url} is not empty: it has {there[0]['path']}, and no {RECORD}"
            ) from None
        return {"arguments": arguments, "shards": [], "state": None, "complete": False}
    if record["arguments"] != arguments:
        what = f"{record['arguments']}, not {arguments}"
        raise ValueError(
            f"{store.url} was packed with {what}: continue with the same, or delete its shards"
        )
    return record


def _upload(store: Store, path: Path, writer: _ShardWriter) -> _Json:
    """Upload a shard and the files beside the shard.

    Runs on an upload thread.
    """
    loop = background_loop()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    key = path.name + writer.suffix
    if isinstance(writer, _TokenWriter):  # first: the shard cannot be read without an index
        loop.run(store.put(path.name + ".idx", writer.index()))
    loop.run(store.put(key, path))
    if isinstance(writer, _TarWriter):
        shard = Shard(store, key, loop.run(store.head(key)))
        decoder = IndexingDecoder(shard, _INDEXING)
        with path.open("rb") as file:
            for piece in iter(lambda: file.read(PIECE), b""):
                decoder.feed(piece)
        decoder.finish()
        loop.run(store.put(part_key(Shard(store, NAME), shard, _INDEXING), decoder.index()))
    size = path.stat().st_size
    os.unlink(path)
    return {"name": key, "samples": writer.samples, "bytes": size, "sha256": digest}


class _ShardWriter(ABC):
    """Writer of a single shard file.

    Attributes:
        samples: number of samples in the shard.
        nbytes: approximate size so far, in bytes; equal in each run.
    """

    suffix: str

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self.samples = self.nbytes = self._number = 0

    def add(self, sample: Any, number: int) -> None:
        """Write a sample with its `number` in the dataset."""
        self._number = number
        with self._fitting():
            self._add(sample)
        self.samples += 1

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError, OverflowError, AttributeError, NotImplementedError) as error:
            raise TypeError(f"sample {self._number} does not fit this format: {error}") from error

    @abstractmethod
    def _add(self, sample: Any) -> None: ...

    def close(self) -> None:
        self._file.close()


class _TarWriter(_ShardWriter):
    suffix = ".tar"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._archive = tarfile.TarFile(fileobj=self._file, mode="w")
        self._last: str | None = None

    def _add(self, sample: Any) -> None:
        fields = dict(sample) if isinstance(sample, Mapping) else _fields_of(sample)
        key = str(fields.pop("__key__", f"{self._number:09d}"))
        name = key.rpartition("/")[2]
        if key == self._last or key.startswith("/") or not name or "." in name:
            what = "is that of the sample before, is absolute, or its name is empty or has a dot"
            raise ValueError(f"key {key!r} {what}, from which readers take a field")
        files = {
            name: _encoded(name, value)
            for name, value in fields.items()
            if not name.startswith("__")
        }
        if not files:
            raise ValueError(f"{key!r} has no field, so that it would not be read")
        self._last = key
        for name, data in files.items():
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size = len(data)
            self._archive.addfile(info, io.BytesIO(data))
        self.nbytes = self._archive.offset

    def close(self) -> None:
        self._archive.close()
        super().close()


def _fields_of(sample: Any) -> dict[str, Any]:
    """Return the fields of an `ObjectSample` or `FileSample`."""
    folder, slash, name = sample.key.rpartition("/")
    stem, _, suffix = name.partition(".")
    label = {} if sample.label is None else {"cls": sample.label}
    return {"__key__": folder + slash + stem, suffix or "bin": sample.data, **label}


def _encoded(name: str, value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    ending = name.rpartition(".")[2]
    if hasattr(value, "__array__") and ending == "npy":
        np.save(stream := io.BytesIO(), np.asarray(value), allow_pickle=False)
        return stream.getvalue()
    if ending == "json":
        return json.dumps(value).encode()
    if getattr(value, "shape", None) == () and not str(value.dtype).startswith(
        ("datetime", "timedelta")
    ):
        value = value.item()
    if isinstance(value, bool | int | float):
        return str(value).encode()
    raise TypeError(
        f"field {name!r} is a {type(value).__name__}; "
        "give bytes, a str, a number, or call it .npy or .json"
    )


class _ParquetWriter(_ShardWriter):
    suffix = ".parquet"

    def __init__(self, path: Path, schema: Any = None) -> None:
        require_pyarrow("packing Parquet")
        super().__init__(path)
        self._schema = schema  # schema of the rows; None to infer from the first rows
        self._names: list[str] | None = None if schema is None else schema.names
        self._rows: list[dict[str, Any]] = []
        self._tables: list[Any] = []  # tables of the next row group
        self._writer: Any = None

    def _add(self, sample: Any) -> None:
        row = dict(sample)
        self._names = self._names or list(row)
        if row.keys() - set(self._names):
            raise ValueError(f"columns {sorted(row)}, but {self._names} in the samples before")
        self._rows.append(row)
        if len(self._rows) == TYPED:
            self._convert()

    def _convert(self) -> None:
        import pyarrow
        import pyarrow.parquet

        rows, self._rows = self._rows, []
        columns = {name: [row.get(name) for row in rows] for name in self._names or ()}
        table = pyarrow.table(columns, schema=self._schema)
        for field in table.schema if self._schema is None else ():
            found = table[field.name].to_pylist() if "[us" in str(field.type) else []
            pairs = zip(found, columns[field.name], strict=False)
            if any(one is not None and one != value for one, value in pairs):
                what = "but its values need more than microseconds, or mix time zones with none"
                raise ValueError(f"{field.name}: {field.type}, {what}")
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(
                self._file, table.schema, write_page_checksum=True
            )
        # Given to pyarrow.array, the schema would turn floats into integers.
        schema = self._writer.schema
        if pyarrow.unify_schemas([schema, table.schema], promote_options="permissive") != schema:
            raise ValueError(
                f"{table.schema}, but {schema} in the samples before".replace("\n", ", ")
            )
        table = table.cast(schema)
        self._tables.append(table)
        self.nbytes += table.nbytes
        if sum(table.nbytes for table in self._tables) >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        self._writer.write_table(pyarrow.concat_tables(self._tables))
        self._tables = []

    def close(self) -> None:
        try:
            if self._rows:
                with self._fitting():
                    self._convert()
            if self._tables:
                self._flush()
        finally:
            if self._writer is not None:
                self._writer.close()
            super().close()


class _TokenWriter(_ShardWriter):
    suffix = ".bin"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._dtype: Any = None  # dtype of the tokens, from the first sample
        self._lengths: list[int] = []

    def _add(self, sample: Any) -> None:
        tokens = np.asarray(sample)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(
                f"an array of shape {tokens.shape} and type {tokens.dtype}, "
                "not a sequence of integers"
            )
        if self._dtype is None:
            self._dtype = np.dtype("<u2" if tokens.dtype == np.uint16 else "<i4")
        limits = np.iinfo(self._dtype)
        if tokens.size and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            raise ValueError(
                f"tokens from {tokens.min()} to {tokens.max()} do not fit {self._dtype.name}"
            )
        self.nbytes += self._file.write(tokens.astype(self._dtype).tobytes())
        self._lengths.append(len(tokens))

    def index(self) -> bytes:
        """Return the index of Megatron-LM's indexed datasets, version 1."""
        lengths = np.array(self._lengths, dtype="<i4")
        pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * self._dtype.itemsize
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        code = {"uint16": 8, "int32": 4}[self._dtype.name]
        head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(documents))
        return bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())


_WRITERS: dict[Format, type[_ShardWriter]] = {
    "tar": _TarWriter,
    "parquet": _ParquetWriter,
    "tokens": _TokenWriter,
}
