"""The training job: a local store, training on its objects, and the comparison."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

import headrace as hr
from demo.comparison import compare
from demo.digits import (
    HELD_OUT,
    MANY,
    TRAIN,
    decode,
    decode_and_augment,
    digit_objects,
    label_of,
    with_copies,
)
from demo.display import Display
from demo.flow import Flow
from demo.interrupts import interrupts_held
from demo.options import DemoOptions
from demo.training import Trainer, accuracy_of
from object_server import ObjectServer

__all__ = ["run_demo", "verdict"]

GOOD_ACCURACY = 0.95


def run_demo(options: DemoOptions, display: Display) -> bool:
    """Serve the digits, train on them, compare loaders, clean up.

    Returns:
        Whether the model got at least 95 % of the held-out digits right.
    """
    began = time.perf_counter()
    display.title(
        "headrace demo", "handwritten digits, from an object store into a small CNN"
    )
    server = ObjectServer(
        with_copies(digit_objects(), options.copies),
        bucket="digits",
        latency=options.latency,
    )
    with interrupts_held():
        server.start()
    try:
        train = _dataset(server, TRAIN)
        held_out = _dataset(server, HELD_OUT)
        display.fact(
            "store",
            f"{server.endpoint}, its own process, {options.latency * 1000:g} ms to the first byte",
        )
        display.fact(
            "objects",
            f"{len(train):,} PNG files to train on, {len(held_out)} held out, labels in the keys",
        )
        with _one_thread():
            accuracy = _train(train, held_out, options, display)
        compare(_dataset(server, MANY), f"{server.http_url}/{MANY}", options, display)
    finally:
        server.close()
    reached = accuracy >= GOOD_ACCURACY
    display.closing(
        verdict(accuracy, options.epochs, time.perf_counter() - began), good=reached
    )
    return reached


def verdict(accuracy: float, epochs: int, seconds: float) -> str:
    """The last line: the next step, or the failure."""
    if accuracy >= GOOD_ACCURACY:
        return f'Done in {seconds:.0f} s. Next, your own objects: hr.ObjectDataset("s3://bucket/prefix")'
    return (
        f"Only {accuracy:.1%} of the held-out digits are right, and {GOOD_ACCURACY:.0%} should be. "
        f"Try more than --epochs {epochs}."
    )


def _dataset(server: ObjectServer, part: str) -> hr.ObjectDataset:
    return hr.ObjectDataset(
        hr.Store(f"{server.url}/{part}", options=server.store_options), labels=label_of
    )


def _train(
    train: hr.ObjectDataset,
    held_out: hr.ObjectDataset,
    options: DemoOptions,
    display: Display,
) -> float:
    loader: hr.DataLoader[Any] = hr.DataLoader(
        train,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        transform=decode_and_augment,
        concurrency=options.concurrency,
        seed=options.seed,
    )
    evaluation: hr.DataLoader[Any] = hr.DataLoader(
        held_out,
        batch_size=options.batch_size,
        transform=decode,
        concurrency=options.concurrency,
    )
    with loader, evaluation:
        display.fact(
            "loader",
            f"{options.concurrency} fetches in flight, {options.workers} workers decode and augment, "
            f"batches of {options.batch_size}",
        )
        display.fact("start", _first_batch(loader))
        trainer = Trainer(loader, epochs=options.epochs, seed=options.seed)
        display.heading("epoch     loss   held-out   samples/s   waiting for data")
        accuracy = 0.0
        for epoch in range(1, options.epochs + 1):
            label = f"{epoch:>2}/{options.epochs:<2}"
            with display.live(label, len(loader), "batches") as live:
                loss, flow = trainer.epoch(
                    lambda flow: live.update(flow.batches, _in_words(flow))
                )
                accuracy = asyncio.run(accuracy_of(trainer.model, evaluation))
            display.line(
                f"{label}  {loss:>7.4f}   {accuracy:>7.1%}   {flow.rate:>9,.0f}   {flow.wait_share:>16.0%}"
            )
    return accuracy


def _first_batch(loader: hr.DataLoader[Any]) -> str:
    """Load an epoch without training, so that the first epoch does not include the start of workers and connections."""
    began = time.perf_counter()
    with interrupts_held():
        batches = iter(loader)
    first = next(batches)
    seconds = time.perf_counter() - began
    for _ in batches:
        pass
    loader.set_epoch(0)
    shapes = " and ".join(
        f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')}" for part in first
    )
    return f"first batch after {seconds:.1f} s: {shapes}"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to this thread.

    For a small network a second thread gains nothing; with all cores busy, the two may wait for
    each other for a time slice at each step: 107 instead of 4,000 samples/s on 2 cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_words(flow: Flow) -> str:
    return f"{flow.rate:,.0f} samples/s  waiting {flow.wait_share:.0%}"
