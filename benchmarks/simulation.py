"""A discrete-event simulation of loaders with several engines on one store; `simulate_scale.py` uses it.

A read waits for one of its engine's fetches, for the store's rate limit and latency, for the host's
network, for a core (the client's threads), and for the engine's event loop, in this order. A batch
whose reads are complete is assembled by one of the engine's workers, and consumed when those before
it have been. All queues are first in, first out; a server that is shared (network, cores, rate
limit) has one queue.

Plans are drawn and sent by the loader's own `Prefetcher`, and dealt to the engine with the fewest
unfinished. Not simulated: retries (a rate limit delays, it does not refuse), bursts that a store
grants, engines that die, a look-ahead bounded by memory, interference between programs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from event_queue import Clock, Servers

from headrace._consumer.prefetch import Prefetcher
from headrace._engine.look_ahead import LookAheadSize
from headrace._records.batches import (
    NO_TIMES,
    BatchPlan,
    FetchLoad,
    HostBatch,
    StageTimes,
)

__all__ = ["Host", "Latency", "Result", "SimulatedStore", "simulate", "simulate_epoch"]


@dataclass(frozen=True)
class Latency:
    """Time to the first byte: log-normal.

    Attributes:
        median: seconds.
        spread: standard deviation of its logarithm; 0 for a fixed latency.
        more: seconds that are added to each.
    """

    median: float
    spread: float = 0.0
    more: float = 0.0

    @property
    def mean(self) -> float:
        """In seconds."""
        return self.median * math.exp(self.spread**2 / 2) + self.more

    def draw(self, generator: random.Random) -> float:
        factor = math.exp(self.spread * generator.gauss(0, 1)) if self.spread else 1.0
        return self.median * factor + self.more


@dataclass(frozen=True)
class SimulatedStore:
    """A store.

    Attributes:
        latency: of a read.
        prefixes: partitions, each with a limit of its own; reads are spread over them at random.
        prefix_rate: reads a second of a partition.
    """

    latency: Latency
    prefixes: int = 1
    prefix_rate: float = math.inf


@dataclass(frozen=True)
class Host:
    """A host with one loader. Times are seconds, of CPU where a core is needed.

    Attributes:
        engines: their number.
        concurrency: fetches of all engines.
        batch: reads of a batch.
        look_ahead: batches planned and not consumed.
        most_ahead: the number that `look_ahead` may grow to; by default it does not grow.
        read_bytes: of a read.
        network: bytes a second of the host.
        cores: of the host.
        loop_cpu: of an engine's event loop for a read.
        native_cpu: of other threads for a read.
        batch_cpu: of an engine's event loop for a batch.
        transform: time of a batch in a worker; 0 for none.
        workers: of each engine.
        step: time of the consumer for a batch.
        hop: time of a plan on its way to an engine, and of a batch on its way to the consumer.
        in_order: whether batches are consumed in the order of their plans.
    """

    engines: int
    concurrency: int
    batch: int
    look_ahead: int
    read_bytes: int = 0
    network: float = math.inf
    cores: int = 1 << 10
    loop_cpu: float = 0.0
    native_cpu: float = 0.0
    batch_cpu: float = 0.0
    transform: float = 0.0
    workers: int = 1
    step: float = 0.0
    hop: float = 0.0
    in_order: bool = True
    most_ahead: int = 0


@dataclass(frozen=True)
class Result:
    """What a simulation has measured, after its first part.

    Attributes:
        rates: batches a second of each host.
        in_flight: reads in flight of each host, on average.
        network: share of the time that the network was busy, of each host.
        loops: the same of the engines' event loops.
        cores: cores busy, of each host.
        waits: share of the time that the consumer waited.
    """

    rates: Sequence[float]
    in_flight: Sequence[float]
    network: Sequence[float]
    loops: Sequence[float]
    cores: Sequence[float]
    waits: Sequence[float]


@dataclass(slots=True, eq=False)
class _Batch:
    number: int
    engine: _Engine
    unread: int  # reads that are not begun
    missing: int  # reads that have not arrived
    times: StageTimes = NO_TIMES


@dataclass(slots=True, eq=False)
class _Engine:
    idle: int  # fetches
    workers: Servers
    held: int = 0
    unused: int = 0  # fetches with nothing to begin, at its last batch
    # of the event loop
    jobs: deque[tuple[float, Callable[[_Batch], None], _Batch]] = field(
        default_factory=deque
    )
    running: bool = False
    busy: float = 0.0  # seconds that the event loop has computed
    batches: deque[_Batch] = field(default_factory=deque)  # with reads that are not begun


class _Loader:
    """A host's loader; it reads for ever, or `batches`."""

    def __init__(
        self,
        host: Host,
        store: SimulatedStore,
        gates: list[Servers],
        clock: Clock,
        seed: int,
        batches: float = math.inf,
    ) -> None:
        # The time of each batch, if it is wanted.
        self.received: list[float] | None = None
        self._host, self._store, self._gates, self._clock = host, store, gates, clock
        self._random = random.Random(seed)
        self._by_index = batches < math.inf  # latencies are those of the samples' indices
        share, more = divmod(host.concurrency, host.engines)
        self._engines = [
            _Engine(max(1, share + (number < more)), Servers(host.workers))
            for number in range(host.engines)
        ]
        self.network, self.cores = Servers(1), Servers(host.cores)
        numbers = itertools.count() if batches == math.inf else range(int(batches))
        ahead = LookAheadSize(host.look_ahead, max(host.look_ahead, host.most_ahead))
        self._plans = Prefetcher(
            (BatchPlan(number, range(host.batch), 0) for number in numbers),
            self._admit,
            ahead,
        )
        self._plans.on_stall(0.0)
        self._next = 0
        self._ready: dict[int, _Batch] = {}
        self._waiting_since: float | None = 0.0
        self.delivered, self.waited = 0, 0.0
        self.in_flight, self.in_flight_seconds, self._since = 0, 0.0, 0.0

    @property
    def loops(self) -> float:
        return sum(engine.busy for engine in self._engines) / len(self._engines)

    def count(self, more: int) -> None:
        """Change the number of reads in flight."""
        self.in_flight_seconds += self.in_flight * (self._clock.now - self._since)
        self.in_flight, self._since = self.in_flight + more, self._clock.now

    def start(self) -> None:
        self._plans.fill()

    def _admit(self, plans: Sequence[BatchPlan]) -> None:
        for plan in plans:
            engine = min(self._engines, key=lambda each: each.held)
            batch = _Batch(plan.number, engine, self._host.batch, self._host.batch)
            engine.held += 1
            self._clock.at(
                self._clock.now + self._host.hop, self._compute, 0.0, self._on_plan, batch
            )

    def _on_plan(self, batch: _Batch) -> None:
        batch.engine.batches.append(batch)
        self._fetch(batch.engine)

    def _fetch(self, engine: _Engine) -> None:
        while engine.idle and engine.batches:
            batch = engine.batches[0]
            engine.idle -= 1
            self.count(1)
            self._request(batch)
            batch.unread -= 1
            if not batch.unread:
                engine.batches.popleft()

    def _request(self, batch: _Batch) -> None:
        now = self._clock.now
        if self._store.prefix_rate < math.inf:
            now = self._random.choice(self._gates).serve(now, 1 / self._store.prefix_rate)
        index = (batch.number + 1) * self._host.batch - batch.unread
        generator = random.Random(index) if self._by_index else self._random
        self._clock.at(
            now + self._store.latency.draw(generator), self._on_first_byte, batch
        )

    def _on_first_byte(self, batch: _Batch) -> None:
        done = self.network.serve(
            self._clock.now, self._host.read_bytes / self._host.network
        )
        self._clock.at(done, self._on_bytes, batch)

    def _on_bytes(self, batch: _Batch) -> None:
        done = self._clock.now
        if self._host.native_cpu:
            done = self.cores.serve(done, self._host.native_cpu)
        self._clock.at(done, self._on_client, batch)

    def _on_client(self, batch: _Batch) -> None:
        self._compute(self._host.loop_cpu, self._on_read, batch)

    def _compute(
        self, seconds: float, then: Callable[[_Batch], None], batch: _Batch
    ) -> None:
        """Let the engine's event loop compute after what it has to do already."""
        batch.engine.jobs.append((seconds, then, batch))
        if not batch.engine.running:
            self._next_job(batch.engine)

    def _next_job(self, engine: _Engine) -> None:
        engine.running = bool(engine.jobs)
        if engine.running:
            seconds, _, _ = engine.jobs[0]
            done = (
                self.cores.serve(self._clock.now, seconds) if seconds else self._clock.now
            )
            self._clock.at(done, self._on_job, engine)

    def _on_job(self, engine: _Engine) -> None:
        seconds, then, batch = engine.jobs.popleft()
        engine.busy += seconds
        then(batch)
        self._next_job(engine)

    def _on_read(self, batch: _Batch) -> None:
        engine = batch.engine
        engine.idle += 1
        self.count(-1)
        self._fetch(engine)
        batch.missing -= 1
        if not batch.missing:
            engine.unused = 0 if engine.batches else engine.idle
            load = FetchLoad(unused=sum(each.unused for each in self._engines))
            batch.times = StageTimes(fetched=self._clock.now, load=load)
            self._compute(self._host.batch_cpu, self._on_reads, batch)

    def _on_reads(self, batch: _Batch) -> None:
        done = batch.engine.workers.serve(self._clock.now, self._host.transform)
        self._clock.at(done, self._compute, 0.0, self._on_assembled, batch)

    def _on_assembled(self, batch: _Batch) -> None:
        self._clock.at(self._clock.now + self._host.hop, self._on_batch, batch)

    def _on_batch(self, batch: _Batch) -> None:
        batch.engine.held -= 1
        self._ready[batch.number] = batch
        if self._waiting_since is not None:
            self._consume()

    def _consume(self) -> None:
        number = self._next if self._host.in_order else min(self._ready, default=-1)
        if number not in self._ready:
            if self._waiting_since is None:
                self._waiting_since = self._clock.now
                self._plans.on_stall(self._clock.now)
            return
        if self._waiting_since is not None:
            self.waited += self._clock.now - self._waiting_since
            self._waiting_since = None
        batch = self._ready.pop(number)
        if self.received is not None:
            self.received.append(self._clock.now)
        self._next += 1
        self.delivered += 1
        plan = BatchPlan(number, (), 0)
        host = HostBatch(plan, None, self._host.batch, times=batch.times)
        if self._plans.on_batch(host, len(self._ready)):
            self._plans.fill()
        self._clock.at(self._clock.now + self._host.step, self._consume)

    def totals(self) -> tuple[float, ...]:
        self.count(0)
        return (
            self.delivered,
            self.in_flight_seconds,
            self.network.busy,
            self.loops,
            self.cores.busy,
            self.waited,
        )


