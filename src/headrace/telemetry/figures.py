"""Figures of an iteration, computed from the records of its batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace._core.batches import RequestCounts
from headrace.telemetry.counters import BatchRecord

__all__ = ["WAITS", "Figures", "StageShare", "figures_of", "steps_of", "waits_of"]

# The steps in which `next()` may wait for its batch, in their order.
WAITS = ("plan", "queue", "fetch", "worker queue", "work", "loop", "hand-over", "delivery")

SLOW = 3.0  # times the median, from which on a fetch is a slow one
SPREAD = 1.5  # of the number in flight, from which on its effect on durations is known
PAIRS = 20  # of them at least

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StageShare:
    """How a stage of the pipeline spent the time."""

    name: str  # of the stage
    worked: float  # share of the time in which it worked on a batch
    waited: float  # share in which it had none
    blocked: float  # share in which it had none, since the batches after it were not taken yet
    seconds: float  # median time of a batch in it


def _percentile(values: Iterable[float], part: float) -> float:
    """The value below which this part of the values lies; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(part * len(ordered)))] if ordered else 0.0


def _percentiles(values: Iterable[float]) -> tuple[float, ...]:
    """The 50th, 90th and 99th percentile of the values that are not 0.0; empty of none."""
    known = sorted(each for each in values if each)
    return tuple(_percentile(known, part) for part in (0.5, 0.9, 0.99)) if known else ()


def _fetching(record: BatchRecord) -> Interval:
    return record.times.began, record.times.fetched


def _working(record: BatchRecord) -> Interval:
    return record.times.work_began, record.times.work_ended


def _length(interval: Interval) -> float:
    return max(0.0, interval[1] - interval[0])


