"""Placement of a loader's engines on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace._base.remote_placement import EngineHost, RemotePlacement
from headrace._base.text import check_number, whole_number

START_TIMEOUT = 300.0  # seconds; an autoscaler takes minutes to add a node

_OURS = ("num_cpus", "max_concurrency", "max_restarts", "name")


@dataclass(frozen=True, slots=True)
class RayPlacement(RemotePlacement):
    """Place a loader's engines on a Ray cluster.

    Each engine is a Ray actor, and fetches, transforms and collates whole batches on a node of the
    cluster. Finished batches come over a TCP connection from each engine to the trainer.
    `concurrency`, `memory_budget` and `num_workers` are totals, divided among the engines. The
    batches are the same as without Ray. Connect to the cluster first, with ``ray.init()``.

    Attributes:
        engines: number of engines.
        cpus_per_engine: number of Ray CPUs for each engine. Give the loader about
            ``num_workers=engines * cpus_per_engine``.
        min_engines: number of engines required to begin an epoch; by default all. Further engines
            join the epoch after starting.
        start_timeout: seconds to wait for `min_engines`. After this time, the epoch ends with an
            `EngineStartError`.
        options: further arguments of Ray's ``options()`` for an actor, such as ``resources``,
            ``memory``, and ``runtime_env`` (packages, modules, variables with the credentials of a
            store). By default ``scheduling_strategy`` is ``"SPREAD"``: the engines are on different
            nodes.

    Raises:
        TypeError: a number of engines is not a whole number.
        ValueError: an argument is out of range, or `options` has an option set by headrace.

    Example:
        >>> import headrace as hr
        >>> hr.RayPlacement(engines=4, cpus_per_engine=2, min_engines=2)
        RayPlacement(engines=4, cpus_per_engine=2, min_engines=2)
    """

    name: ClassVar[str] = "ray"

    engines: int = 1
    cpus_per_engine: float = 1
    min_engines: int | None = None
    start_timeout: float = field(default=START_TIMEOUT, repr=False)
    # Options may have credentials, so the repr leaves out options.
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        whole_number("engines", self.engines, 1)
        whole_number("min_engines", self.least, 1, self.engines)
        check_number("cpus_per_engine", self.cpus_per_engine, 0)
        check_number("start_timeout", self.start_timeout, 0)
        if ours := sorted(set(_OURS) & set(self.options)):
            raise ValueError(
                f"options must not set {', '.join(ours)}: "
                "headrace sets them, or they are arguments here"
            )

    @property
    def least(self) -> int:
        """Number of engines required to begin an epoch."""
        return self.engines if self.min_engines is None else self.min_engines

    @property
    def shortage(self) -> str:
        return f"`ray status` shows what is free for {self!r}"

    def hosts(self, setup: Any, engines: int) -> Sequence[EngineHost]:
        from headrace._links.ray_hosts import ray_hosts

        options = {"num_cpus": self.cpus_per_engine, **self.options}
        return ray_hosts(setup, engines, options)
