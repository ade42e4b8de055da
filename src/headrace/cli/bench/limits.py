"""What bounds the rate that was found, and the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.cli.bench.trials import Trial
from headrace.telemetry.formatting import share

__all__ = ["Bound", "BoundName", "Ceiling", "bound_of"]

BoundName = Literal["throttling", "in-flight", "cpu", "bandwidth", "requests", "unknown"]

THROTTLED = 0.02  # share of throttled requests at which throttling is the limit
GROWTH = 1.2  # by the last doubling, from which more fetches in flight would give more
LOOP_BUSY = 0.85  # CPU seconds a second of the event loop's thread
CORES_BUSY = 0.85  # of the cores
STARVED = 0.75  # of the cores: seconds a second that threads of this process wait for one
BY_BYTES, BY_REQUESTS = 1.5, 1.2  # times as many reads of half the bytes; 2 behind a full link, 1 behind a rate limit


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Why no more fetches in flight were tried.

    Attributes:
        most: fetches in flight.
        why: what would allow more, in words.
    """

    most: int
    why: str


@dataclass(frozen=True, slots=True)
class Bound:
    """What bounds the rate.

    Attributes:
        name: ``"throttling"``, ``"in-flight"``, ``"cpu"``, ``"bandwidth"``, ``"requests"`` or ``"unknown"``.
        evidence: the numbers that show it.
        advice: what would raise the rate.
    """

    name: BoundName
    evidence: str
    advice: str


def bound_of(best: Trial, trials: Sequence[Trial], halves: Trial | None, ceiling: Ceiling, cores: float) -> Bound:
    """What bounds the rate of the best setting.

    Args:
        best: a trial of it, of median rate.
        trials: all trials.
        halves: a trial of it that read half of each read's bytes; None if there was no time for it.
        ceiling: the highest number of fetches in flight that could be tried.
        cores: cores that this process may use.
    """
    tried = [trial for trial in trials if not trial.failed]
    throttled = max(
        (trial for trial in tried if trial.concurrency >= best.concurrency), key=lambda trial: trial.throttled_share
    )
    if throttled.throttled_share >= THROTTLED:
        return Bound(
            "throttling",
            f"at {throttled.concurrency:,} in flight the store throttled {share(throttled.throttled_share)} of the "
            "requests (HTTP 429 or 503), or did not answer them in time",
            "fewer, larger objects (shards), keys under several prefixes, or hr.ObjectDataset(...).cache(folder) for "
            "later epochs",
        )
    if _is_cpu_bound(best, cores):
        return _cpu(best, cores)
    lower = max((trial.rate for trial in tried if trial.concurrency <= best.concurrency / 1.9), default=0.0)
    if best.concurrency > ceiling.most / 1.5 and best.rate >= GROWTH * lower:
        return Bound(
            "in-flight",
            f"the rate still grew at {best.concurrency:,} fetches in flight, and no more could be tried",
            ceiling.why,
        )
    if halves is None or halves.failed or not best.rate:
        return Bound("unknown", "there was no time for the trial that would show it", "a larger --seconds")
    ratio = halves.rate / best.rate
    evidence = f"reading half of the bytes of each gave {ratio:.2f} times as many reads"
    if ratio >= BY_BYTES:
        return Bound(
            "bandwidth",
            f"{best.bandwidth / 1e6:,.3g} MB/s are what the store or the network gives: {evidence}",
            "fewer bytes (compression, smaller samples), hr.ObjectDataset(...).cache(folder) for later epochs, or a "
            "machine with a faster network, if the store gives more",
        )
    if ratio < BY_BYTES and _is_cpu_bound(halves, cores):
        return Bound(
            "unknown",
            f"{evidence}, but this machine was busy: {halves.starved:.1f} threads at a time waited for a core",
            "another run while fewer programs run here",
        )
    if ratio <= BY_REQUESTS:
        return Bound(
            "requests",
            f"{best.rate:,.0f} requests/s are what the store serves, without refusing any: {evidence}",
            "fewer, larger objects (shards)",
        )
    return Bound(
        "unknown",
        f"{evidence}: neither bytes nor requests alone are the limit",
        "fewer, larger objects (shards), and fewer bytes",
    )


def _is_cpu_bound(trial: Trial, cores: float) -> bool:
    return trial.loop >= LOOP_BUSY or trial.cores >= CORES_BUSY * cores or trial.starved >= STARVED * cores


def _cpu(best: Trial, cores: float) -> Bound:
    evidence = f"headrace used {best.cores:.1f} of {cores:.3g} cores, its event loop {share(best.loop)} of one"
    if best.starved >= STARVED * cores:
        evidence += f", and {best.starved:.1f} threads at a time waited for a core"
    if best.loop >= LOOP_BUSY:
        advice = "several event loops, engines=2 for example, or larger objects (shards)"
    else:
        advice = "more cores, fewer other programs on them, or larger objects (shards)"
    return Bound("cpu", evidence, advice)
