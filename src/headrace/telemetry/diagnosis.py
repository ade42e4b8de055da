"""What limits a loader, from the figures of an iteration, the change that helps, and the waiting after it.

The limit is the step that the loop waits for longest. Where that is the fetch stage, or transforms and collation, the
load of the stage says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from headrace.telemetry.figures import Figures
from headrace.telemetry.formatting import digits, rate, seconds, share

__all__ = ["BATCHES_AT_LEAST", "Diagnosis", "Limit", "Model", "Setup", "diagnose"]

# Below these, waiting is not worth a change: the share of the time, and the mean time of `next()` in seconds.
FEW_WAITS = 0.05
FAST_NEXT = 50e-6
BATCHES_AT_LEAST = 10  # for a diagnosis
LONG_START = 0.5  # of the time
PROVEN_BLOCK = 0.01  # of the time, above which blocking calls are the reason if the event loop is late
HEADROOM = 1.2  # of a change beyond what is needed
MOST = 16.0  # times as fast: no change beyond that is advised at once
THROTTLED = 0.01  # of the requests, above which the store is the limit
BUSY_LOOP = 0.85  # seconds per second in which the engine's thread computes, or could, above which it is the limit
BLOCKED_LOOP = 0.1  # of the time
CROWDED = 0.5  # see `Figures.crowding`
QUEUEING = 3.0  # times the fastest of the first fetches: the median, where more in flight only wait longer
MOSTLY = 0.5  # of a request that is the transfer of its body
MANY_CORES = 3  # above which several engines have one each, beside the training loop and the workers
ALONE = 1.5  # fetches at the same time, below which they are made one after the other
THREADS = 40  # calls that `anyio.to_thread.run_sync` runs at once
IDLE_WORKERS = 0.7  # of the workers, below which more of them would not help
LEAST_CPU = 0.05  # CPU seconds for each second of work that are assumed at least


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
]


class Setup(NamedTuple):
    """The arguments of a loader that decide on its speed.

    Attributes:
        concurrency: the argument.
        num_workers: the argument.
        look_ahead: batches that may be planned and not delivered.
        most_ahead: the number that this may grow to.
        batch_size: samples in a batch, if known.
        in_order: the argument.
        memory_budget: the argument.
        placement: ``"thread"``, ``"process"`` or ``"inline"``.
        stream: whether the dataset is a stream.
        is_async: whether the dataset is an async one.
        cores: CPUs that this process may use.
        most_concurrency: fetches that the descriptors allow.
        fixed_look_ahead: whether `prefetch_factor` was given, so that it does not follow `concurrency`.
        engines: the argument.
        by_engines: whether several engines can divide the dataset.
    """

    concurrency: int | str
    num_workers: int
    look_ahead: int
    most_ahead: int
    batch_size: int | None
    in_order: bool
    memory_budget: int | None
    placement: str
    stream: bool
    is_async: bool
    cores: int
    most_concurrency: int
    fixed_look_ahead: bool = False
    engines: int = 1
    by_engines: bool = True


class Diagnosis(NamedTuple):
    """What limits a loader.

    Attributes:
        limit: the name of the limit.
        evidence: what shows it, with numbers.
        advice: the one change to make; empty if there is none.
        predicted: the share of the time that the loop would wait after that change; None if it cannot be said.
        change: the change as arguments of the loader; empty if it is made elsewhere.
        factor: by how much the change makes the limiting stage faster; None if it cannot be said.
    """

    limit: Limit
    evidence: str
    advice: str = ""
    predicted: float | None = None
    change: Mapping[str, Any] = {}
    factor: float | None = None


class Model:
    """Predicts the waiting from the figures of an iteration, if one stage were faster.

    The loop computes for `u` seconds for each batch, and `next()` takes `c` seconds for a batch that is ready. If
    batches come each `P` seconds, one step takes `max(P, u + c)`. A faster stage does not bring `P` below what the
    others allow: their floor is known for the event loop's thread (its CPU time for a batch) and for the workers.

    Args:
        figures: the figures.
        setup: the loader's arguments.
    """

    def __init__(self, figures: Figures, setup: Setup) -> None:
        self._figures = figures
        self.period = figures.period
        self.compute = figures.compute
        self.in_call = 0.0 if setup.placement == "inline" else figures.in_call_seconds
        workers = setup.num_workers if not figures.in_call else 0
        self.floor = max(
            figures.engine_cpu * figures.period,
            figures.mean_work_seconds / workers if workers else 0.0,
        )

    def needed(self, *, floor: float | None = None) -> float:
        """By how much the limiting stage has to be faster so that it is no longer the limit, with some to spare."""
        target = max(self.compute + self.in_call, self.floor if floor is None else floor, self.period / 100)
        return min(MOST, HEADROOM * self.period / target)

    def after(self, factor: float, *, floor: float | None = None) -> float:
        """The wait share if the limiting stage were faster by a factor."""
        return self.at_period(self.period / factor, floor=floor)

    def at_period(self, period: float, *, floor: float | None = None, in_call: float | None = None) -> float:
        """The wait share if batches came each so many seconds, and `next()` took `in_call` for those that are ready."""
        call = self.in_call if in_call is None else in_call
        step = max(period, self.floor if floor is None else floor, self.compute + call)
        return max(0.0, 1.0 - self.compute / step) if step else 0.0

    def without(self, *steps: str) -> float:
        """The wait share without the waiting for some steps."""
        figures = self._figures
        gone = sum(figures.waits.get(step, 0.0) for step in steps)
        return max(0.0, figures.waited - gone) / max(1e-9, figures.seconds - gone)


def diagnose(figures: Figures, setup: Setup) -> Diagnosis:
    """The diagnosis of an iteration."""
    if figures.batches < BATCHES_AT_LEAST:
        return Diagnosis(
            "start-up",
            f"only {figures.batches} batches were delivered after the first, which took {seconds(figures.start_up)}",
            "read more batches before asking for a report",
        )
    model = Model(figures, setup)
    if figures.start_up > max(figures.waited, LONG_START * (figures.start_up + figures.seconds)):
        at_start = figures.start_blocked > figures.start_up / 2
        return _blocked_loop(figures, setup, model) if at_start else _start_up(figures)
    if figures.wait_share < FEW_WAITS or figures.waited / figures.batches < FAST_NEXT:
        return Diagnosis(
            "consumer",
            f"next() takes {seconds(figures.waited / figures.batches)}, and the loop itself "
            f"{seconds(figures.compute)} for each batch",
            predicted=figures.wait_share,
        )
    step = max(figures.waits, key=figures.waits.__getitem__)
    if step in ("queue", "fetch"):
        return _fetching(figures, setup, model)
    if step in ("worker queue", "work"):
        return _working(figures, setup, model)
    part = share(figures.waits[step] / figures.waited)
    if step == "loop":
        if figures.blocked > PROVEN_BLOCK:
            return _blocked_loop(figures, setup, model)
        if (found := _busy_loop(figures, setup, model)) is not None:
            return found
    if step == "plan":
        return Diagnosis(
            "look-ahead",
            f"{part} of the waiting is for the sampler, which runs in next()",
            "make the sampler faster, or draw its indices before the epoch",
            model.without("plan"),
        )
    if step == "delivery":
        return Diagnosis(
            "copy",
            f"{part} of the waiting is inside next(), after the batch has arrived: unpickling, pinning, or copying it",
            "return few large tensors from collate_fn; with a GPU, use device=, which copies the next batches while "
            "the loop computes",
            model.without("delivery"),
        )
    return _transport(figures, setup, model, part)


def _start_up(figures: Figures) -> Diagnosis:
    total = figures.start_up + figures.seconds
    left = total - figures.start_up + figures.first_fetch
    return Diagnosis(
        "start-up",
        f"the first batch took {seconds(figures.start_up)} of {seconds(total)}, {seconds(figures.first_fetch)} of it "
        f"after the start of fetching; later ones {seconds(figures.waited / max(1, figures.batches))} in next()",
        "keep the loader for several epochs (its engine and workers stay), or call iter() before the model is built",
        (figures.waited + figures.first_fetch) / left if left else None,
    )


def _transport(figures: Figures, setup: Setup, model: Model, part: str) -> Diagnosis:
    engine = "the loader's process" if setup.placement == "process" else "the engine's thread"
    evidence = (
        f"{part} of the waiting is for batches that are assembled, on their way from "
        f"{'the workers' if setup.num_workers else engine}"
    )
    predicted = model.without("loop", "hand-over", "delivery")
    if setup.num_workers and setup.is_async:
        return Diagnosis(
            "transport",
            evidence,
            'executor="thread", which needs no copy if the transform releases the GIL; or return fewer and larger '
            "tensors",
            predicted,
            {"executor": "thread"} if setup.engines > 1 else {"executor": "thread", "placement": "thread"},
        )
    if setup.placement == "process" and setup.engines == 1:
        change = {"placement": "thread"}
        return Diagnosis("transport", evidence, 'placement="thread", which needs no copy', predicted, change)
    advice = "return fewer and larger tensors from collate_fn, or move less: decode later, use smaller dtypes"
    return Diagnosis("transport", evidence, advice, predicted)


def _fetching(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    if figures.blocked > BLOCKED_LOOP:
        return _blocked_loop(figures, setup, model)
    if figures.requests.throttled > THROTTLED * _requests(figures):
        return _throttled(figures, model)
    if (found := _busy_loop(figures, setup, model)) is not None:
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
        f"{figures.in_flight:.0f} of {figures.concurrency} fetches are in flight: the {setup.most_ahead} batches that "
        f"may be planned ahead are not enough to keep more",
        *_more_in_flight(figures, setup, model, wanted),
    )


def _busy_loop(figures: Figures, setup: Setup, model: Model) -> Diagnosis | None:
    """The event loop's thread has no time left; None if it has."""
    if figures.blocked > BLOCKED_LOOP:
        return _blocked_loop(figures, setup, model)
    if figures.engine_cpu + figures.engine_queued > BUSY_LOOP:
        return _computing_loop(figures, setup, model)
    if setup.placement == "thread" and figures.engine_cpu + figures.consumer_cpu > BUSY_LOOP and setup.cores > 1:
        return _shared_gil(figures, model)
    return None


