"""`concurrency="auto"` of several engines, and of the loaders of two ranks, that read one store.

Objects of 4 KB in batches of 64 from a local server that responds after 100 ms: to 500 requests a
second ("throttled": to others with 503), at 2 MB/s, which is 500 objects/s ("slow": requests wait
for each other), and without a limit. One loader with 1, 2 and 4 engines in turn, and two ranks, the
second of which begins when the first has read for 3 s. In the second half of each run, of 16 s, are
counted: the objects a second, Jain's index of the engines' or ranks' rates (1: all alike; 1/N: one
has everything), refused requests for each served one, and the fetches in flight.

Every byte is compared with the stored one, and the order is checked.

    python benchmarks/fair_engines.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from contents import contents, numbers_of
from contestants import BATCH
from harness import Figure, claim, describe_machine, interleave_figures, parse_arguments
from servers import Fault, ObjectServer
from store import BUCKET, Store

import headrace as hr

OBJECTS, SIZE = 4096, 4000
LIMIT = 500.0  # objects/s
LATENCY = 0.100  # seconds
LATE = 3.0  # seconds after which the second rank begins
REFUSED = Fault("throttle", rate=LIMIT, at=50)
STORES: dict[str, tuple[Fault, ...]] = {
    "throttled": (REFUSED,),
    "slow": (Fault("bandwidth", rate=LIMIT * SIZE),),
    "unlimited": (),
}
UNITS = ("objects/s", "Jain's index", "refused for each served", "fetches in flight")


class Cycle:
    """An order without end: this rank's part of the objects, again and again."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._part = range(rank, OBJECTS, ranks)

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(self._part)

    def __len__(self) -> int:
        return 1 << 30


def collate(samples: Sequence[hr.types.ObjectSample]) -> tuple[int, float, list[int]]:
    """The process, the time and the numbers of a batch."""
    return (
        os.getpid(),
        time.monotonic(),
        numbers_of((sample.data for sample in samples), SIZE),
    )


Read = tuple[list[tuple[int, float]], float]
"""Process and time of each batch; the mean number of fetches in flight."""


def read(
    store: Store,
    engines: int,
    begun: Callable[[], object],
    until: Callable[[], float],
    rank: int,
    of: int,
) -> Read:
    """Read until a time of `time.monotonic`; `begun` is called after a batch of each engine."""
    objects = hr.ObjectDataset(hr.Store(store.url, options=store.options))
    order = Cycle(rank, of)
    batches: list[tuple[int, float]] = []
    processes: set[int] = set()
    # batches of other engines, which were made in time, may be delivered after one that was not
    ended: set[int] = set()
    with hr.DataLoader(
        objects,
        BATCH,
        sampler=order,
        collate_fn=collate,
        engines=engines,
        placement="process",
        concurrency="auto",
    ) as loader:
        expected = iter(order)
        for process, at, numbers in loader:
            if numbers != list(itertools.islice(expected, len(numbers))):
                raise RuntimeError("batches in another order: this run does not count")
            batches.append((process, at))
            if process not in processes:
                processes.add(process)
                if len(processes) == engines:
                    begun()
            if at >= until():
                ended.add(process)
                if len(ended) == engines:
                    break
        return batches, loader.report().in_flight


def read_alone(store: Store, engines: int, seconds: float) -> tuple[list[Read], float]:
    """Read with one loader, for so long after each engine has made a batch; returns the time of the end too."""
    end = math.inf

    def begun() -> None:
        nonlocal end
        end = time.monotonic() + seconds

    return [read(store, engines, begun, lambda: end, 0, 1)], end


def read_as_ranks(store: Store, ranks: int, seconds: float) -> tuple[list[Read], float]:
    """The same with a process for each rank, which begins when the one before has read for `LATE` seconds."""
    with contextlib.ExitStack() as stack:
        programs = []
        for rank in range(ranks):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            command = [sys.executable, __file__, "--rank", store.endpoint]
            program = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            programs.append(stack.enter_context(program))
            assert program.stdout is not None
            program.stdout.readline()
            if rank < ranks - 1:
                time.sleep(LATE)
        end = time.monotonic() + seconds
        answers = [program.communicate(f"{end}\n")[0] for program in programs]
        if any(program.returncode for program in programs):
            raise RuntimeError("a rank has failed: this run does not count")
    return [json.loads(answer) for answer in answers], end


