"""How close a loader of Parquet comes to bare ranged reads with pyarrow's decoder, and to pyarrow's own dataset.

4 files of 8 row groups, of which 4 of 8 columns are read, over HTTP from the library's own test
server, with 20 ms to the first byte. A loader gives batches of 256 rows, as tables and as dicts, in
order and shuffled, and whole row groups. In the same run: a bare obstore loop that reads the same
ranges, several row groups at once, and decodes them by pyarrow in threads (the limit of tables),
the same with `to_pylist` for each 256 rows (the limit of dicts), and `pyarrow.dataset` over the
same server by its own S3 client. Footers are read before the clock starts.

    python benchmarks/parquet.py
"""

from __future__ import annotations

import argparse
import asyncio
import io
import pickle
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import obstore
import pyarrow
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet
import uvloop
from harness import claim, describe_machine, interleave, parse_arguments
from obstore.store import from_url
from servers import ObjectServer

import headrace as hr
from headrace._shards.parquet import SparseFile
from headrace._store.ranges import Ranges, plan_spans

COLUMNS = ["c0", "c1", "c4", "c7"]
GROUPS = 8
GROUP = 50_000  # rows
BATCH = 256  # rows
AHEAD = 16  # row groups at once of the bare loop


def file(number: int) -> bytes:
    random = np.random.default_rng(number)
    table = pyarrow.table(
        {f"c{i}": random.integers(0, 1 << 40, GROUPS * GROUP) for i in range(8)}
    )
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, row_group_size=GROUP, use_dictionary=False)
    return stream.getvalue()


def spans_of(data: bytes) -> list[list[tuple[int, int]]]:
    """The requests for each row group, as the footer announces its columns."""
    metadata = pyarrow.parquet.ParquetFile(io.BytesIO(data)).metadata
    groups = []
    for group in range(metadata.num_row_groups):
        chunks = [
            metadata.row_group(group).column(i) for i in range(metadata.num_columns)
        ]
        wanted = [chunk for chunk in chunks if chunk.path_in_schema in COLUMNS]
        ranges = Ranges.of(
            [
                (c.data_page_offset, c.data_page_offset + c.total_compressed_size)
                for c in wanted
            ]
        )
        groups.append(
            [(span.start, span.stop - span.start) for span in plan_spans(ranges)]
        )
    return groups


def check(rows: int, files: int) -> None:
    if rows != files * GROUPS * GROUP:
        raise RuntimeError(f"{rows} rows came: this run does not count")


def check_values(
    name: str, batches: Iterable[Any], expected: np.ndarray[Any, np.dtype[np.int64]]
) -> None:
    """Compare every value, in sorted order, in an epoch that is not timed."""
    tables = [
        batch if isinstance(batch, pyarrow.Table) else pyarrow.Table.from_pylist(batch)
        for batch in batches
    ]
    table = pyarrow.concat_tables(tables)
    rows = np.stack([np.asarray(table[name]) for name in COLUMNS])
    if not np.array_equal(rows[:, np.lexsort(rows)], expected):
        raise RuntimeError(
            f"{name} gives other values than were stored: this run does not count"
        )


def bare(url: str, objects: dict[str, bytes], size: int, *, as_rows: bool) -> float:
    """Read and decode row groups by obstore and pyarrow alone."""
    metadata = {
        key: pyarrow.parquet.read_metadata(io.BytesIO(data))
        for key, data in objects.items()
    }
    plans = {key: spans_of(data) for key, data in objects.items()}

    def decode(key: str, group: int, pieces: list[tuple[int, memoryview]]) -> int:
        source = pyarrow.PythonFile(SparseFile(pieces, len(objects[key])), mode="r")
        file = pyarrow.parquet.ParquetFile(
            source, metadata=metadata[key], pre_buffer=False
        )
        table = file.read_row_group(group, columns=COLUMNS, use_threads=False)
        if as_rows:
            return sum(
                len(table.slice(start, BATCH).to_pylist())
                for start in range(0, len(table), BATCH)
            )
        return len(table)

    async def run() -> float:
        store = from_url(url, client_options={"allow_http": True})
        groups = iter(
            [
                (key, group, spans)
                for key, plan in plans.items()
                for group, spans in enumerate(plan)
            ]
        )
        rows = 0

        async def one() -> None:
            nonlocal rows
            for key, group, spans in groups:
                reads = (
                    obstore.get_range_async(store, key, start=start, length=length)
                    for start, length in spans
                )
                parts = await asyncio.gather(*reads)
                pieces = [
                    (start, memoryview(part))
                    for (start, _), part in zip(spans, parts, strict=True)
                ]
                came = await asyncio.to_thread(decode, key, group, pieces)
                rows += came

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(AHEAD)))
        elapsed = time.perf_counter() - began
        check(rows, len(objects))
        return size / elapsed / 1e6

    return uvloop.run(run())


