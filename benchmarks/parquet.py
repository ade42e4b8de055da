"""How close a stream of Parquet tables comes to the bytes alone, and to pyarrow's own dataset.

4 files of 8 row groups, of which 4 of 8 columns are read, over HTTP from the library's own test server, with 20 ms to
the first byte. In the same run: a bare obstore loop that reads the same ranges and throws them away (the limit), and
`pyarrow.dataset` over the same server by its own S3 client, and both it and headrace over local files; all of them also
in tables of 256 rows, and a loader alone, of as many tables that are ready. Footers are read before the clock starts,
where the contestant keeps them.

    python benchmarks/parquet.py
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
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
from headrace._core.store.ranges import Ranges, plan_spans

COLUMNS = ["c0", "c1", "c4", "c7"]
GROUPS = 8
GROUP = 50_000  # rows
SMALL = 256  # rows of a table, as of a batch of a training
AHEAD = 4  # row groups at once, in all contestants that have a setting for it


def file(number: int) -> bytes:
    random = np.random.default_rng(number)
    table = pyarrow.table({f"c{i}": random.integers(0, 1 << 40, GROUPS * GROUP) for i in range(8)})
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, row_group_size=GROUP, use_dictionary=False)
    return stream.getvalue()


def spans_of(data: bytes) -> list[list[tuple[int, int]]]:
    """The requests for each row group, as the footer announces its columns."""
    metadata = pyarrow.parquet.ParquetFile(io.BytesIO(data)).metadata
    groups = []
    for group in range(metadata.num_row_groups):
        chunks = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
        wanted = [chunk for chunk in chunks if chunk.path_in_schema in COLUMNS]
        ranges = Ranges.of([(c.data_page_offset, c.data_page_offset + c.total_compressed_size) for c in wanted])
        groups.append([(span.start, span.stop - span.start) for span in plan_spans(ranges)])
    return groups


def check(rows: int, files: int) -> None:
    if rows != files * GROUPS * GROUP:
        raise RuntimeError(f"{rows} rows came: this run does not count")


def sorted_columns(tables: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The rows that came, in the order of their first column."""
    columns = [[np.asarray(table[name]) for name in COLUMNS] for table in tables]
    rows = np.stack([np.concatenate(parts) for parts in zip(*columns, strict=True)])
    return rows[:, np.argsort(rows[0], kind="stable")]


