"""The table at the end: the same epoch loaded by torch's DataLoader and by headrace, from the same store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.datasets.objects import ObjectDataset
from headrace.demo.digits import decode_and_augment, label_of
from headrace.demo.display import Display
from headrace.demo.options import DemoOptions
from headrace.demo.timing import Batches, FixedOrder, OneByOne, Timing, batches_within, time_epoch, torch_loader
from headrace.loader import DataLoader

__all__ = ["compare"]

TORCH_SECONDS = 18.0  # for torch's first row; enough for the whole epoch with the default options
NOTES = (
    "",
    "{workers} workers each, started before the clock; samples were counted and checked.",
    "An object at a time: a torch Dataset whose __getitem__ waits for its object.",
    "A batch at a time: headrace's ObjectDataset in torch, by its __getitems__.",
)


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    in_flight: int
    timing: Timing


def compare(train: ObjectDataset, options: DemoOptions, display: Display) -> list[Timing]:
    """Load one epoch three times, show how long each took.

    Args:
        train: the objects.
        options: the batch size, the workers and the fetches in flight to compare with.
        display: where the table goes.

    Returns:
        What each row measured, from the slowest way of fetching to headrace.

    Raises:
        RuntimeError: a loader delivered other samples than it was asked for.
    """
    comparison = _Comparison(train, options, display)
    few = batches_within(TORCH_SECONDS, comparison.epoch, latency=options.latency, workers=options.workers)
    display.heading("Loading an epoch without training: same store, order, batches and transform")
    rows = [
        comparison.torch("torch, an object at a time", OneByOne(train, decode_and_augment), few, in_flight=1),
        comparison.torch(
            "torch, a batch at a time",
            train.map(decode_and_augment),
            comparison.epoch,
            in_flight=options.batch_size,
        ),
        comparison.headrace("headrace"),
    ]
    slowest = rows[0].timing.rate
    display.table(
        ("loader", "in flight", "samples", "seconds", "samples/s", "ratio"),
        [
            (
                row.name,
                f"{row.in_flight:,}",
                f"{row.timing.samples:,}",
                f"{row.timing.seconds:.2f}",
                f"{row.timing.rate:,.0f}",
                f"{row.timing.rate / slowest:.0f} ×",
            )
            for row in rows
        ],
    )
    if len(few) < len(comparison.epoch):
        display.remark(
            f"The first row is {len(few)} of the {len(comparison.epoch)} batches; all of them would take too long."
        )
    for line in NOTES:
        display.remark(line.format(workers=options.workers))
    return [row.timing for row in rows]


class _Comparison:
    def __init__(self, train: ObjectDataset, options: DemoOptions, display: Display) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        order = torch.randperm(len(train), generator=generator).tolist()
        size = options.batch_size
        self.epoch: Batches = [order[start : start + size] for start in range(0, len(order), size)]
        self._train = train
        self._options = options
        self._display = display

    def torch(self, name: str, dataset: Any, batches: Batches, *, in_flight: int) -> _Row:
        """A row of torch's loader; `in_flight` is what one worker has."""
        workers = self._options.workers
        order = FixedOrder(self._options.batch_size)
        with torch_loader(dataset, order, workers) as loader:
            return _Row(name, in_flight * max(1, workers), self._timed(name, loader, order, batches))

    def headrace(self, name: str) -> _Row:
        """A row of our loader."""
        options = self._options
        order = FixedOrder(options.batch_size)
        loader: DataLoader[Any] = DataLoader(
            self._train,
            batch_sampler=order,
            num_workers=options.workers,
            transform=decode_and_augment,
            concurrency=options.concurrency,
            seed=options.seed,
        )
        with loader:
            return _Row(name, options.fetches, self._timed(name, loader, order, self.epoch))

    def _timed(self, name: str, loader: Any, order: FixedOrder, batches: Batches) -> Timing:
        with self._display.live(name, len(batches), "batches") as live:
            timing = time_epoch(
                loader,
                order,
                batches,
                workers=self._options.workers,
                on_batch=lambda number, rate: live.update(number, f"{rate:,.0f} samples/s"),
            )
        wanted = [label_of(self._train.keys[index]) for batch in batches for index in batch]
        if (timing.samples, timing.labels) != (len(wanted), sum(wanted)):
            raise RuntimeError(
                f"{name} delivered {timing.samples} samples whose labels sum to {timing.labels}; "
                f"{len(wanted)} with {sum(wanted)} were asked for"
            )
        return timing