def with_loader(
    dataset: hr.ParquetDataset,
    files: int,
    size: int,
    batch_size: int = BATCH,
    **options: Any,
) -> float:
    # Without the row groups of the epoch before.
    dataset = pickle.loads(pickle.dumps(dataset))
    with hr.DataLoader(dataset, batch_size, **options) as loader:
        began = time.perf_counter()
        rows = sum(map(len, loader))
        elapsed = time.perf_counter() - began
    check(rows, files)
    return size / elapsed / 1e6


def with_pyarrow(dataset: pyarrow.dataset.Dataset, files: int, size: int) -> float:
    began = time.perf_counter()
    rows = sum(
        len(batch) for batch in dataset.to_batches(columns=COLUMNS, batch_size=BATCH)
    )
    elapsed = time.perf_counter() - began
    check(rows, files)
    return size / elapsed / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--latency", type=float, default=0.02, help="seconds to the first byte"
    )
    arguments = parse_arguments(parser, files=1, rounds=1)
    files = arguments.files
    objects = {f"{number}.parquet": file(number) for number in range(files)}
    size = sum(
        length
        for data in objects.values()
        for spans in spans_of(data)
        for _, length in spans
    )
    with ObjectServer(objects, latency=arguments.latency) as server:
        url = server.http_url
        store = hr.Store(url, options={"client_options": {"allow_http": True}})
        urls = [f"{url}/{key}" for key in objects]
        tables = hr.ParquetDataset(urls, columns=COLUMNS, format="arrow", store=store)
        dicts = hr.ParquetDataset(urls, columns=COLUMNS, store=store)
        remote = pyarrow.dataset.dataset(
            [f"bucket/{key}" for key in objects],
            filesystem=pyarrow.fs.S3FileSystem(
                anonymous=True,
                scheme="http",
                endpoint_override=server.endpoint.removeprefix("http://"),
            ),
            format="parquet",
        )
        shuffled: dict[str, Any] = {"shuffle": True, "seed": 0}
        as_list: dict[str, Any] = {"collate_fn": list}
        contestants = {
            "bare reads and decoder": lambda: bare(url, objects, size, as_rows=False),
            "headrace, tables": lambda: with_loader(tables, files, size),
            "headrace, tables, shuffled": lambda: with_loader(
                tables, files, size, **shuffled
            ),
            "headrace, whole row groups": lambda: with_loader(tables, files, size, GROUP),
            "pyarrow.dataset, its S3": lambda: with_pyarrow(remote, files, size),
            "bare reads, decoder, to_pylist": lambda: bare(
                url, objects, size, as_rows=True
            ),
            "headrace, dicts": lambda: with_loader(dicts, files, size, **as_list),
            "headrace, dicts, shuffled": lambda: with_loader(
                dicts, files, size, **as_list, **shuffled
            ),
        }
        expected = np.concatenate(
            [
                np.stack([np.asarray(table[name]) for name in COLUMNS])
                for table in (
                    pyarrow.parquet.read_table(io.BytesIO(data))
                    for data in objects.values()
                )
            ],
            axis=1,
        )
        expected = expected[:, np.lexsort(expected)]
        for name, dataset in {"tables": tables, "dicts": dicts}.items():
            for options in ({}, shuffled):
                with hr.DataLoader(
                    dataset, BATCH, **options, **(as_list if dataset is dicts else {})
                ) as loader:
                    check_values(name, loader, expected)
        rounds = interleave(contestants, rounds=arguments.rounds, unit="MB/s")
    print(
        f"{files} files, {size / 1e6:.0f} MB of 4 columns out of 8; {arguments.latency * 1e3:.0f} ms to the first byte"
    )
    print(describe_machine("pyarrow"))
    rounds.show(against="bare reads and decoder", absent={})
    claim(
        f"Parquet as tables, {BATCH} rows in a batch, over HTTP",
        rounds.share("headrace, tables", "bare reads and decoder", at_least=0.6),
        rounds.share("headrace, tables, shuffled", "headrace, tables", at_least=0.9),
    )
    claim(
        "Parquet as tables, whole row groups, over HTTP",
        rounds.share(
            "headrace, whole row groups", "bare reads and decoder", at_least=0.9
        ),
    )
    claim(
        f"Parquet as dicts, {BATCH} rows in a batch, over HTTP",
        rounds.share("headrace, dicts", "bare reads, decoder, to_pylist", at_least=0.6),
        rounds.share("headrace, dicts, shuffled", "headrace, dicts", at_least=0.9),
    )


if __name__ == "__main__":
    main()