def _blocked_loop(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    place = f" in {figures.blocked_in}" if figures.blocked_in else ""
    total = figures.start_up + figures.seconds
    blocked = (figures.start_blocked + figures.blocked * figures.seconds) / total
    in_threads = min(THREADS, figures.concurrency or THREADS)
    # The watchdog counts what it has proven, which is less than all if many calls block for some milliseconds each. If
    # fetches do not overlap, though several may, the loop is blocked all the time in which it does not compute.
    median = figures.fetch_seconds[0] if figures.fetch_seconds else 0.0
    overlapping = median * figures.samples / max(1e-9, figures.seconds)
    share_blocked = figures.blocked
    if figures.full <= 0.5 or overlapping < ALONE < figures.concurrency:
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


def _computing_loop(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
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
        factor = max(1.0, min(factor, figures.concurrency / allowed * 2))
    mebibytes = math.ceil(budget * factor / 2**20)
    return Diagnosis(
        "memory-budget",
        f"plans waited for memory at {share(figures.held)} of the batches, with {figures.in_flight:.0f} of "
        f"{figures.concurrency} fetches in flight",
        f"memory_budget={mebibytes} * 2**20",
        model.after(factor),
        {"memory_budget": mebibytes * 2**20},
        factor,
    )


def _full(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    median = figures.fetch_seconds[0] if figures.fetch_seconds else 0.0
    transfer = figures.request_seconds[0] - figures.first_byte_seconds[0] if figures.first_byte_seconds else 0.0
    factor = model.needed()
    fewer = f"1/{digits(factor)} of the bytes for each sample: .cache(folder) for later epochs, or smaller samples"
    shown = None
    if figures.crowding is not None:
        if figures.crowding > CROWDED:
            shown = "the more are in flight, the longer each takes"
    elif figures.fastest_fetch and median > QUEUEING * figures.fastest_fetch:
        shown = f"the first ones took {seconds(figures.fastest_fetch)}"
    elif transfer > MOSTLY * sum(figures.request_seconds[:1]):
        shown = (
            f"{seconds(transfer)} of a request of {seconds(figures.request_seconds[0])} are the transfer of its body"
        )
        fewer += '; or concurrency="auto", which finds out whether more requests get more'
    if shown is not None:
        return Diagnosis(
            "bandwidth",
            f"{figures.concurrency} fetches in flight take {seconds(median)} each, "
            f"at {figures.nbytes / figures.seconds / 1e6:.3g} MB/s, and {shown}",
            fewer,
            model.after(factor),
            factor=factor,
        )
    wanted = figures.concurrency * factor
    evidence = (
        f"{figures.concurrency} in flight ÷ {seconds(median)} = "
        f"{rate(figures.concurrency / median) if median else '?'} samples/s, "
        f"and the window was full {share(figures.full)} of the time"
    )
    if figures.concurrency >= setup.most_concurrency:
        advice = f"more descriptors (ulimit -n), which allow {setup.most_concurrency} fetches now, or ranges and shards"
        return Diagnosis("latency", evidence, advice, factor=factor)
    return Diagnosis("latency", evidence, *_more_in_flight(figures, setup, model, wanted))


def _samples_ahead(figures: Figures, setup: Setup) -> float:
    return setup.look_ahead * (setup.batch_size or figures.samples / figures.batches)


def _more_in_flight(
    figures: Figures, setup: Setup, model: Model, wanted: float
) -> tuple[str, float, dict[str, Any], float]:
    """The advice, prediction, change and factor with which so many samples are fetched at once."""
    change: dict[str, Any] = {}
    ahead = _samples_ahead(figures, setup)
    now = min(float(figures.concurrency), ahead)
    wanted = min(wanted, setup.most_concurrency)
    limit = figures.concurrency
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


def _working(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    """The reason, where the loop waits for batches that are fetched and not assembled."""
    workers = setup.num_workers
    if figures.in_call or not workers:
        return _inside_next(figures, setup, model)
    if figures.workers_busy < IDLE_WORKERS * workers:
        return _idle_workers(figures, setup, model)
    wanted = math.ceil(workers * model.needed(floor=0.0))
    most = _most_workers(figures, setup)
    evidence = (
        f"{figures.workers_busy:.1f} of {workers} workers are busy, {seconds(figures.work_seconds)} for a batch, and "
        f"fetched batches wait for them"
    )
    if wanted > most:
        evidence += f"; this machine grants {setup.cores} cores, of which a worker uses {share(figures.work_cpu)}"
    if most <= workers and wanted > most:
        factor = wanted / workers
        return Diagnosis(
            "workers",
            evidence,
            f"less work for each sample, 1/{factor:.2g} of it: decode smaller images, transform on the accelerator, or "
            f"store decoded samples",
            model.after(factor, floor=0.0),
            factor=factor,
        )
    added = min(wanted, most)
    return Diagnosis(
        "workers",
        evidence,
        f"num_workers={added}" + (", and less work for each sample" if wanted > most else ""),
        model.after(added / workers, floor=0.0),
        {"num_workers": added},
        added / workers,
    )


def _inside_next(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    work = figures.mean_work_seconds
    others = max(0.0, model.in_call - work)
    wanted = max(1, math.ceil(HEADROOM * work / max(1e-9, figures.compute + others)))
    workers = max(1, min(wanted, _most_workers(figures, setup)))
    return Diagnosis(
        "workers",
        f"transforms and collation take {seconds(figures.work_seconds)} of each next(), in the loop's own thread",
        f"num_workers={workers}",
        model.at_period(work / workers, in_call=others),
        {"num_workers": workers},
        float(workers),
    )


def _idle_workers(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
    workers = setup.num_workers
    factor = min(workers / max(0.1, figures.workers_busy), model.needed())
    evidence = f"{figures.workers_busy:.1f} of {workers} workers are busy"
    slow = figures.slow_waits > 0.5 or setup.look_ahead > 2 * workers
    if slow and setup.in_order:
        return Diagnosis(
            "order",
            f"{evidence}: the others wait for a slow batch",
            "in_order=False",
            model.after(factor),
            {"in_order": False},
            factor,
        )
    prefetch = math.ceil(setup.look_ahead / workers * max(2.0, factor))
    return Diagnosis(
        "look-ahead",
        f"{evidence}, with {setup.look_ahead} batches ahead",
        f"prefetch_factor={prefetch}",
        model.after(factor),
        {"prefetch_factor": prefetch},
        factor,
    )


def _most_workers(figures: Figures, setup: Setup) -> int:
    """Workers that the cores suffice for: more than cores, if a worker waits for something else than a core."""
    return max(setup.cores, int(setup.cores / max(LEAST_CPU, figures.work_cpu or 1.0)))