def read_as_rank(endpoint: str) -> None:
    """The program of a rank: prints a line when it has begun, and what it has read by the time that stdin says."""
    end = [math.inf]
    stop = threading.Thread(
        target=lambda: end.append(float(sys.stdin.readline())), daemon=True
    )
    stop.start()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = Store(endpoint, "", SIZE)
    print(
        json.dumps(
            read(store, 1, lambda: print(flush=True), lambda: end[-1], rank, ranks)
        )
    )


def jain(rates: Sequence[float]) -> float:
    """Jain's index of fairness (Jain, Chiu and Hawe, 1984)."""
    return (
        sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))
        if any(rates)
        else 0.0
    )


def run(
    server: ObjectServer,
    store: Store,
    seconds: float,
    faults: Sequence[Fault],
    engines: int,
    ranks: int,
) -> tuple[float, ...]:
    """The figures of one run, in the order of `UNITS`."""
    server.misbehave(*faults)
    reads, end = (
        read_alone(store, engines, seconds)
        if ranks == 1
        else read_as_ranks(store, ranks, seconds)
    )
    began = end - seconds / 2
    shares = Counter(
        process for batches, _ in reads for process, at in batches if began <= at < end
    )
    rates = [count * BATCH / (seconds / 2) for count in shares.values()]
    rates += [0.0] * (engines * ranks - len(rates))
    seen = [
        request.fault == "throttle"
        for request in server.seen()
        if began <= request.at < end
    ]
    return (
        sum(rates),
        jain(rates),
        sum(seen) / max(1, len(seen) - sum(seen)),
        sum(in_flight for _, in_flight in reads),
    )


def compare(name: str, seconds: float, rounds: int, engines: Sequence[int]) -> None:
    """One store: print its tables, and claim."""
    with ObjectServer(contents(OBJECTS, SIZE), bucket=BUCKET, latency=LATENCY) as server:
        store = Store(server.endpoint, "headrace's test server", SIZE)
        run_with = functools.partial(run, server, store, seconds, STORES[name])
        contestants = {
            f"{n} engine{'s' * (n > 1)}": functools.partial(run_with, engines=n, ranks=1)
            for n in engines
        }
        contestants["2 ranks"] = functools.partial(run_with, engines=1, ranks=2)
        tables = interleave_figures(contestants, rounds=rounds, units=UNITS)
    rate, fairness, refused, in_flight = tables
    one, *several = contestants
    print(f"\n{name}:")
    rate.show(against=one)
    for table in (fairness, refused, in_flight):
        for each in contestants:
            values = table.values[each]
            print(
                f"{each:10} {table.median(each):10.4g}  {min(values):10.4g}  {max(values):10.4g}   [{table.unit}]"
            )
    throttles = name == "throttled"
    claim(
        f'`concurrency="auto"` on one store, {name}',
        *(
            rate.share(each, one, f"of the rate of one engine, {each}", at_least=0.9)
            for each in several
        ),
        *(
            Figure(f"Jain's index, {each}", fairness.values[each], at_least=0.9)
            for each in several
        ),
        *(
            Figure(f"refused, {each}", refused.values[each], at_most=0.05)
            for each in several
            if throttles
        ),
    )


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        read_as_rank(sys.argv[2])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=16.0, help="for each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--stores", nargs="+", choices=STORES, default=[*STORES])
    arguments = parse_arguments(
        parser, seconds=2.0, rounds=1, engines=(1, 2), stores=["throttled"]
    )
    print(describe_machine())
    for name in arguments.stores:
        compare(name, arguments.seconds, arguments.rounds, arguments.engines)


if __name__ == "__main__":
    main()
