"""What a training host needs of a store: the demand of its GPUs against what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.cli.bench.limits import Bound
from headrace.cli.bench.trials import Trial

__all__ = ["MODELS", "Demand", "Need", "conclusion", "demands", "engine_rate", "needs_of"]

LOOP_FULL = 0.8  # CPU seconds a second of an engine's event loop: a quarter more engines than it computes


@dataclass(frozen=True, slots=True)
class Demand:
    """What the GPUs of a host take.

    Attributes:
        name: of the training job.
        samples: a second, each a read as measured; None where only bytes can be compared.
        nbytes: a second.
    """

    name: str
    samples: float | None
    nbytes: float


@dataclass(frozen=True, slots=True)
class _Model:
    """A workload of MLPerf Storage for one H100 (mlcommons/storage, configs/dlio/workload/*_h100.yaml)."""

    name: str
    batch_size: int
    seconds: float
    utilization: float
    sample_bytes: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second with which a GPU is busy as much as the benchmark demands."""
        return self.batch_size * self.sample_bytes / self.seconds * self.utilization


MODELS = (
    _Model("ResNet-50", 400, 0.224, 0.9, 114_660),
    _Model("CosmoFlow", 1, 0.0035, 0.7, 2_828_486),
    _Model("3D U-Net", 7, 0.323, 0.9, 146_600_628),
)


@dataclass(frozen=True, slots=True)
class Need:
    """What a demand takes, from what was measured.

    Attributes:
        demand: it.
        share: what this store gave this machine, of the demand.
        in_flight: fetches in flight, by Little's law: the rate times the latency.
        cores: CPU seconds a second.
        engines: the loader's `engines`, at least: each has an event loop of its own.
    """

    demand: Demand
    share: float
    in_flight: int
    cores: float
    engines: int


def demands(gpus: int, samples_per_gpu: float | None, sample_bytes: float) -> Iterator[Demand]:
    """The demand of a host: its own where that is given, else those of MLPerf Storage.

    Args:
        gpus: of a host.
        samples_per_gpu: samples that one takes in a second.
        sample_bytes: mean size of a read.
    """
    if samples_per_gpu is not None:
        samples = gpus * samples_per_gpu
        yield Demand(f"{samples:,.0f} samples/s", samples, samples * sample_bytes)
        return
    for model in MODELS:
        yield Demand(model.name, None, gpus * model.bandwidth)


def needs_of(demand: Demand, best: Trial, unloaded: Trial) -> Need:
    """What a demand takes.

    Args:
        demand: of the host.
        best: a trial of the best setting.
        unloaded: a trial of few fetches in flight, for the latency.
    """
    reads = demand.nbytes / (best.nbytes / best.reads)
    latency = unloaded.whole[0] if unloaded.whole else 0.0
    return Need(
        demand,
        best.bandwidth / demand.nbytes,
        math.ceil(reads * latency),
        reads * best.cores / best.rate,
        max(1, math.ceil(reads * best.loop / best.rate / LOOP_FULL)),
    )


def engine_rate(best: Trial) -> float | None:
    """Reads a second that an engine's event loop can compute; None if its CPU time is not known."""
    return LOOP_FULL * best.rate / best.loop if best.loop > 0 and best.rate > 0 else None


def conclusion(bound: Bound) -> str:
    """Whether more engines or hosts help where the demand is not met."""
    return {
        "throttling": "Engines and hosts share the store's rate limit: more of them do not help.",
        "requests": "Whether more hosts help depends on whether the store limits each client or all.",
        "bandwidth": "More engines on this machine do not help; more hosts do if its network is the limit, not the "
        "store.",
        "cpu": "Cores and engines as given, here or on several hosts, if the store keeps up.",
        "in-flight": "As many in flight as given, divided among engines, if the store keeps up.",
        "unknown": "Whether more engines or hosts help was not measured.",
    }[bound.name]
