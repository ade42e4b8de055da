"""Pack a dataset, or the outputs of a model, into shards.

A shard is a range of the dataset's order. Each shard is written first, and the small
record of the shard last. To continue is to make the shards without a record.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, Unpack

import numpy as np
import torch
from tqdm import tqdm

from headrace._ranks.data_parallel import rank_among
from headrace._ranks.rankinfo import RankInfo, temporary_rank
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
from headrace._shards.writers import (
    ParquetShardWriter,
    ShardWriter,
    TarWriter,
    TokenWriter,
)
from headrace._store.listing import list_heads
from headrace._store.store import Store, StoreLike, as_store
from headrace._streams.blocking import background_loop
from headrace._streams.composition import plan
from headrace._streams.kinds import kind_of
from headrace.datasets.cached import IndexedShards
from headrace.datasets.parquet import TableDataset
from headrace.errors import ObjectNotFoundError
from headrace.loader import DataLoader
from headrace.options import LoaderOptions

_INDEXING = Indexing(lambda shard: TarSamples(shard.name, uniform=True))

Format = Literal["tar", "parquet", "tokens"]
# Readers of directories ignore directories with an underscore in front.
RECORDS = "_pack/"
HEADER = RECORDS + "header.json"  # the first record
BATCH = 16  # number of samples in a batch
ROWS = 64  # number of rows in a batch; the first batch decides on the types of columns
MOST = 1 << 20  # number of samples in a shard, unless given
UPLOADS = 4  # number of concurrent shard uploads, each in several parts
_Json = dict[str, Any]


class Packed(NamedTuple):
    """Shards and samples that a call of `pack` has written.

    Attributes:
        shards: number of shards.
        samples: number of samples in the shards.
        nbytes: size of the shards, in bytes.
    """

    shards: int
    samples: int
    nbytes: int


def pack(
    dataset: Any,
    store: StoreLike,
    *,
    format: Format = "tar",
    shard_size: int = 256_000_000,
    samples_per_shard: int | None = None,
    schema: Any = None,
    allow_changed: bool = False,
    num_workers: int = 0,
    **options: Unpack[LoaderOptions],
) -> Packed:
    """Write a map-style dataset into shards.

    A `DataLoader` fetches and transforms the samples. A terminal shows a progress bar. Each shard
    holds the same number of consecutive samples. Rank r of W writes the shards r, r + W, ...: into
    a temporary file, which is uploaded in parts while the next shards are written. The directory
    ``_pack`` beside the shards has a record of each complete shard: number, samples, size and
    SHA-256. ``_pack/header.json`` has the class names of ``labels="folder"``. When all shards of
    the tar format are complete, `pack` also writes the index for `TarDataset.index`.

    After an interruption, also by SIGKILL, the same call writes the shards without a record. The
    number of ranks may differ. The bytes do not depend on interruptions and ranks. Ranks do not
    communicate, and a rank does not take shards of other ranks. With other arguments, another
    `transform`, or another length, index or class of the dataset, the call is an error. The
    comparison of a `transform` covers code, closure, arguments and repr, but not the functions that
    the `transform` calls.

    Args:
        dataset: a map-style dataset. Of a stream of shards, use the index, as
            `TarDataset.index`.
        store: the directory for the shards: a URL, a path or a `Store`. The directory is empty, or
            belongs to an interrupted call.
        format: ``"tar"`` for WebDataset and `TarDataset`, ``"parquet"``, or ``"tokens"`` for
            Megatron.

            - ``"tar"``: a sample is a dict of fields (bytes, str, numbers, arrays for ``.npy``)
              with ``"__key__"``. An `ObjectSample` or a `FileSample` is a sample too, with the
              label in field ``cls``.
            - ``"parquet"``: a sample is a dict of columns, or a `pyarrow.Table`.
            - ``"tokens"``: a sample is a sequence of integers, a document of Megatron's ``.bin``
              and ``.idx``. Tokens are uint16 if the first sample of a shard is uint16, else int32.
        shard_size: approximate size of a shard in bytes. The first call reads samples up to this
            size, to find the number of samples in a shard, at most 1,048,576. About five shards are
            on the local disk at a time.
        samples_per_shard: number of samples in a shard, in place of `shard_size`.
        schema: `pyarrow.Schema` of Parquet shards. By default, a `ParquetDataset` or an
            `ArrowDataset` without `transform` keeps its schema, and is packed table by table. The
            types of other samples come from the first 64 samples.
        allow_changed: whether to continue with a changed `transform`.
        num_workers: number of processes for `transform`.
        options: options of the `DataLoader`, such as `transform` and `on_error`. A shard without a
            good sample is an error, unless ``on_error=SkipErrors(max_share=1)``. `seed` is 0 by
            default; the random numbers of `transform` follow from `seed`. A dataset with
            `set_epoch` gets the number of the shard as the epoch.

    Returns:
        Numbers of shards, samples and bytes that this call has written on this rank.

    Raises:
        ValueError: an argument is invalid, or the directory has other files, or was begun with
            other arguments.
        TypeError: the dataset is a stream, or a sample does not fit the format. The message has the
            number of the sample. No shard with the sample is written.
        HeadraceError: reading or writing failed.

    Example:
        >>> import pathlib, tempfile, headrace as hr
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = [(folder / f"{number}.txt").write_text("x" * number) for number in range(100)]
        >>> pack(hr.FileDataset(folder), folder / "shards", samples_per_shard=64)
        Packed(shards=2, samples=100, nbytes=112640)
        >>> len(hr.TarDataset.index(folder / "shards"))
        100
    """
    if format not in _WRITERS:
        raise ValueError(f"format={format!r} must be one of {', '.join(_WRITERS)}")
    place, rank = as_store(store), rank_among(options.pop("data_parallel", None))
    options.setdefault("seed", 0)
    source, functions = plan(dataset)
    transform = options.get("transform")
    tables = (
        format == "parquet" and transform is None and isinstance(dataset, TableDataset)
    )
    if tables and len(dataset._schemas) == 1:
        dataset = source = copy.copy(dataset)
        dataset.gives_tables = True
    code = describe_functions(transform, *functions, getattr(type(source), "aget", None))
    arguments = {
        **_identity(source, dataset),
        "format": format,
        "shard_size": shard_size,
        "samples_per_shard": samples_per_shard,
        "seed": options["seed"],
        "transform": hashlib.sha256(code.encode()).hexdigest()[:16],
    }
    all_numbers, inferred = range(len(dataset)), schema is None
    batches: list[Any] = []
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=None if tables and dataset.gives_tables else list,
        **options,
    )

    def write(numbers: range, most: float = math.inf) -> ShardWriter:
        """Write samples, up to about `most` bytes, into a temporary file."""
        batches[:] = _batches(numbers, ROWS if format == "parquet" else BATCH)
        # Random numbers follow from the seed and the shard.
        loader.set_epoch(numbers.start)
        writer = _WRITERS[format](Path(folder, str(numbers.start)), schema, inferred)
        with contextlib.closing(writer):
            for batch in loader:
                writer.add(batch, numbers[writer.samples :])
                if writer.nbytes >= most:
                    break
        return writer

    # The shards are divided among ranks, and not the samples of a shard.
    alone = temporary_rank(RankInfo(0, 1, "headrace.pack"))
    temporary = tempfile.TemporaryDirectory(prefix="headrace-pack-")
    with loader, alone, temporary as folder, _Uploads(place) as uploads:
        if format == "parquet":
            schema = schema or write(all_numbers[:ROWS], 0).schema
            if schema is None and all_numbers:
                raise ValueError(f"the first {ROWS} samples have failed: give schema=")
            arguments["schema"] = str(schema)
        size, left = _begin(
            place,
            rank,
            arguments,
            lambda: samples_per_shard or write(all_numbers[:MOST], shard_size).samples,
            allow_changed,
        )
        for numbers in tqdm(left, "pack", unit="shard", disable=None):
            uploads.add(write(numbers), numbers)
    results = [upload.result() for upload in uploads.all]
    records = [record for record in results if record["samples"]]
    if format == "tar":
        _index(place, all_numbers[::size])
    totals = (sum(record[name] for record in records) for name in ("samples", "bytes"))
    return Packed(len(records), *totals)


def _identity(source: Any, dataset: Any) -> _Json:
    """Return length and class names of a dataset, and a hash of the shards of the dataset."""
    if kind_of(source).is_iterable:
        raise TypeError(
            f"{type(source).__name__} is a stream, and shards are ranges of a map-style dataset: "
            "use an index, as of headrace.TarDataset.index(...)"
        )
    digest = source._digest if isinstance(source, IndexedShards) else None
    classes = getattr(source, "_classes", None)
    return {"length": len(dataset), "source": digest, "classes": classes and [*classes]}


def _batches(numbers: range, size: Any) -> list[range]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def _begin(
    store: Store,
    rank: RankInfo,
    arguments: _Json,
    samples: Callable[[], int],
    allow_changed: bool = False,
) -> tuple[int, list[range]]:
    """Return the number of samples in a shard, and the shards of a rank without a record.

    The rank that comes first writes the first record.

    Args:
        store: the directory of the shards.
        rank: the rank.
        arguments: what all calls must agree on.
        samples: function that returns the number of samples in a shard, for the first record.
        allow_changed: whether `transform` may differ.
    """
    loop = background_loop()
    if store.local_root is not None:
        os.makedirs(store.local_root, exist_ok=True)
    keys = _keys(store)
    try:
        found = loop.run(store.read_all(HEADER))
    except ObjectNotFoundError:
        if keys:
            text = f"{store.url} is not empty: it has {min(keys)}, and no {HEADER}"
            raise ValueError(text) from None
        content = {"arguments": arguments, "samples_per_shard": max(1, samples())}
        loop.run(store.put(HEADER, json.dumps(content).encode(), create=True))
        found = loop.run(store.read_all(HEADER))
    header = json.loads(bytes(found))
    for name, value in arguments.items():
        began = header["arguments"].get(name)
        if began != value and not (allow_changed and name == "transform"):
            raise ValueError(
                f"{store.url} was packed with {name}={began!r}, and not {value!r}: "
                "continue with the same, or delete its shards"
            )
    size = header["samples_per_shard"]
    own = _batches(range(arguments["length"]), size)[rank.rank :: rank.world_size]
    return size, [numbers for numbers in own if _record(numbers.start) not in keys]


def _keys(store: Store) -> set[str]:
    return {head.key for head in background_loop().run(list_heads(store, ""))}


def _record(first: int) -> str:
    return f"{RECORDS}{first:012d}.json"


class _Uploads(ThreadPoolExecutor):
    """Threads that upload shards and records.

    Attributes:
        all: uploads so far; the results are the records.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(UPLOADS, "headrace-pack")
        self._store = store
        self.all: list[Future[_Json]] = []

    def add(self, writer: ShardWriter, numbers: range) -> None:
        """Upload a shard. Wait while too many uploads are incomplete."""
        self.all.append(self.submit(_upload, self._store, writer, numbers))
        if len(self.all) > UPLOADS:
            self.all[-1 - UPLOADS].result()


