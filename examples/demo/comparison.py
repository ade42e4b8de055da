"""The table at the end: one epoch loaded by torch's DataLoader and by headrace, from the same store."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

import headrace as hr
from demo.digits import augmented, decode_and_augment, label_of
from demo.display import Display
from demo.options import DemoOptions
from demo.timing import (
    Batches,
    BlockingGets,
    FixedOrder,
    Timing,
    batches_within,
    time_epoch,
    torch_loader,
)

__all__ = ["compare"]

TORCH_SECONDS = 8.0  # for each of torch's rows, which load as many batches as that allows
MORE_WORKERS = 16  # a common setting of torch's users for more concurrent requests
NOTES = (
    "",
    "Workers are started before the clock; samples are counted and checked.",
    "torch: a Dataset whose __getitem__ sends a GET on its worker's connection, and decodes the body.",
)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    in_flight: int | Literal["auto"]
    timing: Timing


def compare(
    objects: hr.ObjectDataset, url: str, options: DemoOptions, display: Display
) -> list[Timing]:
    """Load an epoch with torch's loader, with few and with many workers, and with headrace; show the times.

    Args:
        objects: the objects.
        url: their location by plain HTTP, for the client of the torch dataset.
        options: the batch size, the workers and the fetches in flight to compare with.
        display: for the table.

    Returns:
        The timing of each row, headrace last.

    Raises:
        RuntimeError: a loader delivered wrong samples.
    """
    comparison = _Comparison(objects, url, options, display)
    display.heading(
        f"Loading {len(objects):,} objects without training: same store, order, batches and transform"
    )
    more = max(MORE_WORKERS, options.workers)
    rows = [
        comparison.torch(workers) for workers in dict.fromkeys((options.workers, more))
    ]
    rows.append(comparison.headrace())
    slowest = rows[0].timing.rate
    display.table(
        ("loader", "in flight", "samples", "seconds", "samples/s", "ratio"),
        [
            (
                row.name,
                str(row.in_flight),
                f"{row.timing.samples:,}",
                f"{row.timing.seconds:.2f}",
                f"{row.timing.rate:,.0f}",
                f"{row.timing.rate / slowest:.0f} ×",
            )
            for row in rows
        ],
    )
    if any(row.timing.samples < len(objects) for row in rows):
        display.remark(
            "torch's rows are the first batches only: all of them would take too long."
        )
    for line in NOTES:
        display.remark(line)
    return [row.timing for row in rows]


class _Comparison:
    def __init__(
        self, objects: hr.ObjectDataset, url: str, options: DemoOptions, display: Display
    ) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        order = torch.randperm(len(objects), generator=generator).tolist()
        size = options.batch_size
        self.epoch: Batches = [
            order[start : start + size] for start in range(0, len(order), size)
        ]
        self._objects = objects
        self._url = url
        self._options = options
        self._display = display

    def torch(self, workers: int) -> Row:
        """Measure torch's loader."""
        order = FixedOrder(self._options.batch_size)
        batches = batches_within(
            TORCH_SECONDS, self.epoch, latency=self._options.latency, workers=workers
        )
        blocking = BlockingGets(self._url, self._objects.keys, augmented, label_of)
        with (
            contextlib.closing(blocking) as dataset,
            torch_loader(dataset, order, workers) as loader,
        ):
            return self._timed(
                "torch",
                loader,
                order,
                batches,
                workers=workers,
                in_flight=max(1, workers),
            )

    def headrace(self) -> Row:
        """Measure headrace's loader."""
        options = self._options
        order = FixedOrder(options.batch_size)
        loader: hr.DataLoader[Any] = hr.DataLoader(
            self._objects,
            batch_sampler=order,
            num_workers=options.workers,
            transform=decode_and_augment,
            concurrency=options.concurrency,
            seed=options.seed,
        )
        with loader:
            return self._timed(
                "headrace",
                loader,
                order,
                self.epoch,
                workers=options.workers,
                in_flight=options.concurrency,
            )

    def _timed(
        self,
        library: str,
        loader: Any,
        order: FixedOrder,
        batches: Batches,
        *,
        workers: int,
        in_flight: int | Literal["auto"],
    ) -> Row:
        name = f"{library}, {workers} workers"
        with self._display.live(name, len(batches), "batches") as live:
            timing = time_epoch(
                loader,
                order,
                batches,
                workers=workers,
                on_batch=lambda number, rate: live.update(
                    number, f"{rate:,.0f} samples/s"
                ),
            )
        wanted = [
            label_of(self._objects.keys[index]) for batch in batches for index in batch
        ]
        if (timing.samples, timing.labels) != (len(wanted), sum(wanted)):
            raise RuntimeError(
                f"{name} delivered {timing.samples} samples whose labels sum to {timing.labels}; "
                f"{len(wanted)} with {sum(wanted)} were requested"
            )
        return Row(name, in_flight, timing)
