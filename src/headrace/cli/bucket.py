"""`headrace demo --url`: load the user's own objects once and print the throughput."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace._core.look_ahead import AUTO_CONCURRENCY
from headrace._core.store.redaction import redact_url
from headrace._core.store.store import Store
from headrace.cli.interrupts import interrupts_held
from headrace.datasets.objects import ObjectDataset, ObjectSample
from headrace.loader import DataLoader

__all__ = ["BucketOptions", "object_size", "stream_bucket"]

MEGABYTE = 1e6
LOG_INTERVAL = 5.0  # s between two lines of progress


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """Arguments of `headrace demo --url`.

    Attributes:
        url: the prefix that is listed and read.
        store_options: passed to the store; may hold secrets.
        batch_size: objects per batch.
        workers: worker processes.
        concurrency: fetches in flight.
        seed: seed of the order.
    """

    url: str
    store_options: Mapping[str, object]
    batch_size: int
    workers: int
    concurrency: int | Literal["auto"]
    seed: int


def stream_bucket(options: BucketOptions) -> int:
    """Fetch every object under a URL once, and print the throughput.

    Returns:
        The number of bytes received.

    Raises:
        StoreError: the store cannot be listed or read; the message has no secrets.
        ValueError: the URL or the store's options are invalid.
    """
    _print(f"every object under {redact_url(options.url)}, once, without decoding")
    began = time.perf_counter()
    dataset = ObjectDataset(Store(options.url, options=options.store_options))
    _print(f"listed {len(dataset):,} objects in {time.perf_counter() - began:.1f} s")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        transform=object_size,
        concurrency=options.concurrency,
        seed=options.seed,
    )
    fetches = AUTO_CONCURRENCY if options.concurrency == "auto" else options.concurrency
    _print(f"{fetches} fetches in flight, {options.workers} workers, batches of {options.batch_size}")
    with loader:
        began = printed = time.perf_counter()
        with interrupts_held():
            batches = iter(loader)
        objects = received = 0
        for sizes in batches:
            objects += len(sizes)
            received += int(sizes.sum())
            if (now := time.perf_counter()) - printed >= LOG_INTERVAL:
                printed = now
                _print(_progress(objects, received, now - began))
        _print(_progress(objects, received, time.perf_counter() - began))
    _print("next: give this loader a transform of yours, and train on it")
    return received


def object_size(sample: ObjectSample) -> int:
    """Number of bytes of an object."""
    return len(sample.data)


def _progress(objects: int, received: int, seconds: float) -> str:
    megabytes = received / MEGABYTE
    return (
        f"{objects:,} objects, {megabytes:,.1f} MB in {seconds:.2f} s: "
        f"{objects / seconds:,.0f} objects/s, {megabytes / seconds:,.1f} MB/s"
    )


def _print(text: str) -> None:
    sys.stdout.write(f"headrace demo: {text}\n")
    sys.stdout.flush()