def _stage_shares(records: Sequence[BatchRecord], span: Interval) -> tuple[StageShare, ...]:
    passed = {
        "plan": [(record.planned, max(record.planned, record.times.admitted)) for record in records],
        "fetch": [_fetching(record) for record in records],
        "transform and collate": [_working(record) for record in records],
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
        found.append(StageShare(name, worked, waited, blocked, _percentile(map(_length, known), 0.5)))
    return tuple(found)


def _covered(intervals: Iterable[Interval], span: Interval) -> float:
    covered, at = 0.0, span[0]
    for begin, end in sorted(intervals):
        begin, end = max(begin, at), min(end, span[1])
        if end > begin:
            covered += end - begin
            at = end
    return covered / (span[1] - span[0])


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the batches after the first one, whose wait is the start-up.

    Attributes:
        start_up: seconds of the first `next()`; 0.0 if more than 4,095 batches came after it.
        batches: number of batches after the first, at most 4,095.
        samples: in them.
        seconds: from the first batch to the last.
        waited: seconds in `next()`.
        wait_share: share of the time in which the consumer waited there, from 0 to 1.
        waits: those seconds, by the step that the awaited batch was in.
        in_call_seconds: mean seconds of `next()` that no look-ahead hides: plans, delivery, and work inside it.
        compute: mean seconds of the consumer between two calls of `next()`.
        fetch_seconds: the 50th, 90th and 99th percentile of the duration of one fetch; empty if unknown.
        crowding: by how much the logarithm of a fetch's duration grows with that of the number in flight: 0.0 where
            fetches do not wait for each other, 1.0 where they share a link; None if that number has not changed.
        in_flight: mean number of fetches in flight, when a batch was complete.
        concurrency: how many were allowed, at the last batch.
        full: share of the batches at whose completion as many fetches were in flight as allowed, and more waited.
        nbytes: approximate size of the samples fetched.
        workers_busy: mean number of batches that are transformed and collated at the same time.
        workers_cpu: CPU seconds per second of these, of all workers together.
        engine_cpu: CPU seconds of the engine's thread per second.
        engine_queued: seconds per second in which that thread could have computed and had no core.
        blocked: seconds for which user code blocked the event loop, per second.
        blocked_in: the line that blocked it longest.
        requests: to stores, those before the first batch included.
        worker_deaths: workers that died.
        skipped: samples that were skipped.
        stages: how each stage spent the time.
    """

    start_up: float
    start_blocked: float = 0.0  # seconds of them for which user code blocked the event loop
    first_fetch: float = 0.0  # seconds of them after the first fetch had begun, or the first batch had been read
    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    wait_share: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    slow_waits: float = 0.0  # share of the waiting for fetch that was for batches which took three times the median
    in_call_seconds: float = 0.0
    batch_seconds: float = 0.0  # mean seconds from planning a batch to its end in the engine
    compute: float = 0.0
    fetch_seconds: tuple[float, ...] = ()
    first_fetch_seconds: float = 0.0  # the second shortest of the first twenty, which few others kept waiting
    quick_fetch_seconds: float = 0.0  # the 20th percentile of all
    crowding: float | None = None
    in_flight: float = 0.0
    concurrency: int = 0
    full: float = 0.0
    grown: float = 1.0  # factor of `concurrency` in the second half of the batches
    held: float = 0.0  # share of the batches at whose completion plans waited for memory
    nbytes: int = 0
    work_seconds: float = 0.0  # mean seconds of transforms and collation of a batch
    workers_busy: float = 0.0
    workers_cpu: float = 0.0
    steps_busy: float = 0.0  # mean number of calls of a stream's functions before batching at the same time
    engine_cpu: float = 0.0
    engine_seconds: float = 0.0  # CPU seconds of that thread for a batch
    engine_queued: float = 0.0
    consumer_cpu: float = 0.0  # CPU seconds of the consumer's thread per second
    blocked: float = 0.0
    blocked_in: str | None = None
    in_call: bool = False  # whether transforms and collation ran inside `next()`
    requests: RequestCounts = field(default_factory=RequestCounts)
    worker_deaths: int = 0
    skipped: int = 0
    stages: tuple[StageShare, ...] = ()

    @property
    def period(self) -> float:
        """Mean seconds from one batch to the next."""
        return self.seconds / self.batches if self.batches else 0.0


def figures_of(records: Sequence[BatchRecord]) -> Figures:
    """The figures of one iteration's records, in the order of delivery; at least one."""
    first, rest = records[0], records[1:]
    start_up = first.returned - first.called
    start_blocked = min(start_up, first.times.blocked - first.times.blocked_before)
    started = first.times.began if first.times.began > first.times.admitted else first.times.fetched
    first_fetch = min(start_up, max(0.0, first.returned - started)) if started else 0.0
    seconds = rest[-1].returned - first.returned if rest else 0.0
    of_all: dict[str, Any] = {
        "start_up": start_up,
        "start_blocked": start_blocked,
        "first_fetch": first_fetch,
        "requests": sum((each.requests for each in records if each.requests is not None), RequestCounts()),
        "worker_deaths": sum(record.times.worker_deaths for record in records),
        "skipped": sum(record.skipped for record in records),
    }
    if seconds <= 0:
        return Figures(**of_all, blocked_in=first.times.blocked_in)
    waits = dict.fromkeys(WAITS, 0.0)
    by_batch = []  # the waiting for the fetch of each, and its duration
    for record in rest:
        parts = waits_of(record)
        for step, wait in parts.items():
            waits[step] += wait
        by_batch.append((parts["queue"] + parts["fetch"], _length(_fetching(record))))
    waited = sum(record.returned - record.called for record in rest)
    typical = _percentile([taken for _, taken in by_batch if taken], 0.5)
    slow = sum(wait for wait, taken in by_batch if taken > SLOW * typical)
    timed = [record.times.fetch_seconds for record in records if record.times.fetch_seconds]
    loads = [record.times.load for record in rest]
    ends = sorted((record.times for record in records), key=lambda times: times.assembled)  # may come in another order
    begin, end = ends[0], ends[-1]
    engine_seconds = max(1e-9, end.assembled - begin.assembled)
    worked = sum(_length(_working(record)) for record in rest)
    in_call = _share(r.times.work_began >= r.times.assembled for r in rest if r.times.work_began) > 0.5
    delivering = sum(record.returned - record.taken for record in rest)
    return Figures(
        **of_all,
        batches=len(rest),
        samples=sum(record.size for record in rest),
        seconds=seconds,
        waited=waited,
        wait_share=waited / seconds,
        waits=waits,
        slow_waits=slow / max(1e-9, waits["queue"] + waits["fetch"]),
        in_call_seconds=(delivering + worked * in_call) / len(rest),
        batch_seconds=sum(_length((record.planned, record.times.assembled)) for record in rest) / len(rest),
        compute=max(0.0, seconds - waited) / len(rest),
        fetch_seconds=_percentiles(timed),
        first_fetch_seconds=_percentile(timed[:PAIRS], 0.05),
        quick_fetch_seconds=_percentile(timed, 0.2),
        crowding=_crowding(rest),
        in_flight=sum(load.in_flight for load in loads) / len(loads),
        concurrency=loads[-1].limit,
        grown=loads[-1].limit / max(1, loads[len(loads) // 2].limit),
        full=_share(load.limit and load.in_flight >= load.limit and load.queued for load in loads),
        held=_share(load.held_plans for load in loads),
        nbytes=sum(record.times.nbytes for record in rest),
        work_seconds=worked / len(rest),
        workers_busy=worked / seconds,
        workers_cpu=sum(record.times.work_cpu for record in rest) / seconds,
        steps_busy=(end.steps_seconds - begin.steps_seconds) / engine_seconds,
        engine_cpu=(end.engine_cpu - begin.engine_cpu) / engine_seconds,
        engine_seconds=(end.engine_cpu - begin.engine_cpu) / len(rest),
        engine_queued=(end.engine_queued - begin.engine_queued) / engine_seconds,
        consumer_cpu=(rest[-1].cpu - first.cpu) / seconds,
        blocked=(end.blocked - begin.blocked) / engine_seconds,
        blocked_in=end.blocked_in,
        in_call=in_call,
        stages=_stage_shares(rest, (first.returned, rest[-1].returned)),
    )


def _crowding(records: Sequence[BatchRecord]) -> float | None:
    """The slope of a line through the logarithms of the number in flight and of a fetch's duration.

    Only of full windows, whose number the adaptive limit has changed: at the end of an epoch it falls by itself.
    """
    pairs = [
        (math.log(record.times.load.in_flight), math.log(record.times.fetch_seconds))
        for record in records
        if record.times.fetch_seconds and record.times.load.in_flight and record.times.load.queued
    ]
    numbers = [number for number, _ in pairs]
    if len(pairs) < PAIRS or _percentile(numbers, 0.9) - _percentile(numbers, 0.1) < math.log(SPREAD):
        return None
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope


def _share(conditions: Iterable[object]) -> float:
    values = [bool(each) for each in conditions]
    return sum(values) / len(values) if values else 0.0


def steps_of(record: BatchRecord) -> list[tuple[str, float]]:
    """The steps by which a batch came to `next()`, each with its end; 0.0 for one that it did not pass."""
    times = record.times
    steps = [
        ("plan", times.admitted),
        ("queue", times.began),
        ("fetch", times.fetched),
        ("worker queue", times.work_began),
        ("work", times.work_ended),
        ("loop", times.assembled),
        ("hand-over", record.taken),
    ]
    if times.work_began > times.assembled:  # on the consumer's thread, after the engine is done with the batch
        steps[3:6] = [("loop", times.assembled), ("hand-over", times.work_began), ("work", times.work_ended)]
    return steps


def waits_of(record: BatchRecord) -> dict[str, float]:
    """The seconds of the call of `next()`, by the step that its batch was in, one of `WAITS`."""
    seconds = dict.fromkeys(WAITS, 0.0)
    at = record.called
    last = ("plan", record.refilled), ("delivery", record.returned)
    for step, until in (("plan", record.planned), *steps_of(record), *last):
        if until > at:
            seconds[step] += until - at
            at = until
    return seconds
