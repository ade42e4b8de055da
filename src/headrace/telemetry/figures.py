"""Figures of an iteration, computed from the records of its batches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace._core.batches import RequestCounts
from headrace.telemetry.batch_log import BatchRecord

__all__ = ["WAITS", "Figures", "Interval", "StageShare", "figures_of", "percentile", "waits_of"]

# The steps in which `next()` may wait for its batch, in their order.
WAITS = ("plan", "queue", "fetch", "worker queue", "work", "hand-over", "delivery")

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


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the batches after the first one, whose wait is the start-up.

    Attributes:
        start_up: seconds of the first `next()`.
        start_blocked: seconds of them for which user code blocked the event loop, in the loader's first iteration.
        batches: number of batches, without the first.
        samples: in them.
        seconds: from the first batch to the last.
        waited: seconds in `next()`.
        waits: those seconds, by the step that the awaited batch was in.
        slow_waits: share of the waiting for fetch that was for batches which took three times the median.
        batch_seconds: mean seconds from planning a batch to its end in the engine.
        compute: mean seconds of the consumer between two calls of `next()`.
        fetch_seconds: the 50th, 90th and 99th percentile of the duration of one fetch; empty if unknown.
        fastest_fetch: the 2nd percentile.
        in_flight: mean number of fetches in flight, when a batch was complete.
        limit: how many were allowed, at the last batch.
        full: share of the batches at whose completion as many fetches were in flight as allowed, and more waited.
        held: share of the batches at whose completion plans waited for memory.
        nbytes: of the samples fetched.
        work_seconds: median seconds of transforms and collation of a batch.
        workers_busy: mean number of batches in work at the same time.
        engine_cpu: CPU seconds of the engine's thread per second.
        blocked: seconds for which user code blocked the event loop, per second.
        blocked_in: the line that blocked it longest.
        in_call: whether transforms and collation ran inside `next()`.
        requests: to stores, summed.
        stages: shares of the stages.
    """

    start_up: float
    start_blocked: float = 0.0
    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    slow_waits: float = 0.0
    batch_seconds: float = 0.0
    compute: float = 0.0
    fetch_seconds: tuple[float, ...] = ()
    fastest_fetch: float = 0.0
    in_flight: float = 0.0
    limit: int = 0
    full: float = 0.0
    held: float = 0.0
    nbytes: int = 0
    work_seconds: float = 0.0
    workers_busy: float = 0.0
    engine_cpu: float = 0.0
    blocked: float = 0.0
    blocked_in: str | None = None
    in_call: bool = False
    requests: RequestCounts = field(default_factory=RequestCounts)
    stages: tuple[StageShare, ...] = ()

    @property
    def wait_share(self) -> float:
        """The part of the time in which the consumer waited in `next()`, from 0 to 1."""
        return self.waited / self.seconds if self.seconds else 0.0

    @property
    def period(self) -> float:
        """Mean seconds from one batch to the next."""
        return self.seconds / self.batches if self.batches else 0.0


