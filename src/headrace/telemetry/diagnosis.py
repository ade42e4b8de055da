"""What limits a loader, from the figures of an iteration, and the change that helps.

The limit is the step that the loop waits for longest; `fetching` and `working` find the reason where that is the fetch
stage, or transforms and collation.
"""

from __future__ import annotations

from headrace.telemetry.fetching import blocked_loop, busy_loop, diagnose_fetching
from headrace.telemetry.figures import Figures
from headrace.telemetry.formatting import seconds, share
from headrace.telemetry.limits import Diagnosis, Setup
from headrace.telemetry.prediction import Model
from headrace.telemetry.working import diagnose_work

__all__ = ["diagnose"]

# Below these, waiting is not worth a change: the share of the time, and the mean time of `next()` in seconds.
FEW_WAITS = 0.05
FAST_NEXT = 50e-6
BATCHES_AT_LEAST = 10  # for a diagnosis
LONG_START = 0.5  # of the time
PROVEN_BLOCK = 0.01  # of the time, above which blocking calls are the reason if the event loop is late
COPIED = 0.5  # of the batches, above which the loop keeps too many


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
        return blocked_loop(figures, setup, model) if at_start else _start_up(figures)
    if figures.wait_share < FEW_WAITS or figures.waited / figures.batches < FAST_NEXT:
        return Diagnosis(
            "consumer",
            f"next() takes {seconds(figures.waited / figures.batches)}, and the loop itself "
            f"{seconds(figures.compute)} for each batch",
            predicted=figures.wait_share,
        )
    step = max(figures.waits, key=figures.waits.__getitem__)
    if step in ("queue", "fetch"):
        return diagnose_fetching(figures, setup, model)
    if step in ("worker queue", "work"):
        return diagnose_work(figures, setup, model)
    part = share(figures.waits[step] / figures.waited)
    if step == "loop":
        if figures.blocked > PROVEN_BLOCK:
            return blocked_loop(figures, setup, model)
        if (found := busy_loop(figures, setup, model)) is not None:
            return found
    if step == "plan":
        return Diagnosis(
            "look-ahead",
            f"{part} of the waiting is for the sampler, which runs in next()",
            "make the sampler faster, or draw its indices before the epoch",
            model.without("plan"),
        )
    if figures.copied > COPIED:
        return Diagnosis(
            "held-batches",
            f"{share(figures.copied)} of the batches were copied through a socket: the loop keeps so many batches "
            f"that all shared memory is in use",
            "keep no batches, or a copy of the part that you need (batch.clone())",
            model.without("hand-over", "delivery"),
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
