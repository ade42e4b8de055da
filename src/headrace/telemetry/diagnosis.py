"""What limits a loader, from the figures of an iteration, and the change that helps."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from headrace.telemetry.figures import Figures
from headrace.telemetry.formatting import rate, seconds, share

__all__ = ["Diagnosis", "Limit", "Setup", "diagnose", "usable_cores"]

Limit = Literal[
    "consumer",
    "latency",
    "throttling",
    "bandwidth",
    "event-loop",
    "blocked-loop",
    "workers",
    "order",
    "transport",
    "copy",
    "start-up",
    "memory-budget",
    "look-ahead",
    "held-batches",
]

# Below these, waiting is not worth a change: the share of the time, and the mean time of `next()` in seconds.
FEW_WAITS = 0.05
FAST_NEXT = 50e-6
THROTTLED = 0.01  # of the requests, above which the store is the limit
BUSY_LOOP = 0.85  # CPU seconds of the engine's thread per second, above which it is the limit
BLOCKED_LOOP = 0.1  # of the time
QUEUEING = 3.0  # times the fastest fetches: the median, where more in flight only wait longer
HEADROOM = 1.2  # of a change beyond what is needed
BATCHES_AT_LEAST = 10  # for a diagnosis
LONG_START = 0.5  # of the time


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments of a loader that decide on its speed.

    Attributes:
        concurrency: the argument.
        num_workers: the argument.
        look_ahead: batches that may be planned and not delivered.
        batch_size: samples in a batch, if known.
        in_order: the argument.
        memory_budget: the argument.
        placement: ``"thread"``, ``"process"`` or ``"inline"``.
        stream: whether the dataset is a stream.
        is_async: whether the dataset is an async one.
        cores: CPUs that this process may use.
        most_concurrency: fetches that the descriptors allow.
    """

    concurrency: int | str
    num_workers: int
    look_ahead: int
    batch_size: int | None
    in_order: bool
    memory_budget: int | None
    placement: str
    stream: bool
    is_async: bool
    cores: int
    most_concurrency: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What limits a loader.

    Attributes:
        limit: the name of the limit.
        evidence: what shows it, with numbers.
        advice: the one change to make; empty if there is none.
        predicted: the share of the time that the loop would wait after that change; None if it cannot be said.
    """

    limit: Limit
    evidence: str
    advice: str = ""
    predicted: float | None = None


def diagnose(figures: Figures, setup: Setup) -> Diagnosis:
    """The diagnosis of an iteration."""
    if figures.batches < BATCHES_AT_LEAST:
        return Diagnosis(
            "start-up",
            f"only {figures.batches} batches were delivered after the first, which took {seconds(figures.start_up)}",
            "read more batches before asking for a report",
        )
    if figures.start_up > max(figures.waited, LONG_START * (figures.start_up + figures.seconds)):
        return _blocked(figures) if figures.start_blocked > figures.start_up / 2 else _start_up(figures)
    if figures.wait_share < FEW_WAITS or figures.waited / figures.batches < FAST_NEXT:
        return Diagnosis(
            "consumer",
            f"next() takes {seconds(figures.waited / figures.batches)}, and the loop itself "
            f"{seconds(figures.compute)} for each batch",
            predicted=figures.wait_share,
        )
    step = max(figures.waits, key=figures.waits.__getitem__)
    if step in ("queue", "fetch"):
        return _fetching(figures, setup)
    if step in ("worker queue", "work"):
        return _working(figures, setup)
    if step == "plan":
        return Diagnosis(
            "look-ahead",
            f"{share(figures.waits[step] / figures.waited)} of the waiting is for the sampler, which runs in next()",
            "make the sampler faster, or draw its indices before the epoch",
            0.0 if figures.wait_share < 0.5 else None,
        )
    if step == "delivery":
        return Diagnosis(
            "copy",
            f"{share(figures.waits[step] / figures.waited)} of the waiting is inside next(), after the batch has "
            f"arrived: unpickling, pinning, or copying it",
            "use device=, which copies the next batches while the loop computes, and return few large tensors",
        )
    return Diagnosis(
        "transport",
        f"{share(figures.waits[step] / figures.waited)} of the waiting is for batches that are assembled, on their way "
        f"from {_from(setup)}",
        "return fewer and larger tensors from collate_fn, or move less: decode later, use smaller dtypes",
    )


def _from(setup: Setup) -> str:
    if setup.placement == "process":
        return "the loader's process"
    return "the workers" if setup.num_workers else "the engine's thread"


def _start_up(figures: Figures) -> Diagnosis:
    total = figures.start_up + figures.seconds
    return Diagnosis(
        "start-up",
        f"the first batch took {seconds(figures.start_up)} of {seconds(total)}; later ones "
        f"{seconds(figures.waited / max(1, figures.batches))} in next()",
        "keep the loader for several epochs (its engine and workers stay), or call iter() before the model is built",
        figures.waited / total,
    )


def _fetching(figures: Figures, setup: Setup) -> Diagnosis:
    if figures.blocked > BLOCKED_LOOP:
        return _blocked(figures)
    requests = figures.requests
    if requests.throttled > THROTTLED * requests.requests:
        return Diagnosis(
            "throttling",
            f"the store refused {share(requests.throttled / max(1, requests.requests))} of the requests (429 or "
            f"503), at {rate(figures.samples / figures.seconds)} samples/s",
            "make fewer requests: .cache(folder), shards in place of objects, or several prefixes of the bucket",
            None,
        )
    if figures.engine_cpu > BUSY_LOOP:
        return _busy_loop(figures, setup)
    if setup.stream:
        return _stream(figures, setup)
    if figures.held > 0.5 and figures.full < 0.5:
        needed = _factor(figures)
        return Diagnosis(
            "memory-budget",
            f"plans waited for memory at {share(figures.held)} of the batches, with {figures.in_flight:.0f} of "
            f"{figures.limit} fetches in flight",
            f"memory_budget={_budget(setup.memory_budget, needed)}",
            _after(figures, needed),
        )
    if figures.full > 0.5:
        return _full(figures, setup)
    if figures.slow_waits > 0.5:
        return _slow_samples(figures, setup)
    needed = _factor(figures)
    factor = math.ceil(needed * setup.look_ahead / max(1, setup.num_workers))
    return Diagnosis(
        "look-ahead",
        f"{figures.in_flight:.0f} of {figures.limit} fetches are in flight: the {setup.look_ahead} batches that may be "
        f"planned ahead are not enough to keep more",
        f"prefetch_factor={factor}",
        _after(figures, needed),
    )


def _blocked(figures: Figures) -> Diagnosis:
    place = f" in {figures.blocked_in}" if figures.blocked_in else ""
    total = figures.start_up + figures.seconds
    blocked = (figures.start_blocked + figures.blocked * figures.seconds) / total
    return Diagnosis(
        "blocked-loop",
        f"for {share(blocked)} of the time a blocking call{place} stops all fetches",
        "call it with anyio.to_thread.run_sync, use an async client, or do CPU work in transform=",
        _after(figures, 1 / max(1e-9, 1 - figures.blocked)),
    )


def _full(figures: Figures, setup: Setup) -> Diagnosis:
    median = figures.fetch_seconds[0] if figures.fetch_seconds else 0.0
    speed = figures.nbytes / figures.seconds
    if figures.fastest_fetch and median > QUEUEING * figures.fastest_fetch:
        return Diagnosis(
            "bandwidth",
            f"{figures.limit} fetches in flight take {seconds(median)} each, the fastest "
            f"{seconds(figures.fastest_fetch)}: they wait for each other, at {speed / 1e6:.3g} MB/s",
            "move fewer bytes: .cache(folder) for later epochs, or smaller samples; more requests do not help",
            None,
        )
    needed = _factor(figures)
    wanted = min(setup.most_concurrency, _round_up(figures.limit * needed))
    evidence = (
        f"{figures.limit} in flight ÷ {seconds(median)} = {rate(figures.limit / median) if median else '?'} samples/s, "
        f"and the window was full {share(figures.full)} of the time"
    )
    return Diagnosis("latency", evidence, f"concurrency={wanted}", _after(figures, wanted / figures.limit))


def _slow_samples(figures: Figures, setup: Setup) -> Diagnosis:
    evidence = (
        f"{share(figures.slow_waits)} of the waiting is for batches with a sample that takes more than three times the "
        f"usual time, while later batches are complete"
    )
    if setup.in_order:
        # By Little's law, with the look-ahead full of batches in any state.
        period = figures.batch_seconds / setup.look_ahead
        change = 'in_order=False, or hedge="auto" if a second request is faster'
        return Diagnosis("order", evidence, change, _share_after(period, figures.compute))
    return Diagnosis("order", evidence, 'hedge="auto", which requests slow samples a second time')


def _stream(figures: Figures, setup: Setup) -> Diagnosis:
    return Diagnosis(
        "latency",
        f"the stream gives {rate(figures.samples / figures.seconds)} samples/s, with the event loop "
        f"{share(figures.engine_cpu)} busy: it waits for its source",
        "read more at once: shards_in_parallel= or requests_per_shard= of the dataset",
        None,
    )


def _busy_loop(figures: Figures, setup: Setup) -> Diagnosis:
    evidence = f"the event loop's thread computes {share(figures.engine_cpu)} of the time, at " + (
        f"{rate(figures.samples / figures.seconds)} samples/s"
    )
    if setup.placement == "thread" and setup.cores > 1:
        return Diagnosis(
            "event-loop", evidence, 'placement="process", so that it does not share the trainer\'s GIL', None
        )
    return Diagnosis(
        "event-loop", evidence, "less Python for each sample: agets, ranges that are read together, or shards", None
    )


def _working(figures: Figures, setup: Setup) -> Diagnosis:
    workers = setup.num_workers
    if figures.in_call or not workers:
        needed = max(1, math.ceil(figures.work_seconds / max(1e-9, figures.compute) * HEADROOM))
        wanted = max(1, min(needed, setup.cores))
        return Diagnosis(
            "workers",
            f"transforms and collation take {seconds(figures.work_seconds)} of each next(), in the loop's own thread",
            f"num_workers={wanted}",
            _share_after(figures.work_seconds / wanted, figures.compute),
        )
    if figures.workers_busy < 0.7 * workers:
        if figures.slow_waits > 0.5 or setup.look_ahead > 2 * workers:
            return Diagnosis(
                "order",
                f"{figures.workers_busy:.1f} of {workers} workers are busy: the others wait for a slow batch",
                "in_order=False",
                _after(figures, workers / max(0.1, figures.workers_busy)),
            )
        return Diagnosis(
            "look-ahead",
            f"{figures.workers_busy:.1f} of {workers} workers are busy, with {setup.look_ahead} batches ahead",
            f"prefetch_factor={2 * math.ceil(setup.look_ahead / workers)}",
            _after(figures, workers / max(0.1, figures.workers_busy)),
        )
    wanted = math.ceil(workers * _factor(figures))
    evidence = (
        f"{figures.workers_busy:.1f} of {workers} workers are busy, {seconds(figures.work_seconds)} for a batch, and "
        f"fetched batches wait for them"
    )
    if wanted > setup.cores:
        return Diagnosis(
            "workers",
            f"{evidence}; this machine grants {setup.cores} cores",
            f"num_workers={setup.cores}, and less work for each sample"
            if setup.cores > workers
            else "less work for each "
            "sample: decode smaller images, transform on the accelerator, or store decoded samples",
            _after(figures, setup.cores / workers) if setup.cores > workers else None,
        )
    return Diagnosis("workers", evidence, f"num_workers={wanted}", _after(figures, wanted / workers))


def _factor(figures: Figures) -> float:
    """By how much faster the pipeline has to be so that the loop does not wait; at most 16."""
    return min(16.0, HEADROOM * figures.period / max(figures.compute, figures.period / 100))


def _after(figures: Figures, factor: float) -> float:
    """The wait share if the pipeline were faster by a factor."""
    return _share_after(figures.period / factor, figures.compute)


def _share_after(period: float, compute: float) -> float:
    return max(0.0, period - compute) / max(period, compute) if period else 0.0


def _round_up(value: float) -> int:
    """To a power of two, or one and a half times one."""
    power = 2 ** math.ceil(math.log2(max(1.0, value)))
    return int(0.75 * power) if power >= 4 and value <= 0.75 * power else power


def _budget(budget: int | None, factor: float) -> str:
    return f"{math.ceil((budget or 0) * factor / 2**20)} * 2**20"


def usable_cores() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