def figures_of(records: Sequence[BatchRecord]) -> Figures:
    """The figures of one iteration's records, in the order of delivery; at least one."""
    first, rest = records[0], records[1:]
    start_up = first.returned - first.called
    start_blocked = min(start_up, first.times.blocked) if first.iteration == 1 else 0.0
    seconds = rest[-1].returned - first.returned if rest else 0.0
    if not rest or seconds <= 0:
        return Figures(start_up, start_blocked, blocked_in=first.times.blocked_in)
    waits: dict[str, float] = defaultdict(float)
    by_batch = []  # the waiting for the fetch of each, and its duration
    for record in rest:
        parts = dict(waits_of(record))
        for step, wait in parts.items():
            waits[step] += wait
        by_batch.append((parts.get("queue", 0.0) + parts.get("fetch", 0.0), _length(_fetching(record))))
    waited = sum(record.returned - record.called for record in rest)
    typical = percentile([length for _, length in by_batch if length], 0.5)
    in_fetch = sum(wait for wait, _ in by_batch)
    slow = sum(wait for wait, length in by_batch if length > 3 * typical)
    timed = sorted(record.times.fetch_seconds for record in rest if record.times.fetch_seconds)
    loads = [record.times.load for record in rest]
    begin, end = rest[0].times, rest[-1].times
    engine_seconds = end.assembled - begin.assembled
    work = [_working(record) for record in rest]
    requests = RequestCounts()
    for record in rest:
        if record.requests is not None:
            requests += record.requests
    return Figures(
        start_up=start_up,
        start_blocked=start_blocked,
        batches=len(rest),
        samples=sum(record.size for record in rest),
        seconds=seconds,
        waited=waited,
        waits=dict(waits),
        slow_waits=slow / in_fetch if in_fetch else 0.0,
        batch_seconds=sum(_length((record.planned, record.times.assembled)) for record in rest) / len(rest),
        compute=max(0.0, seconds - waited) / len(rest),
        fetch_seconds=tuple(percentile(timed, part) for part in (0.5, 0.9, 0.99)) if timed else (),
        fastest_fetch=percentile(timed, 0.02),
        in_flight=sum(load.in_flight for load in loads) / len(loads),
        limit=loads[-1].limit,
        full=_share(load.limit and load.in_flight >= load.limit and load.queued for load in loads),
        held=_share(load.held_plans for load in loads),
        nbytes=sum(record.times.nbytes for record in rest),
        work_seconds=percentile([_length(each) for each in work], 0.5),
        workers_busy=sum(map(_length, work)) / seconds,
        engine_cpu=(end.engine_cpu - begin.engine_cpu) / engine_seconds if engine_seconds > 0 else 0.0,
        blocked=(end.blocked - begin.blocked) / engine_seconds if engine_seconds > 0 else 0.0,
        blocked_in=end.blocked_in,
        in_call=_share(record.times.work_began >= record.called for record in rest if record.times.work_began) > 0.5,
        requests=requests,
        stages=_stages(rest, (first.returned, rest[-1].returned)),
    )


def percentile(values: Iterable[float], part: float) -> float:
    """The value below which this part of the values lies; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(part * len(ordered)))] if ordered else 0.0


def _share(conditions: Iterable[object]) -> float:
    values = [bool(each) for each in conditions]
    return sum(values) / len(values) if values else 0.0


def waits_of(record: BatchRecord) -> Iterator[tuple[str, float]]:
    """The seconds of the call of `next()`, by the step that its batch was in."""
    times = record.times
    points = [
        ("plan", record.planned),
        ("plan", times.admitted),
        ("queue", times.began),
        ("fetch", times.fetched),
        ("worker queue", times.work_began),
        ("work", times.work_ended),
        ("hand-over", times.assembled),
        ("hand-over", record.taken),
        ("plan", record.refilled),
        ("delivery", record.returned),
    ]
    if times.work_began > times.assembled:  # on the consumer's thread, after the engine is done with the batch
        points[4:7] = [("hand-over", times.assembled), ("hand-over", times.work_began), ("work", times.work_ended)]
    seconds: dict[str, float] = defaultdict(float)
    at = record.called
    for step, until in points:
        if until > at:
            seconds[step] += until - at
            at = until
    yield from seconds.items()


def _fetching(record: BatchRecord) -> Interval:
    return record.times.began, record.times.fetched


def _working(record: BatchRecord) -> Interval:
    return record.times.work_began, record.times.work_ended


def _length(interval: Interval) -> float:
    return max(0.0, interval[1] - interval[0])


def _stages(records: Sequence[BatchRecord], span: Interval) -> tuple[StageShare, ...]:
    plan = [(record.planned, max(record.planned, record.times.admitted)) for record in records]
    passed = {
        "plan": plan,
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
        found.append(StageShare(name, worked, waited, blocked, percentile(map(_length, known), 0.5)))
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
