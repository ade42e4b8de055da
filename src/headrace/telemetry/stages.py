"""The shares of the time in which each stage worked, waited and was blocked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.telemetry.batch_log import BatchRecord

__all__ = ["Interval", "StageShare", "fetching", "length", "percentile", "percentiles", "stage_shares", "working"]

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StageShare:
    """How a stage of the pipeline spent the time.

    Attributes:
        name: of the stage.
        worked: share of the time in which it worked on a batch.
        waited: share in which it had none.
        blocked: share in which it had none, since the batches after it were not taken yet.
        seconds: median time of a batch in it.
    """

    name: str
    worked: float
    waited: float
    blocked: float
    seconds: float


def percentile(values: Iterable[float], part: float) -> float:
    """The value below which this part of the values lies; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(part * len(ordered)))] if ordered else 0.0


def percentiles(values: Iterable[float]) -> tuple[float, ...]:
    """The 50th, 90th and 99th percentile of the values that are not 0.0; empty of none."""
    known = sorted(each for each in values if each)
    return tuple(percentile(known, part) for part in (0.5, 0.9, 0.99)) if known else ()


def fetching(record: BatchRecord) -> Interval:
    """From the first fetch of a batch to its last sample."""
    return record.times.began, record.times.fetched


def working(record: BatchRecord) -> Interval:
    """The transforms and the collation of a batch."""
    return record.times.work_began, record.times.work_ended


def length(interval: Interval) -> float:
    """Seconds of an interval."""
    return max(0.0, interval[1] - interval[0])


def stage_shares(records: Sequence[BatchRecord], span: Interval) -> tuple[StageShare, ...]:
    """The shares of each stage in a span of time, given the batches that were delivered in it."""
    plan = [(record.planned, max(record.planned, record.times.admitted)) for record in records]
    passed = {
        "plan": plan,
        "fetch": [fetching(record) for record in records],
        "transform and collate": [working(record) for record in records],
        "hand-over": [(min(max(r.times.work_ended, r.times.assembled, r.called), r.taken), r.taken) for r in records],
        "delivery": [(record.refilled, record.returned) for record in records],
    }
    found = []
    for name, intervals in passed.items():
        known = [each for each in intervals if each[1]]
        if not known:
            continue
        worked = _covered(known, span)
        after = [(end, record.taken) for (_, end), record in zip(intervals, records, strict=True) if end]
        busy_or_blocked = _covered([*known, *after], span)
        blocked = busy_or_blocked - worked if name in ("fetch", "transform and collate") else 0.0
        waited = max(0.0, 1.0 - worked - blocked)
        found.append(StageShare(name, worked, waited, blocked, percentile(map(length, known), 0.5)))
    return tuple(found)


def _covered(intervals: Iterable[Interval], span: Interval) -> float:
    """The share of a span that is covered by intervals."""
    covered, at = 0.0, span[0]
    for begin, end in sorted(intervals):
        begin, end = max(begin, at), min(end, span[1])
        if end > begin:
            covered += end - begin
            at = end
    return covered / (span[1] - span[0])
