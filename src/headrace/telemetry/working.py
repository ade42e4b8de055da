"""Why a loop waits for transforms and collation."""

from __future__ import annotations

import math

from headrace.telemetry.figures import Figures
from headrace.telemetry.formatting import seconds, share
from headrace.telemetry.limits import Diagnosis, Setup
from headrace.telemetry.prediction import HEADROOM, Model

__all__ = ["diagnose_work"]

IDLE_WORKERS = 0.7  # of the workers, below which more of them would not help
LEAST_CPU = 0.05  # CPU seconds for each second of work that are assumed at least


def diagnose_work(figures: Figures, setup: Setup, model: Model) -> Diagnosis:
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