def simulate(
    hosts: Sequence[Host],
    store: SimulatedStore,
    *,
    seconds: float,
    warm_up: float = 0.0,
    seed: int = 0,
) -> Result:
    """Simulate hosts that read from one store.

    Args:
        hosts: each with one loader.
        store: shared by all.
        seconds: of simulated time that count.
        warm_up: seconds before.
        seed: of latencies and partitions.
    """
    clock = Clock()
    gates = [Servers(1) for _ in range(store.prefixes)]
    loaders = [
        _Loader(host, store, gates, clock, seed + number)
        for number, host in enumerate(hosts)
    ]
    for loader in loaders:
        loader.start()
    clock.run(warm_up)
    before = [loader.totals() for loader in loaders]
    clock.run(warm_up + seconds)
    figures = (
        [
            (late - early) / seconds
            for late, early in zip(loader.totals(), first, strict=True)
        ]
        for loader, first in zip(loaders, before, strict=True)
    )
    return Result(*zip(*figures, strict=True))


def simulate_epoch(
    host: Host, store: SimulatedStore, *, batches: int, seed: int = 0
) -> float:
    """Batches a second of one host in the second half of an epoch, at whose end nothing more is planned.

    The latency of a sample is drawn by its index, as by the datasets of `simulated_runs.py`.

    Args:
        host: it.
        store: that it reads from.
        batches: of the epoch.
        seed: of partitions.
    """
    clock = Clock()
    loader = _Loader(
        host, store, [Servers(1) for _ in range(store.prefixes)], clock, seed, batches
    )
    loader.received = []
    loader.start()
    clock.run(math.inf)
    first = batches // 2
    return (batches - first) / (loader.received[-1] + host.step - loader.received[first])
