"""Why a loop waits for samples that are being fetched."""

from __future__ import annotations

import math
from typing import Any

from headrace.telemetry.figures import Figures
from headrace.telemetry.formatting import digits, rate, seconds, share
from headrace.telemetry.limits import Diagnosis, Setup
from headrace.telemetry.prediction import Model

__all__ = ["blocked_loop", "busy_loop", "diagnose_fetching"]

THROTTLED = 0.01  # of the requests, above which the store is the limit
BUSY_LOOP = 0.85  # seconds per second in which the engine's thread computes, or could, above which it is the limit
BLOCKED_LOOP = 0.1  # of the time
CROWDED = 0.5  # see `Figures.crowding`
QUEUEING = 3.0  # times the fastest of the first fetches: the median, where more in flight only wait longer
MOSTLY = 0.5  # of a request that is the transfer of its body
MANY_CORES = 3  # above which several engines have one each, beside the training loop and the workers
ALONE = 1.5  # fetches at the same time, below which they are made one after the other
THREADS = 40  # calls that `anyio.to_thread.run_sync` runs at once


def diagnose_fetching(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    """The reason, where the loop waits for samples."""
    if figures.blocked > BLOCKED_LOOP:
        return blocked_loop(figures, setup, model)
    if figures.requests.throttled > THROTTLED * _requests(figures):
        return _throttled(figures, model)
    if (found := busy_loop(figures, setup, model)) is not None:
        return found
    if setup.stream:
        return _stream(figures, model)
    if figures.held > 0.5 and figures.full < 0.5:
        return _memory(figures, setup, model)
    if figures.full > 0.5:
        return _full(figures, setup, model)
    if figures.slow_waits > 0.5:
        return _slow_samples(figures, setup, model)
    wanted = _samples_ahead(figures, setup) * model.needed()
    return Diagnosis(
        "look-ahead",
        f"{figures.in_flight:.0f} of {figures.limit} fetches are in flight: the {setup.most_ahead} batches that may be "
        f"planned ahead are not enough to keep more",
        *_more_in_flight(figures, setup, model, wanted),
    )


def busy_loop(figures: Figures, setup: Setup, model: Model) -> Diagnosis | None:
    """The event loop's thread has no time left; None if it has."""
    if figures.blocked > BLOCKED_LOOP:
        return blocked_loop(figures, setup, model)
    if figures.engine_cpu + figures.engine_queued > BUSY_LOOP:
        return _busy_loop(figures, setup, model)
    if setup.placement == "thread" and figures.engine_cpu + figures.consumer_cpu > BUSY_LOOP and setup.cores > 1:
        return _shared_gil(figures, model)
    return None


def blocked_loop(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    """User code blocks the event loop."""
    place = f" in {figures.blocked_in}" if figures.blocked_in else ""
    total = figures.start_up + figures.seconds
    blocked = (figures.start_blocked + figures.blocked * figures.seconds) / total
    in_threads = min(THREADS, figures.limit or THREADS)
    # The watchdog counts what it has proven, which is less than all if many calls block for some milliseconds each. If
    # fetches do not overlap, though several may, the loop is blocked all the time in which it does not compute.
    median = figures.fetch_seconds[0] if figures.fetch_seconds else 0.0
    overlapping = median * figures.samples / max(1e-9, figures.seconds)
    share_blocked = figures.blocked
    if figures.full <= 0.5 or overlapping < ALONE < figures.limit:
        share_blocked = max(share_blocked, 1 - figures.engine_cpu)
    period, blocking = figures.period, figures.period * share_blocked
    if figures.start_up > figures.waited:  # all that was planned ahead is fetched before the first batch is delivered
        period, blocking = (each / (figures.batches + 1) for each in (total, max(figures.start_up, blocked * total)))
    return Diagnosis(
        "blocked-loop",
        f"for {share(blocked)} of the time at least, a blocking call{place} stops all fetches",
        f"call it with anyio.to_thread.run_sync, which runs {in_threads} at once, use an async client, or do CPU work "
        f"in transform=",
        model.at_period(max(period - blocking, blocking / in_threads), floor=0.0),
        factor=period / max(period - blocking, blocking / in_threads),
    )


def _requests(figures: Figures) -> int:
    """Requests that were made: of an `aget` that does not count them, one for each sample and refusal."""
    return figures.requests.requests or figures.samples + figures.requests.throttled


def _throttled(figures: Figures, model: Model) -> Diagnosis:
    refused, factor = figures.requests.throttled / _requests(figures), model.needed()
    return Diagnosis(
        "throttling",
        f"the store refused {share(refused)} of the requests (429 or 503), at "
        f"{rate(figures.samples / figures.seconds)} samples/s",
        f"make 1/{digits(factor)} of the requests: shards in place of objects, .cache(folder), or several prefixes of "
        f"the bucket",
        model.after(factor),
        factor=factor,
    )


def _busy_loop(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    factor = model.needed(floor=0.0)
    cpu = figures.engine_cpu * figures.seconds / max(1, figures.samples)
    evidence = f"the event loop's thread computes {share(figures.engine_cpu)} of the time, {seconds(cpu)} for a sample"
    if figures.engine_queued > 0.1:
        evidence += f", and waits for a core {share(figures.engine_queued)} of it, since other threads use them"
    advice = (
        f"less Python for each sample, {seconds(cpu / factor)} of it: CPU work in transform=, agets, ranges that are "
        f"read together, or shards"
    )
    if setup.cores > MANY_CORES and setup.by_engines:
        advice += (
            f"; or engines={min(setup.cores // 2, math.ceil(setup.engines * factor))}, which spreads it over cores"
        )
    return Diagnosis(
        "event-loop",
        evidence,
        advice,
        model.after(factor, floor=0.0),
        factor=factor,
    )


def _shared_gil(figures: Figures, model: Model) -> Diagnosis:
    return Diagnosis(
        "event-loop",
        f"the event loop's thread computes {share(figures.engine_cpu)} of the time and your loop "
        f"{share(figures.consumer_cpu)}, under one GIL",
        'placement="process"',
        model.after(1 / max(0.05, figures.engine_cpu)),
        {"placement": "process"},
        1 / max(0.05, figures.engine_cpu),
    )


def _stream(figures: Figures, model: Model) -> Diagnosis:
    if figures.slow_waits > 0.5:
        return _slow_shard(figures)
    factor = model.needed()
    return Diagnosis(
        "latency",
        f"the stream gives {rate(figures.samples / figures.seconds)} samples/s, with the event loop "
        f"{share(figures.engine_cpu)} busy: it waits for its source",
        f"read {digits(factor)} times as much at once: shards_in_parallel= or requests_per_shard= of the dataset",
        model.after(factor),
        factor=factor,
    )


def _slow_shard(figures: Figures) -> Diagnosis:
    # While the slow shard is read, a batch takes `slow`. With `factor` times as many shards it takes as long to read,
    # and so many more batches are made of the others meanwhile.
    count, u = figures.slow_batches, figures.compute
    waiting = figures.slow_waits * (figures.waits.get("fetch", 0.0) + figures.waits.get("queue", 0.0))
    slow = waiting / count + u
    factor = max(1.0, min(slow / max(u, slow / 16), figures.batches / count))
    meanwhile = min(float(figures.batches), factor * count)
    others = (figures.waited - waiting) / max(1, figures.batches - count)
    total = meanwhile * max(slow / factor, u) + (figures.batches - meanwhile) * (u + others)
    return Diagnosis(
        "order",
        f"{share(figures.slow_waits)} of the waiting is for {count} batches that take more than three times the usual "
        f"time: a shard that is slow holds up the others",
        f'{digits(factor)} times the shards_in_parallel= of the dataset, or hedge="auto" if a second request is faster',
        max(0.0, 1 - figures.batches * u / total),
        factor=factor,
    )


def _memory(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    budget = setup.memory_budget or 0
    factor = model.needed()
    if figures.memory_of_sample and setup.concurrency != "auto":
        allowed = max(1.0, budget / figures.memory_of_sample)  # samples, in any state
        factor = max(1.0, min(factor, figures.limit / allowed * 2))
    mebibytes = math.ceil(budget * factor / 2**20)
    return Diagnosis(
        "memory-budget",
        f"plans waited for memory at {share(figures.held)} of the batches, with {figures.in_flight:.0f} of "
        f"{figures.limit} fetches in flight",
        f"memory_budget={mebibytes} * 2**20",
        model.after(factor),
        {"memory_budget": mebibytes * 2**20},
        factor,
    )


def _full(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    median = figures.fetch_seconds[0] if figures.fetch_seconds else 0.0
    transfer = figures.request_seconds[0] - figures.first_byte[0] if figures.first_byte else 0.0
    factor = model.needed()
    speed = figures.nbytes / figures.seconds
    fewer = f"1/{digits(factor)} of the bytes for each sample: .cache(folder) for later epochs, or smaller samples"
    crowded = figures.crowding is not None and figures.crowding > CROWDED
    if crowded or (figures.crowding is None and figures.fastest_fetch and median > QUEUEING * figures.fastest_fetch):
        shown = (
            "the more are in flight, the longer each takes"
            if crowded
            else (f"the first ones took {seconds(figures.fastest_fetch)}")
        )
        return Diagnosis(
            "bandwidth",
            f"{figures.limit} fetches in flight take {seconds(median)} each, at {speed / 1e6:.3g} MB/s, and {shown}: "
            f"they wait for each other, so that more of them do not help",
            fewer,
            model.after(factor),
            factor=factor,
        )
    if (
        transfer > MOSTLY * (figures.request_seconds[0] if figures.request_seconds else 0.0)
        and figures.crowding is None
    ):
        return Diagnosis(
            "bandwidth",
            f"{seconds(transfer)} of the {seconds(figures.request_seconds[0])} of a request are the transfer of its "
            f"body, with {figures.limit} in flight, at {speed / 1e6:.3g} MB/s",
            f'{fewer}; or concurrency="auto", which finds out whether more requests get more',
            model.after(factor),
            factor=factor,
        )
    wanted = figures.limit * factor
    evidence = (
        f"{figures.limit} in flight ÷ {seconds(median)} = {rate(figures.limit / median) if median else '?'} samples/s, "
        f"and the window was full {share(figures.full)} of the time"
    )
    if figures.limit >= setup.most_concurrency:
        advice = f"more descriptors (ulimit -n), which allow {setup.most_concurrency} fetches now, or ranges and shards"
        return Diagnosis("latency", evidence, advice, factor=factor)
    return Diagnosis("latency", evidence, *_more_in_flight(figures, setup, model, wanted))


def _samples_ahead(figures: Figures, setup: Setup) -> float:
    """Samples that may be fetched at once, by the look-ahead."""
    return setup.look_ahead * (setup.batch_size or figures.samples / figures.batches)


def _more_in_flight(
    figures: Figures, setup: Setup, model: Model, wanted: float
) -> tuple[str, float, dict[str, Any], float]:
    """The advice, prediction, change and factor with which so many samples are fetched at once."""
    change: dict[str, Any] = {}
    ahead = _samples_ahead(figures, setup)
    now = min(float(figures.limit), ahead)
    wanted = min(wanted, setup.most_concurrency)
    limit = figures.limit
    if wanted > limit or not setup.fixed_look_ahead:
        limit = min(setup.most_concurrency, _round_up(wanted))
        change["concurrency"] = limit
    if setup.fixed_look_ahead and wanted > ahead:
        per_batch = ahead / setup.look_ahead * max(1, setup.num_workers)
        change["prefetch_factor"] = math.ceil(wanted / per_batch)
        ahead = change["prefetch_factor"] * per_batch
    elif not setup.fixed_look_ahead:
        ahead = max(ahead, limit)
    factor = min(limit, ahead) / max(1.0, now)
    return ", ".join(f"{name}={value}" for name, value in change.items()), model.after(factor), change, factor


def _slow_samples(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    evidence = (
        f"{share(figures.slow_waits)} of the waiting is for batches with a sample that takes more than three times the "
        f"usual time, while later batches are complete"
    )
    if setup.in_order:
        # By Little's law, with the look-ahead full of batches in any state.
        period = figures.batch_seconds / setup.most_ahead
        advice = 'in_order=False, or hedge="auto" if a second request is faster'
        return Diagnosis("order", evidence, advice, model.at_period(period), {"in_order": False})
    advice = 'hedge="auto", which requests slow samples a second time'
    return Diagnosis("order", evidence, advice, change={"hedge": "auto"})


def _round_up(value: float) -> int:
    """To a power of two, or one and a half times one."""
    power = 2 ** math.ceil(math.log2(max(1.0, value)))
    return int(0.75 * power) if power >= 4 and value <= 0.75 * power else power
