"""Real loaders of 1, 2 and 4 engines beside the simulation's prediction; `simulate_scale.py --check` runs it.

What takes a core elsewhere sleeps here, so that two cores can stand for many: a transform sleeps in
the thread that assembles batches, and a read that takes long on the event loop sleeps on it.
Latencies are drawn by the index of a sample; the limited network is that of headrace's test server,
which sends at that rate in all.

On a busy machine a sleep of 50 ms takes 60, and a batch milliseconds to its consumer. So each run
measures how long its latencies, sleeps and hops took, and is predicted twice: from the times that
were asked for, and from those measured. The second tests the model (queues, dealing, look-ahead,
order), the first the machine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from harness import interleave_figures
from servers import Fault, ObjectServer
from simulation import Host, Latency, SimulatedStore, simulate, simulate_epoch

import headrace as hr
from headrace._engine.look_ahead import look_ahead, most_ahead

__all__ = ["SCENARIOS", "Comparison", "compare"]

ENGINES = (1, 2, 4)
SECONDS = 3.0  # of an epoch, as predicted; the second half counts
OBJECTS = 2_000  # of the test server


@dataclass(frozen=True)
class Times:
    """How long a run's parts took on average, in seconds; 0 where it has none, or where it is not known.

    Attributes:
        latency: of a read, beyond what was asked for, before the event loop has computed.
        loop: of a read on the event loop.
        transform: of a batch.
        step: of the consumer.
        hop: of a batch to a consumer that waits for it.
    """

    latency: float
    loop: float
    transform: float
    step: float
    hop: float


@dataclass(frozen=True)
class Scenario:
    """A loader; the engines are given later.

    Attributes:
        limit: what limits it.
        latency: of a read.
        host: with one engine; the look-ahead is computed.
        network: whether objects come from the test server.
        further: batches ahead, of the loader's default.
    """

    limit: str
    latency: Latency
    host: Host
    network: bool = False
    further: int = 1

    def with_engines(self, engines: int) -> Host:
        """The host, with the loader's look-ahead."""
        host = self.host
        ahead = look_ahead(
            prefetch_factor=None,
            num_workers=0,
            concurrency=host.concurrency,
            batch_size=host.batch,
            engines=engines,
        )
        most = most_ahead(ahead, concurrency=host.concurrency, batch_size=host.batch)
        if self.further > 1:
            ahead = most = self.further * ahead // engines * engines
        return replace(host, engines=engines, look_ahead=ahead, most_ahead=most)

    def predict(self, engines: int, batches: int, times: Times | None = None) -> float:
        """Batches a second of the second half of an epoch; from measured times if they are given."""
        host, latency = self.with_engines(engines), self.latency
        if times is not None:
            host = replace(
                host,
                loop_cpu=times.loop,
                transform=times.transform,
                step=times.step,
                hop=times.hop,
            )
            if times.latency:
                latency = replace(latency, more=times.latency)
        store = SimulatedStore(latency)
        return simulate_epoch(host, store, batches=batches)

    @property
    def batches(self) -> dict[int, int]:
        """The batches of an epoch, by the number of engines."""
        store = SimulatedStore(self.latency)
        rates = {
            each: simulate([self.with_engines(each)], store, seconds=10.0).rates[0]
            for each in ENGINES
        }
        return {
            engines: 2 * max(16, round(rate * SECONDS / 2))
            for engines, rate in rates.items()
        }


_LOADER = Host(engines=1, concurrency=64, batch=16, look_ahead=0)

SCENARIOS = (
    Scenario(
        "transform",
        Latency(0.03),
        replace(_LOADER, batch=4, concurrency=256, transform=0.05),
    ),
    Scenario("latency, fixed", Latency(0.05), replace(_LOADER)),
    Scenario("latency, spread", Latency(0.04, 0.8), replace(_LOADER)),
    Scenario(
        "latency, spread; 4 times the look-ahead",
        Latency(0.04, 0.8),
        replace(_LOADER),
        further=4,
    ),
    Scenario(
        "event loop",
        Latency(0.03),
        replace(_LOADER, batch=4, concurrency=32, loop_cpu=0.005),
    ),
    Scenario(
        "network",
        Latency(0.02),
        replace(_LOADER, read_bytes=20_000, network=16e6),
        network=True,
    ),
    Scenario("consumer", Latency(0.03), replace(_LOADER, step=0.05)),
    Scenario(
        "transform, consumer",
        Latency(0.04, 0.8),
        replace(_LOADER, batch=4, concurrency=16, transform=0.05, step=0.02),
    ),
)


class Reads(hr.AsyncDataset[tuple[float, float]]):
    """Samples that take as long as simulated ones; each is what its latency was too long, and its time on the loop."""

    def __init__(self, scenario: Scenario, length: int) -> None:
        self._latency, self._loop, self._length = (
            scenario.latency,
            scenario.host.loop_cpu,
            length,
        )

    def __len__(self) -> int:
        return self._length

    async def aget(self, index: int) -> tuple[float, float]:
        began = time.perf_counter()
        latency = self._latency.draw(random.Random(index))
        await asyncio.sleep(latency)
        arrived = time.perf_counter()
        if self._loop:
            time.sleep(self._loop)  # noqa: ASYNC251  # stands for the loop's CPU time
        return arrived - began - latency, time.perf_counter() - arrived


