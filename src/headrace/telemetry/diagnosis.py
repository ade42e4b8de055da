"""Diagnosis of a loader: the limit, and a change.

The limit is the step with the longest wait of the loop. For the fetch stage, and for transforms and
collation, the load of the stage tells the reason. The wait after the change is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headrace._base.text import digits, seconds, share
from headrace.telemetry.figures import Figures

# Waits below both limits are not worth a change: share of the time, and mean seconds of `next()`.
FEW_WAITS = 0.05
FAST_NEXT = 50e-6
BATCHES_AT_LEAST = 10  # for a diagnosis
# CPU seconds per second of a worker's work. A worker with less CPU time waits for something else.
WAITING = 0.1
LONG_START = 0.5  # share of the time
HEADROOM = 1.2  # factor of a change beyond the need
MOST = 16.0  # largest speed-up advised at once
THROTTLED = 0.01  # share of the requests; with more refusals, the store is the limit
# Seconds per second in which the engine's thread computes, or could. With more, the thread is the
# limit.
BUSY_LOOP = 0.85
BLOCKED_LOOP = 0.1  # share of the time
# Share of all waiting, including the first batch. The watchdog sees a part of the blocking calls.
BLOCKED_WAITING = 0.25
# Ratio of a quick fetch to a quick fetch among the first. With a larger ratio, more fetches in
# flight only wait longer.
QUEUEING = 2.0
# Consecutive fetches; then concurrency="auto" has tried more fetches in flight.
TURNS = 10
# With more cores, several engines have a core each, beside the training loop and the workers.
MANY_CORES = 3
IDLE_WORKERS = 0.7  # share of busy workers; with less, more workers would not help
# Share of busy workers; with more, workers are the limit, whatever the wait.
BUSY_WORKERS = 0.9
TAKEN = 0.2  # share of the time; threads that wait less for a core have cores enough
# Factor of batches a second after a change; a change with less is not advised.
GAIN = 1.05

# Steps of waits in `next()`, by the cause of the wait.
STAGES = {
    "fetching": ("queue", "fetch"),
    "transforms and collation": ("worker queue", "work"),
    "the sampler": ("plan",),
    "sending batches": ("loop", "hand-over"),
    "delivery": ("delivery",),
}


class Setup(NamedTuple):
    """Arguments and environment of a loader that decide the speed."""

    concurrency: int | str
    num_workers: int
    look_ahead: int  # most batches planned and not delivered
    in_order: bool
    memory_budget: int | None
    placement: str  # ``"thread"``, ``"process"`` or ``"inline"``
    stream: bool  # whether the dataset is a stream
    cores: int  # CPUs that this process may use
    most_concurrency: int  # fetches allowed by the limit of descriptors
    # Whether `prefetch_factor` was given. Then the look-ahead does not follow `concurrency`.
    fixed_look_ahead: bool = False
    engines: int = 1


@dataclass(frozen=True)
class Diagnosis:
    """Limit of a loader, and change: attributes of a `Report`."""

    limit: str
    evidence: str
    advice: str = ""
    predicted: float | None = None
    change: Mapping[str, Any] = field(default_factory=dict)


class _Model:
    """Predicts the wait if a stage were faster, from the figures.

    For each batch, the loop computes for `u` seconds, and `next()` takes `c` seconds if the batch
    is ready. If a batch comes every `P` seconds, a step takes `max(P, u + c)`. A faster stage does
    not bring `P` below the floor of the other stages. The floor is known for the event loop's
    thread (CPU time per batch) and for the workers.
    """

    def __init__(self, figures: Figures, setup: Setup) -> None:
        self.figures, self.setup = figures, setup
        self.in_call = 0.0 if setup.placement == "inline" else figures.in_call_seconds
        of_workers = (
            figures.workers_busy / setup.num_workers if setup.num_workers else 0.0
        )
        self.floor = figures.period * max(figures.engine_cpu, of_workers)
        # Number of samples planned ahead.
        self.ahead = setup.look_ahead * figures.samples / figures.batches

    def needed(self) -> float:
        """Return the speed-up that the limiting stage needs.

        With the speed-up, the stage is no longer the limit. The speed-up includes `HEADROOM`, and
        is at most `MOST`.
        """
        figures = self.figures
        target = max(figures.compute + self.in_call, self.floor, figures.period / 100)
        return min(MOST, HEADROOM * figures.period / target)

    def without(self, gone: float) -> float:
        """Return the wait share without `gone` seconds of the wait."""
        figures = self.figures
        return max(0.0, figures.waited - gone) / max(1e-9, figures.seconds - gone)

    def faster(
        self, limit: str, evidence: str, advice: str, factor: float, **change: Any
    ) -> Diagnosis:
        """Return the diagnosis with a change that speeds up the stage.

        The limiting stage becomes faster by `factor`.
        """
        figures = self.figures
        step = max(figures.period / factor, self.floor, figures.compute + self.in_call)
        return Diagnosis(limit, evidence, advice, _waiting(figures.compute, step), change)


def _waiting(compute: float, step: float) -> float:
    """Return the wait share of steps of `step` seconds, with `compute` seconds of the loop."""
    return max(0.0, 1.0 - compute / step) if step else 0.0


def diagnose(figures: Figures, setup: Setup) -> Diagnosis:
    """Diagnose an iteration, without advice that changes nothing."""
    found = _diagnosed(figures, setup)
    if (
        found.predicted is None
        or found.limit in ("consumer", "start-up")
        or not figures.compute
    ):
        return found
    if (1.0 - found.predicted) > GAIN * (1.0 - figures.wait_share):
        return found
    return Diagnosis(
        found.limit,
        f"{found.evidence}; no single change makes it faster, since other stages limit too",
    )


def _diagnosed(figures: Figures, setup: Setup) -> Diagnosis:
    if figures.batches < BATCHES_AT_LEAST:
        return Diagnosis(
            "few-batches",
            f"only {figures.batches} batches were delivered after the first, "
            f"which took {seconds(figures.start_up)}",
            "read more batches before asking for a report",
        )
    model, total = _Model(figures, setup), figures.start_up + figures.seconds
    wait = figures.waited / figures.batches
    waiting = figures.start_up + figures.waited
    # Whether the workers, or the thread without workers, are always busy after the first batch.
    working = figures.workers_busy + figures.functions_busy
    busy = figures.start_up <= figures.seconds and working > BUSY_WORKERS * max(
        1, setup.num_workers
    )
    blocks = figures.blocked * total > max(
        BLOCKED_LOOP * total, BLOCKED_WAITING * waiting
    )
    if blocks and not busy and waiting > FEW_WAITS * total:
        place = f" in {figures.blocked_in}" if figures.blocked_in else ""
        return Diagnosis(
            "blocked-loop",
            f"for about {share(figures.blocked)} of the time, "
            f"a blocking call{place} stops all fetches",
            "call it with anyio.to_thread.run_sync, which runs 40 at once, "
            "use an async client, or do CPU work in transform=",
        )
    if (
        figures.start_up > max(figures.waited, LONG_START * total)
        and figures.wait_share < LONG_START
    ):
        return Diagnosis(
            "start-up",
            f"the first batch took {seconds(figures.start_up)} of {seconds(total)}; "
            f"later ones {seconds(wait)} in next()",
            "keep the loader for several epochs (its engine and workers stay), "
            "or call iter() before the model is built",
            figures.wait_share,
        )
    # If the engine's thread always computes, the loop waits for the GIL. The wait looks like the
    # loop's own time, without CPU time.
    waits_for_gil = setup.placement == "thread" and figures.consumer_cpu < 1 - BUSY_LOOP
    if waits_for_gil and figures.engine_cpu > BUSY_LOOP and (found := _busy_loop(model)):
        return found
    if figures.wait_share < FEW_WAITS or wait < FAST_NEXT:
        evidence = (
            f"next() takes {seconds(wait)}, "
            f"and the loop itself {seconds(figures.compute)} for each batch"
        )
        return Diagnosis("consumer", evidence, predicted=figures.wait_share)
    used = figures.workers_cpu + setup.engines * figures.engine_cpu + figures.consumer_cpu
    queued = max(
        figures.engine_queued, figures.workers_queued / max(1, setup.num_workers)
    )
    if queued > max(TAKEN, figures.wait_share / 2) and used < BUSY_LOOP * setup.cores:
        return Diagnosis(
            "cores",
            f"a thread of the loader waits for a core {share(queued)} of the time, while loader "
            f"and loop use {used:.1f} of {setup.cores} cores",
        )
    if busy:
        return _working(model)
    waits = {
        stage: sum(figures.waits[step] for step in steps)
        for stage, steps in STAGES.items()
    }
    stage = max(waits, key=waits.__getitem__)
    # Without workers a stream's functions run in `next()`, whatever the cause of the wait.
    many = IDLE_WORKERS * setup.num_workers or figures.wait_share / 2
    stepping = figures.functions_busy > many and stage in ("fetching", "sending batches")
    if stepping or stage == "transforms and collation":
        return _working(model)
    if stage == "fetching":
        return _fetching(model)
    return _passing(stage, waits[stage], model)


def _passing(stage: str, waited: float, model: _Model) -> Diagnosis:
    """Diagnose waits for plans, or for batches after collation."""
    figures, setup = model.figures, model.setup
    part = share(waited / figures.waited)
    if stage == "the sampler":
        return Diagnosis(
            "look-ahead",
            f"{part} of the waiting is for the sampler, which runs in next()",
            "make the sampler faster, or draw its indices before the epoch",
            model.without(waited),
        )
    if stage == "delivery":
        return Diagnosis(
            "copy",
            f"{part} of the waiting is inside next(), after the batch has arrived: "
            f"unpickling, pinning, or copying it",
            "return few large tensors from collate_fn; with a GPU, use device=, "
            "which copies the next batches while the loop computes",
            model.without(waited),
        )
    if figures.waits["loop"] > figures.waits["hand-over"] and (
        found := _busy_loop(model)
    ):
        return found
    change: dict[str, Any] = {}
    advice = (
        "return fewer and larger tensors from collate_fn, "
        "or move less: decode later, use smaller dtypes"
    )
    if setup.placement == "process" and setup.engines == 1:
        change["placement"] = "thread"
        advice = f'placement="thread"; or {advice}'
    evidence = f"{part} of the waiting is for batches that are assembled, on their way to the loop"
    return Diagnosis(
        "transport",
        evidence,
        advice,
        model.without(waited + figures.waits["delivery"]),
        change,
    )


def _fetching(model: _Model) -> Diagnosis:
    """Diagnose waits for batches that are not fetched."""
    figures, setup = model.figures, model.setup
    refused, factor = figures.requests.throttled, model.needed()
    speed = f"{digits(figures.samples / figures.seconds)} samples/s"
    # An `aget` may not count its requests: assume a request for each sample and refusal.
    asked = figures.requests.requests or figures.samples + refused
    if refused > THROTTLED * asked:
        return model.faster(
            "throttling",
            f"the store refused {share(refused / asked)} of the requests (429 or 503), at {speed}",
            f"make 1/{digits(factor)} of the requests: shards in place of objects, "
            ".cache(folder) for later epochs, or several prefixes of the bucket",
            factor,
        )
    if found := _busy_loop(model):
        return found
    if setup.stream:
        return model.faster(
            "latency",
            f"the stream gives {speed}, with the event loop {share(figures.engine_cpu)} busy: it "
            "waits for its source",
            f"read {digits(factor)} times as much at once: by shards_in_parallel= or "
            "requests_per_shard= of shards, or from several sources in an __aiter__ of yours",
            factor,
        )
    in_flight = f"{figures.in_flight:.0f} of {figures.concurrency} fetches"
    if found := _saturated(model):
        return found
    if figures.full > 0.5:
        return _more_in_flight(
            model,
            "latency",
            f"{figures.concurrency} in flight take {seconds(sum(figures.fetch_seconds[:1]))} each, "
            f"at {speed}; the window was full {share(figures.full)} of the time",
            figures.concurrency * factor,
            ", if the source serves more at once, "
            'which concurrency="auto" in a long epoch finds out',
        )
    if figures.held > 0.5:
        mebibytes = math.ceil((setup.memory_budget or 0) * factor / 2**20)
        return model.faster(
            "memory-budget",
            f"plans waited for memory at {share(figures.held)} of the batches, "
            f"with {in_flight} in flight",
            f"memory_budget={mebibytes} * 2**20",
            factor,
            memory_budget=mebibytes * 2**20,
        )
    if setup.in_order and figures.slow_waits > 0.5 * (
        figures.waits["queue"] + figures.waits["fetch"]
    ):
        # Slow samples hold up later batches.
        return Diagnosis(
            "order",
            f"{share(figures.slow_waits / figures.waited)} of the waiting is for batches with a "
            f"sample that takes more than three times the usual time, while later batches are "
            f"complete",
            'in_order=False, or hedge="auto" if a second request is faster',
            model.without(figures.slow_waits),
            {"in_order": False},
        )
    return _more_in_flight(
        model,
        "look-ahead",
        f"{in_flight} are in flight: "
        f"the batches that may be planned ahead are not enough to keep more",
        model.ahead * factor,
    )


def _busy_loop(model: _Model) -> Diagnosis | None:
    """Diagnose an event loop's thread without spare time, or return None."""
    figures, setup, busy = model.figures, model.setup, model.figures.engine_cpu
    evidence = f"the event loop's thread computes {share(busy)} of the time"
    if busy + figures.engine_queued > BUSY_LOOP:
        # With less Python the thread limits nothing.
        model = _Model(replace(figures, engine_cpu=0.0), setup)
        factor = model.needed()
        cpu = busy * figures.seconds / max(1, figures.samples)
        evidence += (
            f", {seconds(cpu)} for a sample, "
            f"and waits for a core {share(figures.engine_queued)} of the time"
        )
        advice = (
            f"less Python for each sample, {seconds(cpu / factor)} of it: CPU work in transform=, "
            f"agets, ranges that are read together, or shards"
        )
        change: dict[str, Any] = {}
        if setup.cores > MANY_CORES and not setup.stream:
            engines = min(setup.cores // 2, math.ceil(setup.engines * factor))
            advice += f"; or engines={engines}, which spreads it over cores"
            change = {"engines": engines}
        return model.faster("event-loop", evidence, advice, factor, **change)
    if (
        setup.placement == "thread"
        and busy + figures.consumer_cpu > BUSY_LOOP
        and setup.cores > 1
    ):
        evidence += f" and your loop {share(figures.consumer_cpu)}, under one GIL"
        advice = 'placement="process"'
        return model.faster(
            "event-loop", evidence, advice, 1 / max(0.05, busy), placement="process"
        )
    return None


def _saturated(model: _Model) -> Diagnosis | None:
    """Diagnose a source at its limit, or return None if unknown.

    The store, or the link to the store, gives no more: fetches wait for each other.
    """
    figures, setup = model.figures, model.setup
    searched = (
        setup.concurrency == "auto"
        and figures.seconds > TURNS * sum(figures.fetch_seconds[:1]) > 0.0
        and figures.full > 0.5
        and figures.grown <= 1.0
        and figures.concurrency < setup.most_concurrency
    )
    if figures.quick_fetch_seconds > QUEUEING * figures.first_fetch_seconds > 0.0:
        shown = (
            "the first ones, which had to wait for few others, "
            f"took {seconds(figures.first_fetch_seconds)}"
        )
    elif searched:
        shown = 'concurrency="auto" gets no more by more in flight'
    else:
        return None
    factor = model.needed()
    advice = (
        f"{digits(factor)} times fewer bytes, or requests: smaller samples, "
        f"several in one request, or .cache(folder) for later epochs"
    )
    if setup.concurrency != "auto":
        advice += '; concurrency="auto" finds how many fetches get the most'
    return model.faster(
        "source",
        f"{figures.in_flight:.0f} fetches in flight take "
        f"{seconds(sum(figures.fetch_seconds[:1]))} each, "
        f"at {digits(figures.samples / figures.seconds)} samples/s and "
        f"{figures.nbytes / figures.seconds / 1e6:.3g} MB/s, and {shown}",
        advice,
        factor,
    )


def _more_in_flight(
    model: _Model, limit: str, evidence: str, wanted: float, condition: str = ""
) -> Diagnosis:
    """Return the diagnosis with a change to fetch more samples at once.

    The number of samples is `wanted`, or the next power of two.
    """
    figures, setup = model.figures, model.setup
    in_flight = figures.concurrency
    change: dict[str, Any] = {}
    if setup.fixed_look_ahead:
        change["prefetch_factor"] = None  # the look-ahead then follows `concurrency`
    if wanted > in_flight or not change:
        in_flight = min(
            setup.most_concurrency, 1 << math.ceil(math.log2(max(1.0, wanted)))
        )
        change["concurrency"] = in_flight
    advice = ", ".join(f"{name}={value}" for name, value in change.items()) + condition
    now = max(1.0, min(figures.concurrency, model.ahead))
    return model.faster(limit, evidence, advice, in_flight / now, **change)


def _working(model: _Model) -> Diagnosis:
    """Diagnose waits for transforms, collation, or stream functions.

    The functions are the functions of a stream before batching.
    """
    figures, setup = model.figures, model.setup
    workers, most, others = setup.num_workers, setup.cores, model.in_call
    work, functions = figures.workers_busy, figures.functions_busy
    busy, each = work + functions, max(work, functions) * figures.period
    what = "transforms and collation take"
    if functions > work:
        what = "functions of the stream's map and filter take"
    place = f"{busy:.1f} of {workers} workers are busy"
    if not workers:
        place = "in each next(), in the loop's own thread"
        others = max(0.0, others - work * figures.period)
    elif busy < IDLE_WORKERS * workers and workers > 1:
        if figures.full > 0.5:
            return _fetching(model)
        factor = min(workers / max(0.1, busy), model.needed())
        prefetch = math.ceil(setup.look_ahead / workers * max(2.0, factor))
        return model.faster(
            "look-ahead",
            f"{place}, with {setup.look_ahead} batches ahead",
            f"prefetch_factor={prefetch}",
            factor,
            prefetch_factor=prefetch,
        )
    evidence = f"{what} {seconds(each)} for a batch, {place}"
    waits = workers and figures.workers_cpu < WAITING * figures.workers_busy
    if waits:
        cpu = share(figures.workers_cpu / figures.workers_busy)
        evidence += f"; they compute {cpu} of it, and wait for the rest"
    target = max(figures.compute + others, figures.period / 100)
    wanted = max(1, math.ceil(min(MOST * max(1, workers), HEADROOM * each / target)))
    if wanted > most and not waits:
        used = f"{figures.workers_cpu:.1f}"
        evidence += f"; this machine grants {most} cores, of which the workers use {used}"
    number = max(workers, min(wanted, most))
    change = {"num_workers": number} if number > workers else {}
    advice = f"num_workers={number}"
    if not change:
        number = wanted
        advice = (
            f"less work for each sample, 1/{wanted / workers:.2g} of it: decode smaller images, "
            f"transform on the accelerator, or store decoded samples"
        )
    elif not workers and setup.placement in ("thread", "process"):
        advice += ', or num_workers="auto", which finds the number'
    if waits:
        advice = (
            "await in aget what transforms wait for: a worker waits for one thing at a time; "
            f"or {advice}"
        )
    step = max(
        each / number, figures.engine_cpu * figures.period, figures.compute + others
    )
    return Diagnosis("workers", evidence, advice, _waiting(figures.compute, step), change)
