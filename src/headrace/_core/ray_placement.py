"""Where a loader's engines run on a Ray cluster, as the user says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace._core.text import check_number, whole_number

START_TIMEOUT = 300.0  # seconds; a node that an autoscaler adds takes minutes

_OURS = ("num_cpus", "max_concurrency", "max_restarts", "name")


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """Places a loader's engines on a Ray cluster: ``placement=hr.RayPlacement(engines=16, cpus_per_engine=8)``.

    Each engine is a Ray actor. It fetches, transforms and collates whole batches on its node;
    finished batches come through Ray's object store, one object each. The engines divide
    `concurrency`, `memory_budget` and `num_workers`, and the batches are the same as without Ray.
    Connect to the cluster first, with ``ray.init()``.

    Attributes:
        engines: number of engines.
        cpus_per_engine: Ray's CPUs for each; give the loader about ``num_workers=engines *
            cpus_per_engine``.
        min_engines: engines with which an epoch begins; the others join it when they have started.
            By default all.
        start_timeout: seconds after which an epoch that has fewer ends with an `EngineStartError`.
        options: further arguments of Ray's ``options()`` for an actor, such as ``resources``,
            ``memory``, and ``runtime_env`` (packages, modules, variables with the credentials of a
            store). By default ``scheduling_strategy`` is ``"SPREAD"``: the engines are on different
            nodes.

    Raises:
        TypeError: a number of engines is not a whole number.
        ValueError: an argument is out of range, or names an option that is headrace's.

    Example:
        >>> import headrace as hr
        >>> hr.RayPlacement(engines=4, cpus_per_engine=2, min_engines=2)
        RayPlacement(engines=4, cpus_per_engine=2, min_engines=2)
    """

    engines: int = 1
    cpus_per_engine: float = 1
    min_engines: int | None = None
    start_timeout: float = field(default=START_TIMEOUT, repr=False)
    options: Mapping[str, Any] = field(
        default_factory=dict, repr=False
    )  # they may have credentials

    def __post_init__(self) -> None:
        whole_number("engines", self.engines, 1)
        whole_number("min_engines", self.least, 1, self.engines)
        check_number("cpus_per_engine", self.cpus_per_engine, 0)
        if not 0 < self.start_timeout < math.inf:
            raise ValueError(
                f"start_timeout must be a positive number of seconds, but got {self.start_timeout!r}"
            )
        if ours := sorted(set(_OURS) & set(self.options)):
            raise ValueError(
                f"options must not set {', '.join(ours)}: headrace sets them, or they are arguments here"
            )

    @property
    def least(self) -> int:
        """The number of engines with which an epoch begins."""
        return self.engines if self.min_engines is None else self.min_engines
