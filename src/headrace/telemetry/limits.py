"""The limits that a report names, and what the diagnosis knows of the loader."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

__all__ = ["Diagnosis", "Limit", "Setup", "usable_cores"]

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


def usable_cores() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
