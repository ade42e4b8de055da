"""Figures of an iteration, computed from the records of its batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from headrace._records.batches import RequestCounts
from headrace.telemetry.counters import BatchRecord

# Steps in which `next()` may wait for a batch, in order.
WAITS = (
    "plan",
    "queue",
    "fetch",
    "worker queue",
    "work",
    "loop",
    "hand-over",
    "delivery",
)

SLOW = 3.0  # a slow fetch takes more than this many times the median
FIRST = 20  # number of first fetches; the second shortest had to wait for few others


def _percentile(values: Iterable[float], part: float) -> float:
    """Return a percentile of values, or 0.0 without values."""
    ordered = sorted(values)
    if ordered:
        return ordered[min(len(ordered) - 1, math.floor(part * len(ordered)))]
    return 0.0


@dataclass(frozen=True)
class Figures:
    """Figures of an iteration, without its first batch.

    The wait for the first batch is the start-up.

    Attributes:
        start_up: seconds of the first `next()`. 0.0 if more than 4,095 batches came later.
        batches: number of batches after the first, at most 4,095.
        samples: number of samples in `batches`.
        seconds: seconds from the first batch to the last.
        waited: seconds in `next()`.
        wait_share: share of the time that the consumer waited in `next()`, from 0 to 1.
        waits: seconds in `next()`, by the step of the awaited batch.
        in_call_seconds: mean seconds of `next()` not hidden by look-ahead: plans, delivery, and
            work inside `next()`.
        compute: mean seconds of the consumer between two calls of `next()`.
        fetch_seconds: the 50th, 90th and 99th percentile of the duration of a fetch, in seconds.
            Empty if unknown.
        in_flight: mean number of fetches in flight when a batch was complete.
        concurrency: number of allowed fetches, at the last batch.
        full: share of the batches completed while all allowed fetches were in flight and more
            waited.
        nbytes: approximate size of the fetched samples.
        workers_busy: mean number of batches transformed and collated at the same time.
        workers_cpu: CPU seconds of transforms and collation per second, of all workers together.
        workers_queued: seconds per second in which workers waited for a core, of all together.
        engine_cpu: CPU seconds of the engine's thread per second.
        engine_queued: seconds per second in which the engine's thread could have computed and had
            no core.
        blocked: share of the time in which user code blocked the event loop, including the first
            batch.
        blocked_in: the line of the last blocking call.
        requests: requests to stores, including the first batch.
    """

    start_up: float = 0.0
    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    wait_share: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    slow_waits: float = 0.0  # seconds of waiting for slow fetches, see `SLOW`
    in_call_seconds: float = 0.0
    compute: float = 0.0
    fetch_seconds: tuple[float, ...] = ()
    # The second shortest of the first twenty fetches, with few other fetches to wait for.
    first_fetch_seconds: float = 0.0
    quick_fetch_seconds: float = 0.0  # the 20th percentile of all fetches
    in_flight: float = 0.0
    concurrency: int = 0
    full: float = 0.0
    grown: float = 1.0  # factor of `concurrency` in the second half of the batches
    held: float = 0.0  # share of the batches completed while plans waited for memory
    nbytes: int = 0
    workers_busy: float = 0.0
    workers_cpu: float = 0.0
    workers_queued: float = 0.0
    # Mean number of concurrent calls of a stream's functions before batching.
    functions_busy: float = 0.0
    engine_cpu: float = 0.0
    engine_queued: float = 0.0
    consumer_cpu: float = 0.0  # CPU seconds of the consumer's thread per second
    blocked: float = 0.0
    blocked_in: str | None = None
    requests: RequestCounts = field(default_factory=RequestCounts)

    @property
    def period(self) -> float:
        """Mean seconds from a batch to the next batch."""
        return self.seconds / self.batches if self.batches else 0.0


def figures_of(records: Sequence[BatchRecord]) -> Figures:
    """Compute the figures of an iteration.

    `records` has at least one record, in the order of delivery.
    """
    first, rest = records[0], records[1:]
    start_up = first.returned - first.called
    seconds = rest[-1].returned - first.returned if rest else 0.0
    counted = (each.requests for each in records if each.requests is not None)
    requests = sum(counted, RequestCounts())
    if seconds <= 0:
        return Figures(start_up, requests=requests)
    times = [record.times for record in rest]
    loads = [each.load for each in times]
    parts = [waits_of(record) for record in rest]
    waited = sum(record.returned - record.called for record in rest)
    fetched = [each.fetched - each.began for each in times]
    slow = SLOW * _percentile([taken for taken in fetched if taken > 0], 0.5)
    timed = [
        record.times.fetch_seconds for record in records if record.times.fetch_seconds
    ]
    # The order of assembly may differ from the order of delivery.
    begin, *_, end = sorted((first.times, *times), key=lambda each: each.assembled)
    engine_seconds = max(1e-9, end.assembled - begin.assembled)
    worked = sum(each.work_ended - each.work_began for each in times)
    queued: dict[Any, list[float]] = {}  # of each thread that has waited for a core
    for each in times:
        if each.work_queued:
            queued.setdefault(each.worked_by, []).append(each.work_queued)
    in_call = [
        each.work_ended - each.work_began
        for each in times
        if each.work_began >= each.assembled
    ]
    delivering = [record.returned - record.taken for record in rest]
    blocked = end.blocked - first.times.blocked + min(start_up, first.times.blocked)
    return Figures(
        start_up,
        batches=len(rest),
        samples=sum(record.size for record in rest),
        seconds=seconds,
        waited=waited,
        wait_share=waited / seconds,
        waits={step: sum(waits[step] for waits in parts) for step in WAITS},
        slow_waits=sum(
            waits["queue"] + waits["fetch"]
            for waits, taken in zip(parts, fetched, strict=True)
            if taken > slow
        ),
        in_call_seconds=sum(delivering + in_call) / len(rest),
        compute=max(0.0, seconds - waited) / len(rest),
        fetch_seconds=tuple(
            _percentile(timed, part) for part in (0.5, 0.9, 0.99) if timed
        ),
        first_fetch_seconds=_percentile(timed[:FIRST], 0.05),
        quick_fetch_seconds=_percentile(timed, 0.2),
        in_flight=fmean(load.in_flight for load in loads),
        concurrency=loads[-1].limit,
        grown=loads[-1].limit / max(1, loads[len(loads) // 2].limit),
        full=fmean(load.in_flight >= load.limit and load.queued > 0 for load in loads),
        held=fmean(load.held_plans > 0 for load in loads),
        nbytes=sum(each.nbytes for each in times),
        workers_busy=worked / seconds,
        workers_cpu=sum(each.work_cpu for each in times) / seconds,
        workers_queued=sum(max(each) - min(each) for each in queued.values()) / seconds,
        functions_busy=(end.functions_seconds - begin.functions_seconds) / engine_seconds,
        engine_cpu=(end.engine_cpu - begin.engine_cpu) / engine_seconds,
        engine_queued=(end.engine_queued - begin.engine_queued) / engine_seconds,
        consumer_cpu=(rest[-1].cpu - first.cpu) / seconds,
        blocked=blocked / (start_up + seconds),
        blocked_in=end.blocked_in,
        requests=requests,
    )


def steps_of(record: BatchRecord) -> list[tuple[str, float]]:
    """Return the stages of a batch before `next()`.

    Each step has its end time, or 0.0 if the batch skipped the step.
    """
    times = record.times
    fetching = [
        ("plan", times.admitted),
        ("queue", times.began),
        ("fetch", times.fetched),
    ]
    work, assembled = ("work", times.work_ended), ("loop", times.assembled)
    if times.work_began > times.assembled:  # work on the consumer's thread
        return [*fetching, assembled, ("hand-over", times.work_began), work]
    working = [("worker queue", times.work_began), work, assembled]
    return [*fetching, *working, ("hand-over", record.taken)]


def waits_of(record: BatchRecord) -> dict[str, float]:
    """Return the seconds of a call of `next()`, by step.

    The steps are `WAITS`: the step of the batch while `next()` waited.
    """
    seconds = dict.fromkeys(WAITS, 0.0)
    at = record.called
    last = ("plan", record.refilled), ("delivery", record.returned)
    for step, until in (("plan", record.planned), *steps_of(record), *last):
        if until > at:
            seconds[step] += until - at
            at = until
    return seconds
