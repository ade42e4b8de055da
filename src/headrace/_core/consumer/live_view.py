"""What `headrace top` shows of a loader: its consumer's state, its counts, and the report on its last batches."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from headrace._core.consumer.epoch import Epoch
from headrace._core.consumer.order import TorchLoader
from headrace._core.eventloop.stack_places import line_of_thread
from headrace._core.rankinfo import RankInfo
from headrace.telemetry import live
from headrace.telemetry.batch_log import BatchRecord
from headrace.telemetry.counters import Counters
from headrace.telemetry.limits import Setup

RECENT = 30.0  # seconds: the report is on the batches of so long
LEAST, MOST = 32, 1024  # of them; a report on 1,024 takes some 10 ms
LONG = 1.0  # seconds after which the engine, and the consumer's stack, are looked at
ANSWER_TIMEOUT = 0.5  # seconds for the engine's answer

_numbers = itertools.count(1)


class Shown(Protocol):
    """The part of an `EpochStarter` that is shown."""

    counters: Counters

    def setup(self, loader: TorchLoader) -> Setup:
        """The arguments that decide on the loader's speed."""


class LoaderView:
    """A loader's source of `headrace top`. Its `EpochStarter` owns it, and calls `close`; it keeps no loader alive."""

    def __init__(self, starter: Shown, dataset: str) -> None:
        self._starter = weakref.ref(starter)
        self._dataset = dataset
        self._number = 0  # of the loader in its process
        self._loader: weakref.ref[TorchLoader] | None = None
        self._epoch: weakref.ref[Epoch] | None = None
        self._epoch_number = 0
        self._rank: RankInfo | None = None

    def begin(self, loader: TorchLoader, epoch: Epoch, number: int, rank: RankInfo) -> None:
        """An iteration has begun; on the consumer's thread."""
        self._number = self._number or next(_numbers)
        self._loader, self._epoch = weakref.ref(loader), weakref.ref(epoch)
        self._epoch_number, self._rank = number, rank
        live.show(self)

    def close(self) -> None:
        """Show the loader no longer; from any thread, any number of times."""
        live.forget(self)

    def snapshot(self) -> dict[str, Any] | None:
        """The loader's state now; None if it no longer exists."""
        starter, loader = self._starter(), None if self._loader is None else self._loader()
        if starter is None or loader is None or self._rank is None:
            return None
        epoch = None if self._epoch is None else self._epoch()
        setup = starter.setup(loader)
        return {
            "loader": self._number,
            "dataset": self._dataset,
            "batch_size": setup.batch_size,
            "num_workers": setup.num_workers,
            "concurrency": setup.concurrency,
            "placement": setup.placement,
            "rank": self._rank.rank,
            "world_size": self._rank.world_size,
            "epoch": self._epoch_number,
            **_consumer(epoch),
            **_counts(starter.counters),
            **_report(starter.counters.log.records(), setup),
        }


def _consumer(epoch: Epoch | None) -> dict[str, Any]:
    """What the consumer does, for how long, and where the next batch is."""
    if epoch is None:
        return {"state": "over"}
    activity = epoch.activity()
    if activity.doing == "over":
        return {"state": "over"}
    lasted = max(0.0, time.perf_counter() - activity.since)
    shown: dict[str, Any] = {"state": activity.doing, "state_seconds": lasted, "batch": activity.batch}
    if lasted >= LONG:
        if activity.batch is not None:
            shown["batch_status"] = epoch.describe(activity.batch, ANSWER_TIMEOUT)
        shown["line"] = line_of_thread(activity.thread) if activity.thread else None
    return shown


def _counts(counters: Counters) -> dict[str, Any]:
    stats = counters.snapshot()
    return {
        "iterations": stats.epochs,
        "batches": stats.batches,
        "samples": stats.samples,
        "skipped_samples": stats.skipped_samples,
        "wait_share": stats.wait_share,
        "elapsed_seconds": stats.elapsed_seconds,
    }


def _report(records: Sequence[BatchRecord], setup: Setup) -> dict[str, Any]:
    """The report on the last batches of the iteration begun last."""
    from headrace.telemetry.report import make_report

    if not records:
        return {"report": None}
    recent = _recent(records)
    if len(recent) < len(records):  # the first of them is not the iteration's, and did not start anything
        recent[0] = recent[0]._replace(called=recent[0].returned)
    report = make_report(recent, setup)
    return {"summary": str(report).partition("\n")[0], "report": report.to_dict()}


def _recent(records: Sequence[BatchRecord]) -> list[BatchRecord]:
    since = records[-1].returned - RECENT
    recent = [record for record in records[-MOST:] if record.returned >= since]
    return recent if len(recent) >= LEAST else list(records[-LEAST:])
