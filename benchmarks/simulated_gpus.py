"""MLPerf Storage's workloads in the simulation: the ranks of a host with 8 GPUs, and of 64 hosts on one store.

Each rank is a loader with an eighth of its host's network and cores; for a batch its consumer
computes as long as the workload says. Latencies are log-normal. Their spread, the network and the
cores are assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from simulation import Host, Latency, SimulatedStore, simulate
from sizing import (
    FIRST_BYTE,
    GPUS,
    HOSTS,
    MODELS,
    PREFIX_GETS,
    WORKLOADS,
    Model,
    Need,
    Workload,
    table,
)

from headrace._engine.look_ahead import look_ahead, most_ahead

__all__ = ["simulated_cluster", "simulated_host"]

SPREAD = 0.5  # of the logarithm of latencies: one of a hundred takes 3.2 medians
NETWORK = 200e9 / 8  # bytes a second of a host
CORES = 96  # of a host
SIMULATED = 8  # hosts of the cluster, on their share of the partitions


def rank(workload: Workload, *, engines: int, in_flight: int) -> Host:
    """A rank's loader, with requests as reads.

    Args:
        workload: what is read.
        engines: of the rank.
        in_flight: requests.
    """
    model = _model(workload)
    concurrency, batch_size = math.ceil(in_flight / workload.requests), model.batch_size
    ahead = look_ahead(
        prefetch_factor=None,
        num_workers=0,
        concurrency=concurrency,
        batch_size=batch_size,
        engines=engines,
    )
    return Host(
        engines=engines,
        concurrency=in_flight,
        batch=model.batch_size * workload.requests,
        look_ahead=ahead,
        most_ahead=most_ahead(ahead, concurrency=concurrency, batch_size=batch_size),
        read_bytes=round(workload.nbytes / workload.requests),
        network=NETWORK / GPUS,
        cores=CORES // GPUS,
        loop_cpu=workload.cost.python / workload.requests,
        native_cpu=workload.cost.native / workload.requests,
        step=model.seconds,
    )


def _model(workload: Workload) -> Model:
    (model,) = (each for each in MODELS if each.name == workload.name)
    return model


def latency_of(workload: Workload) -> Latency:
    """The time of a request, without what the host's network adds."""
    return Latency(workload.latency(FIRST_BYTE), SPREAD)


@dataclass(frozen=True)
class Setting:
    """A loader of one rank.

    Attributes:
        workload: what it reads.
        engines: their number.
        times: requests in flight, of those by Little's law.
    """

    workload: Workload
    engines: int = 1
    times: float = 1.0

    @property
    def host(self) -> Host:
        in_flight = math.ceil(
            self.times * Need(self.workload, GPUS).in_flight(FIRST_BYTE) / GPUS
        )
        return rank(self.workload, engines=self.engines, in_flight=in_flight)


def simulated_host() -> str:
    """Ranks with engines and requests in flight as computed, and with more."""
    resnet, cosmoflow, unet = WORKLOADS
    settings = (
        *(Setting(resnet, times=times) for times in (1.0, 1.5)),
        *(Setting(cosmoflow, times=times) for times in (1.0, 1.5)),
        *(
            Setting(unet, engines, times)
            for engines, times in ((3, 1.0), (3, 1.5), (2, 1.5), (1, 1.5))
        ),
    )
    rows = []
    for setting in settings:
        host, workload = setting.host, setting.workload
        result = simulate(
            [host], SimulatedStore(latency_of(workload)), seconds=60.0, warm_up=10.0
        )
        busy = f"{_percent(result.rates[0] * host.step)}, {_percent(_model(workload).utilization)}"
        load = _percent(result.loops[0]), _percent(result.network[0])
        rows.append(
            (
                workload.name,
                f"{host.engines}",
                f"{host.concurrency}",
                f"{host.look_ahead} to {host.most_ahead}",
                busy,
                *load,
            )
        )
    head = (
        "a rank",
        "engines",
        "requests in flight",
        "batches ahead",
        "GPU busy, aim",
        "event loops",
        "network",
    )
    return table(head, rows)


def simulated_cluster() -> str:
    """ResNet-50 as single objects, with as many partitions as the rate needs, and with fewer and more."""
    workload = WORKLOADS[0]
    needed = Need(workload, HOSTS * GPUS).prefixes
    rows = []
    for times, in_flight in ((0.7, 1.5), (1.0, 1.5), (1.2, 1.5), (1.2, 3.0), (2.0, 1.5)):
        host = Setting(workload, times=in_flight).host
        partitions = round(needed * times * SIMULATED / HOSTS)
        store = SimulatedStore(
            latency_of(workload), prefixes=partitions, prefix_rate=PREFIX_GETS
        )
        result = simulate([host] * (SIMULATED * GPUS), store, seconds=2.0, warm_up=1.0)
        busy = _percent(fmean(result.rates) * host.step)
        rows.append((f"{partitions * HOSTS // SIMULATED}", f"{host.concurrency}", busy))
    return table(("S3 partitions", "requests in flight of a rank", "GPUs busy"), rows)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