def check_values(name: str, tables: Iterable[Any], expected: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Compare every value, in an epoch that is not timed."""
    if not np.array_equal(sorted_columns(tables), expected):
        raise RuntimeError(f"{name} gives other values than were stored: this run does not count")


def with_bare_obstore(url: str, plans: list[list[list[tuple[int, int]]]], size: int) -> float:
    async def run() -> float:
        store = from_url(url, client_options={"allow_http": True})
        groups = iter([(f"{number}.parquet", spans) for number, plan in enumerate(plans) for spans in plan])
        received = 0

        async def one() -> None:
            nonlocal received
            for key, spans in groups:
                reads = (obstore.get_range_async(store, key, start=start, length=length) for start, length in spans)
                parts = await asyncio.gather(*reads)
                received += sum(map(len, parts))

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(AHEAD)))
        elapsed = time.perf_counter() - began
        if received != size:
            raise RuntimeError(f"{received} of {size} bytes came: this run does not count")
        return received / elapsed / 1e6

    return uvloop.run(run())


def with_headrace(dataset: hr.ParquetDataset, files: int, size: int) -> float:
    async def run() -> float:
        rows = 0
        began = time.perf_counter()
        async for table in dataset:
            rows += len(table)
        elapsed = time.perf_counter() - began
        check(rows, files)
        return size / elapsed / 1e6

    return uvloop.run(run())


def with_loader(dataset: hr.ParquetDataset, files: int, size: int) -> float:
    with hr.DataLoader(dataset, batch_size=None) as loader:
        began = time.perf_counter()
        rows = sum(len(table) for table in loader)
        elapsed = time.perf_counter() - began
    check(rows, files)
    return size / elapsed / 1e6


class Ready(hr.AsyncIterableDataset[Any]):
    """The same table over and over, as many as there are small ones: what a loader costs alone."""

    def __init__(self, table: Any, count: int) -> None:
        self.table, self.count = table, count

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in range(self.count):
            yield self.table


def with_ready_tables(dataset: Ready, size: int) -> float:
    with hr.DataLoader(dataset, batch_size=None) as loader:
        began = time.perf_counter()
        tables = sum(1 for _ in loader)
        elapsed = time.perf_counter() - began
    if tables != dataset.count:
        raise RuntimeError(f"{tables} tables came: this run does not count")
    return size / elapsed / 1e6


def with_pyarrow(dataset: pyarrow.dataset.Dataset, files: int, size: int, rows_of_a_table: int = GROUP) -> float:
    began = time.perf_counter()
    rows = sum(len(batch) for batch in dataset.to_batches(columns=COLUMNS, batch_size=rows_of_a_table))
    elapsed = time.perf_counter() - began
    check(rows, files)
    return size / elapsed / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds to the first byte")
    arguments = parse_arguments(parser, files=1, rounds=1)
    files = arguments.files
    objects = {f"{number}.parquet": file(number) for number in range(files)}
    plans = [spans_of(data) for data in objects.values()]
    size = sum(length for plan in plans for spans in plan for _, length in spans)
    with ObjectServer(objects, latency=arguments.latency) as server, tempfile.TemporaryDirectory() as folder:
        url = server.http_url
        for key, data in objects.items():
            (Path(folder) / key).write_bytes(data)
        store = hr.Store(url, options={"client_options": {"allow_http": True}})
        common: dict[str, Any] = {"columns": COLUMNS, "format": "arrow", "prefetch_row_groups": AHEAD}
        urls = [f"{url}/{key}" for key in objects]
        ours = hr.ParquetDataset(urls, store=store, **common)
        small = hr.ParquetDataset(urls, store=store, table_rows=SMALL, **common)
        local = hr.ParquetDataset(folder, **common)
        small_local = hr.ParquetDataset(folder, table_rows=SMALL, **common)
        ready = Ready(next(iter(small_local)), len(small_local))
        remote = pyarrow.dataset.dataset(
            [f"bucket/{key}" for key in objects],
            filesystem=pyarrow.fs.S3FileSystem(
                anonymous=True, scheme="http", endpoint_override=server.endpoint.removeprefix("http://")
            ),
            format="parquet",
        )
        files_of_pyarrow = pyarrow.dataset.dataset(folder)
        contestants = {
            "bare obstore ranges": lambda: with_bare_obstore(url, plans, size),
            "headrace, ParquetDataset": lambda: with_headrace(ours, files, size),
            "headrace, DataLoader": lambda: with_loader(ours, files, size),
            "pyarrow.dataset, its S3": lambda: with_pyarrow(remote, files, size),
            f"headrace, ParquetDataset, {SMALL} rows": lambda: with_headrace(small, files, size),
            f"headrace, DataLoader, {SMALL} rows": lambda: with_loader(small, files, size),
            f"a loader of {ready.count:,} tables that are ready": lambda: with_ready_tables(ready, size),
            f"pyarrow.dataset, its S3, {SMALL} rows": lambda: with_pyarrow(remote, files, size, SMALL),
            "headrace, local files": lambda: with_headrace(local, files, size),
            "pyarrow.dataset, local files": lambda: with_pyarrow(files_of_pyarrow, files, size),
            f"headrace, local files, {SMALL} rows": lambda: with_headrace(small_local, files, size),
            f"pyarrow.dataset, local files, {SMALL} rows": lambda: with_pyarrow(files_of_pyarrow, files, size, SMALL),
        }
        expected = sorted_columns(
            pyarrow.parquet.read_table(io.BytesIO(data), columns=COLUMNS) for data in objects.values()
        )
        ours_all = {"ours": ours, "small tables": small, "local files": local, "small, local": small_local}
        for name, dataset in ours_all.items():
            with hr.DataLoader(dataset, batch_size=None) as loader:
                check_values(name, loader, expected)
        for name, dataset in {"pyarrow": remote, "pyarrow, local files": files_of_pyarrow}.items():
            check_values(name, dataset.to_batches(columns=COLUMNS, batch_size=GROUP), expected)
        rounds = interleave(contestants, rounds=arguments.rounds, unit="MB/s")
    print(
        f"{files} files, {size / 1e6:.0f} MB of 4 columns out of 8; {arguments.latency * 1e3:.0f} ms to the first byte"
    )
    print(describe_machine("pyarrow"))
    rounds.show(against="bare obstore ranges", absent={})
    claim(
        "Parquet tables over HTTP",
        rounds.share("headrace, ParquetDataset", "bare obstore ranges", at_least=0.95),
        rounds.share("headrace, ParquetDataset", "pyarrow.dataset, its S3", "× pyarrow.dataset", at_least=1),
    )
    claim(
        f"Parquet tables of {SMALL} rows over HTTP, through a loader",
        rounds.share(f"headrace, DataLoader, {SMALL} rows", "bare obstore ranges", at_least=0.8),
        rounds.share(
            f"headrace, DataLoader, {SMALL} rows",
            f"pyarrow.dataset, its S3, {SMALL} rows",
            "× pyarrow.dataset",
            at_least=1,
        ),
    )
    for words, rows in (("", ""), (f" of {SMALL} rows", f", {SMALL} rows")):
        claim(
            f"Parquet tables{words} of local files",
            rounds.share(
                f"headrace, local files{rows}", f"pyarrow.dataset, local files{rows}", "× pyarrow.dataset", at_least=1
            ),
        )


if __name__ == "__main__":
    main()