def _upload(store: Store, writer: ShardWriter, numbers: range) -> _Json:
    """Upload a shard and the files beside the shard, and then the record.

    Runs on an upload thread.
    """
    loop, path, name = background_loop(), writer.path, f"{numbers.start:012d}"
    record: _Json = {
        "first": numbers.start,
        "stop": numbers.stop,
        "samples": writer.samples,
    }
    if writer.samples:
        key = name + writer.suffix
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        record |= {"name": key, "bytes": path.stat().st_size, "sha256": digest}
        # First: the shard cannot be read without an index.
        if isinstance(writer, TokenWriter):
            loop.run(store.put(name + ".idx", writer.index()))
        loop.run(store.put(key, path))
        if isinstance(writer, TarWriter):
            shard = Shard(store, key, loop.run(store.head(key)))
            decoder = IndexingDecoder(shard, _INDEXING)
            data: Any = np.memmap(path, np.uint8, "r")
            decoder.feed(data)
            decoder.finish()
            loop.run(
                store.put(part_key(Shard(store, NAME), shard, _INDEXING), decoder.index())
            )
    path.unlink()
    loop.run(store.put(_record(numbers.start), json.dumps(record).encode()))
    return record


def _index(store: Store, firsts: range) -> None:
    """Join the index parts, if the shards of all ranks are complete."""
    loop, keys = background_loop(), _keys(store)
    names = sorted(key for key in keys if re.fullmatch(r"\d+\.tar", key))
    if names and NAME not in keys and keys.issuperset(map(_record, firsts)):
        found = loop.run(with_heads([Shard(store, name) for name in names]))
        loop.run(build_index(found, _INDEXING, Shard(store, NAME)))


