"""Writers of shards in the formats of `headrace.pack`."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headrace._records.batches import is_table
from headrace._shards.tar import TarSamples
from headrace._store.listing import require_pyarrow
from headrace.errors import ShardError

ROW_GROUP = 16 << 20  # bytes of a Parquet row group, counted in Arrow format
ANY_SIZE = 1 << 62  # bytes of a member of a tar

_UNFIT = (TypeError, ValueError, OverflowError, AttributeError, NotImplementedError)


class ShardWriter(ABC):
    """Writer of a single shard file.

    Args:
        path: path of the file.
        schema: schema of a Parquet file; None for the types of the first batch.
        inferred: whether the schema is that of other samples, and not given by the user.

    Attributes:
        samples: number of samples in the shard.
        nbytes: approximate size so far, in bytes; equal in each run.
    """

    suffix: str

    def __init__(self, path: Path, schema: Any = None, inferred: bool = False) -> None:
        self.path, self.schema, self._inferred = path, schema, inferred
        self._file: BinaryIO = path.open("wb")
        self.samples = self.nbytes = 0

    def add(self, batch: Any, numbers: Sequence[Any]) -> None:
        """Write a batch of samples. `numbers` are the numbers of the samples."""
        for number, sample in zip(numbers, batch, strict=False):
            try:
                self._add(sample, number)
            except _UNFIT as error:
                raise TypeError(
                    f"sample {number} does not fit this format: {error}"
                ) from error
            self.samples += 1

    @abstractmethod
    def _add(self, sample: Any, number: int) -> None: ...

    def close(self) -> None:
        self._file.close()


class TarWriter(ShardWriter):
    suffix = ".tar"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._decoder = TarSamples("", uniform=False, member_limit=ANY_SIZE)
        self._keys: set[str] = set()

    def _add(self, sample: Any, number: int) -> None:
        fields = dict(sample) if isinstance(sample, Mapping) else _fields_of(sample)
        key = str(fields.pop("__key__", f"{number:09d}"))
        files = {
            name: _encoded(name, value)
            for name, value in fields.items()
            if not name.startswith("__")
        }
        packed, found = io.BytesIO(), None
        archive = tarfile.TarFile(fileobj=packed, mode="w")
        for name, data in files.items():
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        with contextlib.suppress(ShardError):
            found = self._decoder.whole_sample(packed.getvalue(), 0)
        # Readers give the names of fields in lower case.
        expected: dict[str, Any] = {name.lower(): data for name, data in files.items()}
        expected |= {"__key__": key, "__url__": ""}
        if found != expected or key in self._keys:
            raise ValueError(
                f"key {key!r} with fields {[*files]} could not be read. A key is used once, is no "
                "absolute path, and its last part is not empty and has no dot. There is at least "
                "one field, and fields have no slash"
            )
        self._keys.add(key)
        self.nbytes += self._file.write(packed.getvalue())

    def close(self) -> None:
        end = self.nbytes + 2 * tarfile.BLOCKSIZE
        self._file.write(bytes(end + -end % tarfile.RECORDSIZE - self.nbytes))
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


class ParquetShardWriter(ShardWriter):
    suffix = ".parquet"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._parquet = require_pyarrow("packing Parquet")
        self._tables: list[Any] = []  # tables of the next row group
        self._writer: Any = None

    def add(self, batch: Any, numbers: Sequence[Any]) -> None:
        try:
            table = self._convert(batch)
        except _UNFIT:
            super().add(() if is_table(batch) else batch, numbers)  # names the sample
            raise
        self.schema = table.schema
        self._tables.append(table)
        self.samples += len(table)
        self.nbytes += table.nbytes
        if sum(table.nbytes for table in self._tables) >= ROW_GROUP:
            self._flush()

    def _add(self, sample: Any, number: int) -> None:
        self._convert([sample])

    def _convert(self, samples: Any) -> Any:
        """Return samples as a table with the schema."""
        import pyarrow

        table = samples if is_table(samples) else _table(samples, self.schema)
        schema = self.schema or table.schema
        if others := {*table.column_names} - {*schema.names}:
            raise ValueError(
                f"columns {sorted(others)}, but {schema.names} in the schema"
            )
        if self._inferred:
            # A cast would leave out fields of structs, and turn numbers into strings.
            unified = pyarrow.unify_schemas(
                [schema, table.schema], promote_options="permissive"
            )
            if unified != schema:
                text = f"{table.schema}, but {schema} in other samples: give schema="
                raise ValueError(text.replace("\n", ", "))
        return table.select(schema.names).cast(schema)

    def _flush(self) -> None:
        import pyarrow

        if self._tables:
            # Names within nested columns stay those of the schema.
            self._writer = self._writer or self._parquet.ParquetWriter(
                self._file,
                self.schema,
                write_page_checksum=True,
                use_compliant_nested_type=False,
            )
            self._writer.write_table(pyarrow.concat_tables(self._tables))
        self._tables = []

    def close(self) -> None:
        try:
            self._flush()
        finally:
            if self._writer is not None:
                self._writer.close()
            super().close()


def _table(rows: Any, schema: Any) -> Any:
    """Return rows as a table, with the columns of the schema and of the rows."""
    import pyarrow

    rows = [dict(row) for row in rows]
    kinds = {} if schema is None else {field.name: field.type for field in schema}
    names = dict.fromkeys(chain(kinds, *rows))
    columns = {name: [row.get(name) for row in rows] for name in names}
    arrays = {name: _array(values, kinds.get(name)) for name, values in columns.items()}
    return pyarrow.table(arrays)


def _array(values: list[Any], kind: Any) -> Any:
    """Return values as an array of inferred type, or of type `kind`."""
    import pyarrow

    try:
        # A cast then finds values that another type would lose.
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        array = pyarrow.array(values, kind)
    found = array.to_pylist() if "[us" in str(array.type) else values
    pairs = zip(found, values, strict=True)
    if found is not values and any(
        one is not None and one != value for one, value in pairs
    ):
        raise ValueError(
            "values need more than microseconds, or mix time zones with none"
        )
    return array


class TokenWriter(ShardWriter):
    suffix = ".bin"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._dtype: Any = None  # dtype of the tokens, from the first sample
        self._lengths: list[int] = []

    def _add(self, sample: Any, number: int) -> None:
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
        head = struct.pack(
            "<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(documents)
        )
        return bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
