"""Rows that name images: how close a coroutine function of `map` comes to what the store allows.

A JSON Lines file has 1,200 rows, and a row names 0 to 6 images of 56 KB. The store takes 20 ms to
the first byte. 32 rows are in flight, and a row fetches its images one after the other; so the
limit is number of images × 20 ms ÷ 32. In the same run: headrace with the rows as map-style data by
an index, as a stream, and as a stream with a filter after the fetch; a bare loop of 32 coroutines
with the same function; a pipeline of SPDL with the same function, 32 rows at a time and in order;
and torch's own loader with two workers, whose dataset blocks for each image. torch's loader reads
fewer rows. Every image is compared with what was stored.

    python benchmarks/rows_with_images.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contents import content_of, key_of
from harness import claim, describe_machine, interleave, is_installed, parse_arguments
from store import serve

import headrace as hr

SIZE = 56_000  # bytes of an image
CONCURRENCY = 32
LATENCY = 0.020  # seconds to the first byte
MOST = 6  # images of a row
BATCH = 32
TORCH_ROWS = 128

LIMIT = "reads × latency ÷ concurrency"
MAP, STREAM, FILTERED = (
    "headrace, by an index",
    "headrace, a stream",
    "headrace, then a filter",
)
BARE, SPDL, TORCH = "bare loop", "SPDL", "torch, 2 workers"


def rows_of(count: int) -> list[dict[str, Any]]:
    """Rows with 0 to 6 keys of images."""
    numbers = np.random.default_rng(7).integers(0, MOST + 1, count)
    ends = numbers.cumsum()
    return [
        {"row": row, "images": [key_of(key) for key in range(end - number, end)]}
        for row, (number, end) in enumerate(
            zip(numbers.tolist(), ends.tolist(), strict=True)
        )
    ]


class FetchImages:
    """The function of `map`: a row with the bytes of its images."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.store = hr.Store(url, options=options)

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        images = [bytes(await self.store.read_all(key)) for key in row["images"]]
        return {**row, "images": images}


class BlockingRows(torch.utils.data.Dataset[dict[str, Any]]):
    """The same for torch's loader: `__getitem__` blocks."""

    def __init__(self, rows: list[dict[str, Any]], fetch: FetchImages) -> None:
        self.rows, self.fetch = rows, fetch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return asyncio.run(self.fetch(self.rows[index]))


def has_images(row: dict[str, Any]) -> bool:
    return row["images"] is not None


def epoch(loader: Any) -> Iterator[dict[str, Any]]:
    for batch in loader:
        yield from batch


async def bare(rows: list[dict[str, Any]], fetch: FetchImages) -> list[dict[str, Any]]:
    """The rows by 32 coroutines, without order and batches."""
    found, waiting = [], iter(rows)

    async def work() -> None:
        for row in waiting:
            found.append(await fetch(row))  # noqa: PERF401

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    return sorted(found, key=lambda row: row["row"])


def with_spdl(rows: list[dict[str, Any]], fetch: FetchImages) -> Iterator[dict[str, Any]]:
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(rows)
    builder = builder.pipe(fetch.__call__, concurrency=CONCURRENCY, output_order="input")
    pipeline = builder.add_sink(4 * CONCURRENCY).build(num_threads=1)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def seconds(read: Callable[[], Any], rows: list[dict[str, Any]]) -> float:
    """The time to read all rows, whose images are compared afterwards."""
    began = time.perf_counter()
    found = list(read())
    took = time.perf_counter() - began
    assert [row["row"] for row in found] == [row["row"] for row in rows]
    for row, asked in zip(found, rows, strict=True):
        expected = [content_of(int(key.split(".")[0]), SIZE) for key in asked["images"]]
        assert row["images"] == expected
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, rows=96, rounds=1)
    rows = rows_of(arguments.rows)
    images = sum(len(row["images"]) for row in rows)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(serve(images, SIZE, latency=LATENCY))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        fetch = FetchImages(store.url, store.options)
        stream = hr.LinesDataset(folder / "rows.jsonl")
        datasets = {
            MAP: hr.LinesDataset.index(folder / "rows.jsonl").map(fetch),
            STREAM: stream.map(fetch),
            FILTERED: stream.map(fetch).filter(has_images),
        }
        contestants: dict[str, Callable[[], float]] = {
            LIMIT: lambda: images * LATENCY / CONCURRENCY,
            BARE: lambda: seconds(lambda: asyncio.run(bare(rows, fetch)), rows),
        }
        for name, dataset in datasets.items():
            loader = stack.enter_context(
                hr.DataLoader(dataset, BATCH, collate_fn=list, concurrency=CONCURRENCY)
            )
            contestants[name] = functools.partial(
                seconds, functools.partial(epoch, loader), rows
            )
        if is_installed("spdl-core"):
            contestants[SPDL] = lambda: seconds(lambda: with_spdl(rows, fetch), rows)
        some = rows[:TORCH_ROWS]
        of_torch = torch.utils.data.DataLoader(
            BlockingRows(some, fetch), BATCH, collate_fn=list, num_workers=2,
            multiprocessing_context="spawn", persistent_workers=True,
        )  # fmt: skip
        list(of_torch)  # the workers start
        share = len(rows) / len(some)
        contestants[TORCH] = lambda: (
            share * seconds(functools.partial(epoch, of_torch), some)
        )
        found = interleave(contestants, rounds=arguments.rounds, unit="s")
    print(f"{len(rows)} rows, {images} images of {SIZE} bytes, {LATENCY * 1000:.0f} ms")
    print(f"the store: {store.kind}; it shares the machine's cores")
    print(describe_machine())
    found.show(against=LIMIT)
    claim(
        f"rows with 0 to {MOST} images, {CONCURRENCY} in flight",
        *(
            found.share(name, BARE, f"of the bare loop, {name}", at_most=1.1)
            for name in datasets
        ),
        found.share(STREAM, LIMIT, f"of the limit's time, {STREAM}"),
        *(
            [found.share(SPDL, STREAM, f"× the time of {STREAM}, {SPDL}")]
            if SPDL in contestants
            else []
        ),
        found.share(TORCH, STREAM, f"× the time of {STREAM}, {TORCH}"),
    )


if __name__ == "__main__":
    main()