class pack_results:
    """Write the outputs of a model into Parquet shards.

    The results of each sample are written exactly once, after any interruption, also by SIGKILL,
    and on any number of ranks. Each shard has the results of `samples_per_shard` consecutive
    samples of the dataset. Rank r of W makes the shards r, r + W, ...: first the shard, and last a
    record in the directory ``_pack`` beside the shards.

    Within the ``with`` block, the loader gives the samples of the shards of this rank without a
    record, in the order of the dataset and in batches of at most `batch_size`. The sampler and
    `shuffle` have no effect. The next call computes the batches of an incomplete shard again. The
    number of ranks may differ then. Ranks do not communicate, and may get different numbers of
    batches. The column ``index`` is the index of the sample in the dataset.

    Args:
        loader: a loader of a map-style dataset, with `batch_size`.
        store: the directory for the shards: a URL, a path or a `Store`. The directory is empty, or
            belongs to an interrupted call.
        schema: `pyarrow.Schema` of the results; by default the types of the first batch of
            each shard.
        samples_per_shard: number of samples in a shard.

    Raises:
        TypeError: the dataset is a stream.
        ValueError: the directory has other files, or belongs to another dataset or other arguments;
            or `put` was not called once for each batch.
        HeadraceError: writing failed.

    Example:
        >>> import tempfile, headrace as hr
        >>> loader = hr.DataLoader([1.0, 2.0, 3.0], batch_size=2)
        >>> folder = tempfile.mkdtemp()
        >>> with pack_results(loader, folder) as out:
        ...     for batch in loader:
        ...         out.put({"square": batch * batch})
        >>> list(hr.ParquetDataset(folder))
        [{'index': 0, 'square': 1.0}, {'index': 1, 'square': 4.0}, {'index': 2, 'square': 9.0}]
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        store: StoreLike,
        *,
        schema: Any = None,
        samples_per_shard: int = 16_384,
    ) -> None:
        if loader.batch_size is None or not loader.in_order:
            raise ValueError(
                "pack_results needs a loader with batch_size= and in_order=True"
            )
        self._loader, self._store, self._schema = loader, as_store(store), schema
        self._size = samples_per_shard
        self._steps = 0  # number of batches with results

    def __enter__(self) -> Self:
        loader, store, size = self._loader, self._store, self._size
        spec, self._sampler = loader._control.spec, loader.batch_sampler
        arguments = {
            **_identity(spec.source, loader.dataset),
            "samples_per_shard": size,
            "schema": self._schema and str(self._schema),
        }
        rank = rank_among(spec.options["data_parallel"])
        _, left = _begin(store, rank, arguments, lambda: size)
        batches = [
            batch for numbers in left for batch in _batches(numbers, loader.batch_size)
        ]
        loader.__dict__["batch_sampler"] = batches  # torch forbids to set the attribute
        self._left = deque(left)  # samples of the present shard and of later shards
        self._temporary = tempfile.TemporaryDirectory(prefix="headrace-pack-")
        self._uploads = _Uploads(store)
        self._open()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._loader.__dict__["batch_sampler"] = self._sampler
        progress = self._progress
        with self._temporary, self._uploads:
            try:
                # A loop that has ended early leaves the present shard to the next call.
                if kind is None and progress is not None and progress.over:
                    self._check(self._steps)
                    while self._left:
                        self._complete()
            finally:
                self._writer.close()
        if kind is None:
            for upload in self._uploads.all:
                upload.result()

    def put(self, results: Any) -> None:
        """Write the results of the last returned batch.

        Call `put` once for each batch, before the next batch.

        Args:
            results: a tensor, an array or a list with a row for each sample, or a dict of columns
                of this kind. A row has at most one dimension. A tensor, an array or a list alone is
                the column ``result``. The column ``index`` is added: the index of the sample in the
                dataset.

        Raises:
            ValueError: the number of rows is not the number of samples in the batch, or `put` was
                not called once for each batch.
            TypeError: the results do not fit the schema.
        """
        import pyarrow

        self._check(self._steps + 1)
        indices = self._progress.given_indices()
        columns = results if isinstance(results, Mapping) else {"result": results}
        arrays = {name: _column(values) for name, values in columns.items()}
        table = pyarrow.table({"index": indices, **arrays})
        while indices[0] not in self._left[0]:
            self._complete()
        self._writer.add(table, indices)
        self._steps += 1

    @property
    def _progress(self) -> Any:
        return self._loader._control.position.progress

    def _check(self, steps: int) -> None:
        """Raise `ValueError` if the loader has given another number of batches."""
        made = self._progress.state(int(self._progress.over)).steps
        if made != steps:
            raise ValueError(
                f"put() is called once for each batch, before the next batch: the loader has given "
                f"{made} batches, and the results are those of batch {steps}"
            )

    def _open(self) -> None:
        path = Path(self._temporary.name, str(len(self._left)))
        self._writer = ParquetShardWriter(path, self._schema)

    def _complete(self) -> None:
        """Complete the present shard."""
        self._writer.close()
        self._uploads.add(self._writer, self._left.popleft())
        self._open()


def _column(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    return list(values) if getattr(values, "ndim", 1) > 1 else values


_WRITERS: dict[Format, type[ShardWriter]] = {
    "tar": TarWriter,
    "parquet": ParquetShardWriter,
    "tokens": TokenWriter,
}
