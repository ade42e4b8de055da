"""`headrace demo --url`: the loading part, on the user's own objects."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace._core.store.redaction import redact_url
from headrace.datasets.objects import ObjectDataset, ObjectSample
from headrace.demo.display import Display
from headrace.demo.flow import Flow, FlowMeter
from headrace.demo.interrupts import interrupts_held
from headrace.loader import DataLoader
from headrace.options import AUTO_CONCURRENCY

__all__ = ["BucketOptions", "length_of", "stream_bucket"]

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """What `headrace demo --url` was asked for.

    Attributes:
        url: where the objects are.
        store_options: for the store; may hold secrets.
        batch_size: objects in a batch.
        workers: processes that count the bytes.
        concurrency: fetches in flight.
        seed: of the order.
    """

    url: str
    store_options: Mapping[str, Any]
    batch_size: int
    workers: int
    concurrency: int | Literal["auto"]
    seed: int


def stream_bucket(options: BucketOptions, display: Display) -> int:
    """Fetch every object under a URL once, and show how fast they come.

    Returns:
        How many bytes came.

    Raises:
        StoreError: the store cannot be listed or read; the message has no secrets.
        ValueError: the URL or the store's options make no sense.
    """
    display.title("headrace demo", f"every object under {redact_url(options.url)}, once, without decoding")
    began = time.perf_counter()
    dataset = ObjectDataset(options.url, store_options=options.store_options)
    display.fact("listed", f"{len(dataset):,} objects in {time.perf_counter() - began:.1f} s")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        transform=length_of,
        concurrency=options.concurrency,
        seed=options.seed,
    )
    fetches = AUTO_CONCURRENCY if options.concurrency == "auto" else options.concurrency
    display.fact("loader", f"{fetches} fetches in flight, {options.workers} workers, batches of {options.batch_size}")
    flow, received = _stream(loader, display)
    display.fact("loaded", f"{flow.samples:,} objects, {received / MEGABYTE:,.1f} MB in {flow.seconds:.2f} s")
    display.fact("rate", _in_words(flow, received))
    display.closing("Next: give that loader a transform of yours, and train on it.")
    return received


def length_of(sample: ObjectSample) -> int:
    """How many bytes an object has."""
    return len(sample.data)


def _stream(loader: DataLoader[Any], display: Display) -> tuple[Flow, int]:
    received = 0
    with loader, display.live("streaming", len(loader), "batches") as live:
        meter = FlowMeter(loader)
        with interrupts_held():
            batches = iter(loader)
        for lengths in batches:
            received += int(lengths.sum())
            flow = meter.read()
            live.update(flow.batches, _in_words(flow, received))
        return meter.read(), received


def _in_words(flow: Flow, received: int) -> str:
    return (
        f"{flow.rate:,.0f} objects/s  {received / MEGABYTE / flow.seconds:,.1f} MB/s  "
        f"waiting for data {flow.wait_share:.0%} of the time"
    )
