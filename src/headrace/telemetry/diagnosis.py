"""What limits a loader, from the figures of an iteration, the change that helps, and the waiting after it.

The limit is the step that the loop waits for longest. Where that is the fetch stage, or transforms and collation, the
load of the stage says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace._core.text import digits, rate, seconds, share
from headrace.telemetry.figures import Figures

__all__ = ["Diagnosis", "Setup", "diagnose"]

# Below these, waiting is not worth a change: the share of the time, and the mean time of `next()` in seconds.
FEW_WAITS = 0.05
FAST_NEXT = 50e-6
BATCHES_AT_LEAST = 10  # for a diagnosis
WAITING = 0.1  # CPU seconds of a worker for each second of its work, below which it waits for something else
LONG_START = 0.5  # of the time
HEADROOM = 1.2  # of a change beyond what is needed
MOST = 16.0  # times as fast: no change beyond that is advised at once
THROTTLED = 0.01  # of the requests, above which the store is the limit
BUSY_LOOP = 0.85  # seconds per second in which the engine's thread computes, or could, above which it is the limit
BLOCKED_LOOP = 0.1  # of the time
BLOCKED_WAITING = 0.25  # of all waiting, the first batch included; the watchdog sees a part of what blocks
CROWDED = 0.5  # see `Figures.crowding`
QUEUEING = 2.0  # times a quick one of the first fetches: a quick one of all, where more in flight only wait longer
TURNS = 10  # fetches one after the other, in which concurrency="auto" has tried more in flight
MANY_CORES = 3  # above which several engines have one each, beside the training loop and the workers
IDLE_WORKERS = 0.7  # of the workers, below which more of them would not help
BUSY_WORKERS = 0.9  # of the workers, above which they are the limit, whatever the loop waits for
GAIN = 1.05  # times as many batches a second after a change; one that gives less is not advised

# The steps that `next()` waits for, by what the loop waits for in them.
STAGES = {
    "fetching": ("queue", "fetch"),
    "transforms and collation": ("worker queue", "work"),
    "the sampler": ("plan",),
    "sending batches": ("loop", "hand-over"),
    "delivery": ("delivery",),
}


class Setup(NamedTuple):
    """The arguments of a loader that decide on its speed, and what follows from them."""

    concurrency: int | str
    num_workers: int
    look_ahead: int  # batches that may be planned and not delivered
    most_ahead: int  # the number that this may grow to
    batch_size: int | None  # samples in a batch, if known
    in_order: bool
    memory_budget: int | None
    placement: str  # ``"thread"``, ``"process"`` or ``"inline"``
    stream: bool  # whether the dataset is a stream
    is_async: bool  # whether the dataset is an async one
    cores: int  # CPUs that this process may use
    most_concurrency: int  # fetches that the descriptors allow
    fixed_look_ahead: bool = False  # whether `prefetch_factor` was given, so that it does not follow `concurrency`
    engines: int = 1
    chosen: tuple[str, ...] = ()  # see `Report.chosen`
    remedies: frozenset[str] = frozenset()  # that not every dataset has: "cache", "hedge", options to read more at once


class Diagnosis(NamedTuple):
    """What limits a loader: the last attributes of a `Report`."""

    limit: str
    evidence: str
    advice: str = ""
    predicted: float | None = None
    change: Mapping[str, Any] = {}
    factor: float | None = None


class _Model:
    """Predicts the waiting from the figures of an iteration, if one stage were faster.

    The loop computes for `u` seconds for each batch, and `next()` takes `c` seconds for a batch that is ready. If
    batches come each `P` seconds, one step takes `max(P, u + c)`. A faster stage does not bring `P` below what the
    others allow: their floor is known for the event loop's thread (its CPU time for a batch), for the workers, and, by
    Little's law, for a fixed number of fetches in flight (`window`).
    """

    def __init__(self, figures: Figures, setup: Setup) -> None:
        self.figures, self.setup = figures, setup
        self.in_call = 0.0 if setup.placement == "inline" else figures.in_call_seconds
        in_workers = setup.num_workers and not figures.in_call
        self.floor = max(figures.engine_seconds, figures.work_seconds / setup.num_workers if in_workers else 0.0)
        fixed = setup.is_async and not setup.stream and setup.concurrency != "auto" and figures.concurrency
        self.window = figures.period * figures.in_flight / figures.concurrency if fixed else 0.0

    def needed(self, *, floor: float | None = None) -> float:
        """By how much the limiting stage has to be faster so that it is no longer the limit, with some to spare."""
        figures = self.figures
        target = max(figures.compute + self.in_call, self.floor if floor is None else floor, figures.period / 100)
        return min(MOST, HEADROOM * figures.period / target)

    def after(self, factor: float, *, floor: float | None = None) -> float:
        """The wait share if the limiting stage were faster by a factor."""
        return self.at_period(self.figures.period / factor, floor=floor)

    def at_period(self, period: float, *, floor: float | None = None, in_call: float | None = None) -> float:
        """The wait share if batches came each so many seconds, and `next()` took `in_call` for those that are ready."""
        compute, call = self.figures.compute, self.in_call if in_call is None else in_call
        step = max(period, self.floor if floor is None else floor, compute + call)
        return max(0.0, 1.0 - compute / step) if step else 0.0

    def faster(
        self,
        limit: str,
        evidence: str,
        advice: str,
        factor: float,
        *,
        floor: float | None = None,
        **change: Any,
    ) -> Diagnosis:
        """The diagnosis with a change that makes the limiting stage faster by a factor."""
        return Diagnosis(limit, evidence, advice, self.after(factor, floor=floor), change, factor)

    def without(self, *steps: str) -> float:
        """The wait share without the waiting for some steps."""
        figures = self.figures
        gone = sum(figures.waits[step] for step in steps)
        return max(0.0, figures.waited - gone) / max(1e-9, figures.seconds - gone)


def diagnose(figures: Figures, setup: Setup) -> Diagnosis:
    """The diagnosis of an iteration, without advice that would change nothing."""
    found = _diagnosed(figures, setup)
    if found.predicted is None or found.limit in ("consumer", "start-up") or not figures.compute:
        return found
    if (1.0 - found.predicted) > GAIN * (1.0 - figures.wait_share):
        return found
    return Diagnosis(found.limit, f"{found.evidence}; no single change makes it faster, since other stages limit too")


def _diagnosed(figures: Figures, setup: Setup) -> Diagnosis:
    if figures.batches < BATCHES_AT_LEAST:
        return Diagnosis(
            "few-batches",
            f"only {figures.batches} batches were delivered after the first, which took {seconds(figures.start_up)}",
            "read more batches before asking for a report",
        )
    model, total = _Model(figures, setup), figures.start_up + figures.seconds
    wait = figures.waited / figures.batches
    waiting = figures.start_up + figures.waited
    busy = _workers_are_busy(figures, setup)
    if not busy and waiting > LONG_START * total and _blocked_seconds(figures) > BLOCKED_WAITING * waiting:
        return _blocked_loop(figures)
    if figures.start_up > max(figures.waited, LONG_START * total) and figures.wait_share < LONG_START:
        return Diagnosis(
            "start-up",
            f"the first batch took {seconds(figures.start_up)} of {seconds(total)}, {seconds(figures.first_fetch)} of "
            f"it after the start of fetching; later ones {seconds(wait)} in next()",
            "keep the loader for several epochs (its engine and workers stay), or call iter() before the model is "
            "built",
            figures.wait_share,
        )
    if _holds_the_lock(figures, setup) and (found := _busy_loop(model)) is not None:
        return found
    if figures.wait_share < FEW_WAITS or wait < FAST_NEXT:
        evidence = f"next() takes {seconds(wait)}, and the loop itself {seconds(figures.compute)} for each batch"
        return Diagnosis("consumer", evidence, predicted=figures.wait_share)
    if busy:
        stepping = setup.stream and figures.steps_busy > figures.workers_busy
        return (_stepping if stepping else _working)(model)
    waits = {stage: sum(figures.waits[step] for step in steps) for stage, steps in STAGES.items()}
    return _of_stage(max(waits, key=waits.__getitem__), model)


def _workers_are_busy(figures: Figures, setup: Setup) -> bool:
    """Whether the workers, or the thread without them, have work all the time after the first batch."""
    if figures.start_up > figures.seconds:
        return False
    steps = figures.steps_busy if setup.stream and setup.is_async else 0.0
    return figures.workers_busy + steps > BUSY_WORKERS * max(1, setup.num_workers)


def _of_stage(stage: str, model: _Model) -> Diagnosis:
    figures, setup = model.figures, model.setup
    # Without workers they run in `next()`, whatever that waits for.
    busy = IDLE_WORKERS * setup.num_workers or figures.wait_share / 2
    if setup.stream and setup.is_async and figures.steps_busy > busy and stage in ("fetching", "sending batches"):
        return _stepping(model)
    if stage == "fetching":
        return _fetching(model)
    if stage == "transforms and collation":
        return _working(model)
    part = share(sum(figures.waits[step] for step in STAGES[stage]) / figures.waited)
    late = stage == "sending batches" and figures.waits["loop"] > figures.waits["hand-over"]
    if late and (found := _busy_loop(model)) is not None:
        return found
    if stage == "the sampler":
        return Diagnosis(
            "look-ahead",
            f"{part} of the waiting is for the sampler, which runs in next()",
            "make the sampler faster, or draw its indices before the epoch",
            model.without("plan"),
        )
    if stage == "delivery":
        return Diagnosis(
            "copy",
            f"{part} of the waiting is inside next(), after the batch has arrived: unpickling, pinning, or copying it",
            "return few large tensors from collate_fn; with a GPU, use device=, which copies the next batches while "
            "the loop computes",
            model.without("delivery"),
        )
    change: dict[str, Any] = {}
    advice = "return fewer and larger tensors from collate_fn, or move less: decode later, use smaller dtypes"
    if setup.placement == "process" and setup.engines == 1:
        change["placement"] = "thread"
        advice = f'placement="thread"; or {advice}'
    engine = "the loader's process" if setup.placement == "process" else "the engine's thread"
    source = "the workers" if setup.num_workers else engine
    evidence = f"{part} of the waiting is for batches that are assembled, on their way from {source}"
    return Diagnosis("transport", evidence, advice, model.without("loop", "hand-over", "delivery"), change)


def _fetching(model: _Model) -> Diagnosis:
    """The reason, where the loop waits for batches that are not fetched."""
    figures, setup = model.figures, model.setup
    refused, factor = figures.requests.throttled, model.needed()
    if figures.blocked <= BLOCKED_LOOP and refused:
        # Of an `aget` that does not count its requests: one for each sample and refusal.
        refused_share = refused / (figures.requests.requests or figures.samples + refused)
        if refused_share > THROTTLED:
            return model.faster(
                "throttling",
                f"the store refused {share(refused_share)} of the requests (429 or 503), at "
                f"{rate(figures.samples / figures.seconds)} samples/s",
                f"make 1/{digits(factor)} of the requests: shards in place of objects, "
                + _cache_or(setup, "several prefixes of the bucket"),
                factor,
            )
    if (found := _busy_loop(model)) is not None:
        return found
    if setup.stream:
        return model.faster(
            "latency",
            f"the stream gives {rate(figures.samples / figures.seconds)} samples/s, with the event loop "
            f"{share(figures.engine_cpu)} busy: it waits for its source",
            f"read {digits(factor)} times as much at once: {_read_more(setup)}",
            factor,
        )
    in_flight = f"{figures.in_flight:.0f} of {figures.concurrency} fetches"
    if (found := _saturated(model)) is not None:
        return found
    if figures.full > 0.5:
        return _full(model)
    if figures.held > 0.5:
        mebibytes = math.ceil((setup.memory_budget or 0) * factor / 2**20)
        return model.faster(
            "memory-budget",
            f"plans waited for memory at {share(figures.held)} of the batches, with {in_flight} in flight",
            f"memory_budget={mebibytes} * 2**20",
            factor,
            memory_budget=mebibytes * 2**20,
        )
    if figures.slow_waits > 0.5:
        return _order(model)
    return Diagnosis(
        "look-ahead",
        f"{in_flight} are in flight: the {setup.most_ahead} batches that may be planned ahead are not enough to keep "
        f"more",
        *_more_in_flight(model, _samples_ahead(figures, setup) * factor),
    )


def _cache_or(setup: Setup, other: str) -> str:
    cacheable = setup.remedies & {"cache", "cached"} == {"cache"}
    return f".cache(folder) for later epochs, or {other}" if cacheable else other


def _read_more(setup: Setup) -> str:
    options = sorted(setup.remedies - {"cache", "cached", "hedge"}, reverse=True)
    return " or ".join(f"{each}= of the dataset" for each in options) or "several sources in __aiter__"


def _busy_loop(model: _Model) -> Diagnosis | None:
    """The event loop's thread has no time left; None if it has."""
    figures, setup = model.figures, model.setup
    busy, queued = figures.engine_cpu, figures.engine_queued
    if _blocked_seconds(figures) > BLOCKED_LOOP * (figures.start_up + figures.seconds):
        return _blocked_loop(figures)
    evidence = f"the event loop's thread computes {share(busy)} of the time"
    if busy + queued > BUSY_LOOP:
        factor = model.needed(floor=0.0)
        cpu = busy * figures.seconds / max(1, figures.samples)
        evidence += f", {seconds(cpu)} for a sample"
        if queued > 0.1:
            evidence += f", and waits for a core {share(queued)} of it, since other threads use them"
        advice = (
            f"less Python for each sample, {seconds(cpu / factor)} of it: CPU work in transform=, agets, ranges that "
            f"are read together, or shards"
        )
        change: dict[str, Any] = {}
        if setup.cores > MANY_CORES and not setup.stream:
            engines = min(setup.cores // 2, math.ceil(setup.engines * factor))
            advice += f"; or engines={engines}, which spreads it over cores"
            change = {"engines": engines}
        return model.faster("event-loop", evidence, advice, factor, floor=0.0, **change)
    if setup.placement == "thread" and busy + figures.consumer_cpu > BUSY_LOOP and setup.cores > 1:
        factor = 1 / max(0.05, busy)
        evidence += f" and your loop {share(figures.consumer_cpu)}, under one GIL"
        advice = 'placement="process"'
        return model.faster("event-loop", evidence, advice, factor, placement="process")
    return None


def _holds_the_lock(figures: Figures, setup: Setup) -> bool:
    """Whether the event loop's thread always computes, so that the training loop mostly waits for the GIL.

    The loop's own time for a batch, and that of the hand-over, are then long without CPU time.
    """
    return setup.placement == "thread" and figures.engine_cpu > BUSY_LOOP and figures.consumer_cpu < 1 - BUSY_LOOP


def _blocked_seconds(figures: Figures) -> float:
    """Seconds in which the watchdog has seen calls block the event loop, those before the first batch included."""
    return figures.start_blocked + figures.blocked * figures.seconds


def _blocked_loop(figures: Figures) -> Diagnosis:
    place = f" in {figures.blocked_in}" if figures.blocked_in else ""
    total, blocking = figures.start_up + figures.seconds, _blocked_seconds(figures)
    return Diagnosis(
        "blocked-loop",
        f"for about {share(blocking / total)} of the time, a blocking call{place} stops all fetches",
        "call it with anyio.to_thread.run_sync, which runs 40 at once, use an async client, or do CPU work in "
        "transform=",
    )


def _order(model: _Model) -> Diagnosis:
    """One slow sample holds up the batches after it."""
    figures, setup = model.figures, model.setup
    hedge = 'hedge="auto" if a second request is faster' if "hedge" in setup.remedies else "make slow fetches faster"
    evidence = (
        f"{share(figures.slow_waits)} of the waiting is for batches with a sample that takes more than three times the "
        f"usual time, while later batches are complete"
    )
    if not setup.in_order:
        return Diagnosis("order", evidence, hedge, change={"hedge": "auto"})
    # By Little's law, with the look-ahead full of batches in any state.
    predicted = model.at_period(max(model.window, figures.batch_seconds / setup.most_ahead))
    return Diagnosis("order", evidence, f"in_order=False, or {hedge}", predicted, {"in_order": False})


def _saturated(model: _Model) -> Diagnosis | None:
    """The store, or the link to it, gives no more: fetches wait for each other; None if that is not known."""
    figures, setup = model.figures, model.setup
    searched = setup.concurrency == "auto" and figures.seconds > TURNS * sum(figures.fetch_seconds[:1]) > 0.0
    factor = model.needed()
    remedy = _cache_or(setup, "smaller samples, or several in one request")
    advice = f"{digits(factor)} times fewer bytes, or requests: {remedy}"
    if setup.concurrency != "auto":
        advice += '; concurrency="auto" finds how many fetches get the most'
    if (figures.crowding or 0.0) > CROWDED:
        shown = "the more are in flight, the longer each takes"
    elif figures.quick_fetch_seconds > QUEUEING * figures.first_fetch_seconds > 0.0:
        shown = f"the first ones, which had to wait for few others, took {seconds(figures.first_fetch_seconds)}"
    elif searched and figures.full > 0.5 and figures.grown <= 1.0 and figures.concurrency < setup.most_concurrency:
        shown = 'concurrency="auto" gets no more by more in flight'
    else:
        return None
    return model.faster(
        "source",
        f"{figures.in_flight:.0f} fetches in flight take {seconds(sum(figures.fetch_seconds[:1]))} each, at "
        f"{rate(figures.samples / figures.seconds)} samples/s and {figures.nbytes / figures.seconds / 1e6:.3g} MB/s, "
        f"and {shown}",
        advice,
        factor,
    )


def _full(model: _Model) -> Diagnosis:
    """As many fetches are in flight as may be, and none waits for another as far as is known."""
    figures = model.figures
    evidence = (
        f"{figures.concurrency} in flight take {seconds(sum(figures.fetch_seconds[:1]))} each, at "
        f"{rate(figures.samples / figures.seconds)} samples/s; the window was full {share(figures.full)} of the time"
    )
    change = _more_in_flight(model, figures.concurrency * model.needed())
    tried = 'if the source serves more at once, which concurrency="auto" in a long epoch finds out'
    return Diagnosis("latency", evidence, f"{change[0]}, {tried}", *change[1:])


def _samples_ahead(figures: Figures, setup: Setup) -> float:
    return setup.look_ahead * (setup.batch_size or figures.samples / figures.batches)


def _more_in_flight(model: _Model, wanted: float) -> tuple[str, float, dict[str, Any], float]:
    """The advice, prediction, change and factor with which so many samples are fetched at once."""
    figures, setup = model.figures, model.setup
    change: dict[str, Any] = {}
    ahead = _samples_ahead(figures, setup)
    now = min(float(figures.concurrency), ahead)
    wanted, limit = min(wanted, setup.most_concurrency), figures.concurrency
    if wanted > limit or not setup.fixed_look_ahead:
        power = 2 ** math.ceil(math.log2(max(1.0, wanted)))  # or one and a half times the power before it
        limit = min(setup.most_concurrency, int(0.75 * power) if power >= 4 and wanted <= 0.75 * power else power)
        change["concurrency"] = limit
    if setup.fixed_look_ahead and wanted > ahead:
        per_batch = ahead / setup.look_ahead * max(1, setup.num_workers)
        change["prefetch_factor"] = math.ceil(wanted / per_batch)
        ahead = change["prefetch_factor"] * per_batch
    elif not setup.fixed_look_ahead:
        ahead = max(ahead, limit)
    factor = min(limit, ahead) / max(1.0, now)
    return ", ".join(f"{name}={value}" for name, value in change.items()), model.after(factor), change, factor


def _stepping(model: _Model) -> Diagnosis:
    """The functions of a stream before batching are the limit."""
    figures, setup = model.figures, model.setup
    workers, each = setup.num_workers, figures.steps_busy * figures.period
    where = f"in {workers} workers" if workers else "in the loop's own thread"
    evidence = f"functions of the stream's map and filter take {seconds(each)} for a batch, {where}"
    wanted = math.ceil(min(MOST, HEADROOM * each / max(figures.compute + model.in_call, figures.period / 100)))
    factor = min(wanted, setup.cores) / max(1, workers)
    if factor <= 1 and workers:
        advice = "less work for each sample"
        return model.faster("workers", evidence, advice, wanted / workers, floor=0.0)
    wanted = min(max(1, wanted), setup.cores)
    after = model.at_period(each / wanted, floor=0.0)
    advice = _so_many_workers(wanted, setup)
    return Diagnosis("workers", evidence, advice, after, {"num_workers": wanted}, factor)


def _so_many_workers(number: int, setup: Setup) -> str:
    """The advice to have workers; the search of their number is for async datasets on this machine."""
    searches = not setup.num_workers and setup.placement in ("thread", "process")
    return f"num_workers={number}" + ', or num_workers="auto", which finds the number' * searches


def _working(model: _Model) -> Diagnosis:
    """The reason, where the loop waits for batches that are fetched and not assembled."""
    figures, setup = model.figures, model.setup
    workers, each, most = setup.num_workers, seconds(figures.work_seconds), setup.cores
    if figures.in_call or not workers:
        others = max(0.0, model.in_call - figures.work_seconds)
        wanted = math.ceil(HEADROOM * figures.work_seconds / max(1e-9, figures.compute + others))
        workers = max(1, min(wanted, most))
        return Diagnosis(
            "workers",
            f"transforms and collation take {each} of each next(), in the loop's own thread",
            _so_many_workers(workers, setup),
            model.at_period(figures.work_seconds / workers, in_call=others),
            {"num_workers": workers},
            float(workers),
        )
    evidence = f"{figures.workers_busy:.1f} of {workers} workers are busy"
    idle = figures.workers_busy < IDLE_WORKERS * workers
    if idle and setup.stream and setup.is_async:
        evidence += ", beside functions of the stream's map and filter"
    elif idle and model.window and figures.full > 0.5:
        return _fetching(model)
    elif idle and workers > 1:
        factor = min(workers / max(0.1, figures.workers_busy), model.needed())
        slow = figures.slow_waits > 0.5 or setup.look_ahead > 2 * workers
        if slow and setup.in_order:
            evidence += ": the others wait for a slow batch"
            return model.faster("order", evidence, "in_order=False", factor, in_order=False)
        prefetch = math.ceil(setup.look_ahead / workers * max(2.0, factor))
        evidence += f", with {setup.look_ahead} batches ahead"
        advice = f"prefetch_factor={prefetch}"
        return model.faster("look-ahead", evidence, advice, factor, prefetch_factor=prefetch)
    evidence += f", {each} for a batch, and fetched batches wait for them"
    waits = figures.workers_cpu < WAITING * figures.workers_busy
    if waits:
        evidence += f"; they compute {share(figures.workers_cpu / figures.workers_busy)} of it, and wait for the rest"
    wanted = math.ceil(workers * model.needed(floor=model.window))
    if wanted > most and not waits:
        evidence += f"; this machine grants {setup.cores} cores, of which the workers use {figures.workers_cpu:.1f}"
    if wanted > most and most <= workers:
        factor, change = wanted / workers, {}
        advice = (
            f"less work for each sample, 1/{factor:.2g} of it: decode smaller images, transform on the accelerator, or "
            f"store decoded samples"
        )
    else:
        factor, change = min(wanted, most) / workers, {"num_workers": min(wanted, most)}
        advice = f"num_workers={min(wanted, most)}" + (", and less work for each sample" if wanted > most else "")
    if waits:
        advice = "await in aget what transforms wait for: a worker waits for one thing at a time"
        advice += f"; or num_workers={change['num_workers']}" if change else ""
    return model.faster("workers", evidence, advice, factor, floor=model.window, **change)