@dataclass(frozen=True)
class Batch:
    """What a batch's parts took, and when it was complete."""

    samples: int
    latency: float
    loop: float
    transform: float
    complete: float


def assemble(samples: Sequence[Any], *, seconds: float) -> Batch:
    """Collate a batch."""
    began = time.perf_counter()
    if seconds:
        time.sleep(seconds)
    complete = time.perf_counter()
    # Not the test server's objects.
    pairs = [sample for sample in samples if type(sample) is tuple]
    latency, loop = map(fmean, zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return Batch(
        len(samples), latency, loop, complete - began if seconds else 0.0, complete
    )


@contextlib.contextmanager
def opened(scenario: Scenario, engines: int, batches: int) -> Iterator[Any]:
    host = scenario.with_engines(engines)
    open_loader = functools.partial(
        hr.DataLoader,
        batch_size=host.batch,
        engines=engines,
        placement="process",
        concurrency=host.concurrency,
        collate_fn=functools.partial(assemble, seconds=host.transform),
        **(
            {"num_workers": engines, "prefetch_factor": host.look_ahead // engines}
            if scenario.further > 1
            else {}
        ),
    )
    if not scenario.network:
        with open_loader(Reads(scenario, batches * host.batch)) as loader:
            yield loader
        return
    objects = {f"{number:06d}": bytes(host.read_bytes) for number in range(OBJECTS)}
    with ObjectServer(objects, latency=scenario.latency.median) as server:
        server.misbehave(Fault("bandwidth", rate=host.network))
        store = hr.Store(server.url, options=server.store_options)
        data = hr.ObjectDataset(store, keys=[*objects])
        with open_loader(
            data, sampler=[number % OBJECTS for number in range(batches * host.batch)]
        ) as loader:
            yield loader


def measure(loader: Any, batches: int, host: Host) -> tuple[float, Times]:
    """Batches a second of the second half of an epoch, and the times of its parts."""
    found: list[Batch] = []
    hops, steps = [], []
    began = asked = time.perf_counter()
    for batch in loader:
        received = time.perf_counter()
        if len(found) == batches // 2:
            began = received
        if batch.samples != host.batch:
            raise RuntimeError("a batch is not complete: this run does not count")
        found.append(batch)
        if asked < batch.complete:  # it was waited for
            hops.append(received - batch.complete)
        if host.step:
            time.sleep(host.step)
            steps.append(time.perf_counter() - received)
        asked = time.perf_counter()
    if len(found) != batches:
        raise RuntimeError("batches are missing: this run does not count")
    rate = (batches - batches // 2) / (asked - began)
    half = found[batches // 2 :]
    loop = fmean(batch.loop for batch in half) if host.loop_cpu else 0.0
    return rate, Times(
        0.0
        if loop
        else fmean(
            batch.latency for batch in half
        ),  # with it the queue of the loop, which is simulated
        loop,
        fmean(batch.transform for batch in half),
        fmean(steps) if steps else 0.0,
        median(hops) if hops and not loop else 0.0,
    )


@dataclass(frozen=True)
class Comparison:
    """Predictions and what was measured, in batches a second; medians of all rounds.

    Attributes:
        limit: of the scenario.
        engines: their number.
        nominal: predicted from the times that were asked for.
        predicted: from those that were measured.
        measured: the rate.
        errors: of `predicted` in each round, as shares of what was measured.
    """

    limit: str
    engines: int
    nominal: float
    predicted: float
    measured: float
    errors: Sequence[float]

    @property
    def error(self) -> float:
        """The median of `errors`."""
        return median(self.errors)


def compare(scenario: Scenario, rounds: int) -> list[Comparison]:
    """Predict and measure a scenario with each number of engines, interleaved."""
    batches = scenario.batches
    nominal = {
        engines: scenario.predict(engines, batches[engines]) for engines in ENGINES
    }

    def run(loader: Any, engines: int) -> tuple[float, float]:
        rate, times = measure(loader, batches[engines], scenario.host)
        return rate, scenario.predict(engines, batches[engines], times)

    with contextlib.ExitStack() as open_now:
        runs = {}
        for engines in ENGINES:
            loader = open_now.enter_context(opened(scenario, engines, batches[engines]))
            runs[str(engines)] = functools.partial(run, loader, engines)
        measured, predicted = interleave_figures(
            runs, rounds=rounds, units=("measured", "predicted")
        )
    return [
        Comparison(
            scenario.limit,
            engines,
            rate,
            predicted.median(str(engines)),
            measured.median(str(engines)),
            [
                guess / real - 1
                for guess, real in zip(
                    predicted.values[str(engines)],
                    measured.values[str(engines)],
                    strict=True,
                )
            ],
        )
        for engines, rate in nominal.items()
    ]
