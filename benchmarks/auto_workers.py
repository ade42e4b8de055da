"""num_workers="auto": the rate reached within a minute, of the best number of a sweep.

Transforms sleep, so that workers on this machine stand for those of a larger one; loaders count 16
cores. Each case is read in turn with each number of the sweep, and by "auto" for a minute, whose
last ten seconds count. The SHA-256 of the first batches has to be the same. The last four cases
read objects of 4 KB from a local server that responds after 0, 20 and 100 ms, and from one of 20 ms
that responds 503 above 2,000 requests/s. "auto" begins with one worker, and once more with the
worst number of the sweep, as after a state that has this number.

With `--pipelines` the cases are those of pipelines.py, without their concurrency and
prefetch_factor. With `--ranks 2` as many ranks read at the same time, with transforms that compute
on the cores that there are. ::

    python benchmarks/auto_workers.py [--rounds 5] [--seconds 60] [--only "100 ms"] [--ranks 2]
    python benchmarks/auto_workers.py [--pipelines --sweep 0 1 2 4 8]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from contents import contents
from harness import Figure, claim, describe_machine, parse_arguments
from pipelines import pipelines, sleeping
from servers import Fault, ObjectServer

import headrace as hr
from headrace._consumer import control

CORES = 16.0
SWEEP = (0, 1, 2, 4, 8, 16)
COMPARED = 200  # batches whose SHA-256 is compared
OBJECTS = 12_000
# Latency, and faults.
STORES: dict[str, tuple[float, tuple[Fault, ...]]] = {
    "0 ms": (0.0, ()),
    "20 ms": (0.020, ()),
    "100 ms": (0.100, ()),
    "throttled": (0.020, (Fault("throttle", rate=2000.0, at=50),)),
}


class Numbers(hr.AsyncDataset):
    """Samples that take a while to fetch."""

    splits_by_rank = True  # all ranks of a comparison read the same

    def __len__(self) -> int:
        return 10**7

    async def aget(self, index: int) -> np.ndarray:
        await asyncio.sleep(0.005)
        return np.full(16, index % 251, np.uint8)


class Stream(hr.AsyncIterableDataset):
    """The same, as a stream."""

    async def __aiter__(self) -> AsyncIterator[np.ndarray]:
        for index in range(10**7):
            if index % 64 == 0:
                await asyncio.sleep(0.001)
            yield np.full(16, index % 251, np.uint8)


def computing(sample: Any) -> Any:
    """A transform of some 3 ms of one core."""
    for _ in range(100_000):
        pass
    return sample


def of_store(name: str, **arguments: Any) -> hr.DataLoader[Any]:
    """A loader of a server of its own, which ends with the process."""
    latency, faults = STORES[name]
    server = _server(latency)
    server.misbehave(*faults)
    store = hr.Store(f"{server.url}/objects", options=server.store_options)
    return hr.DataLoader(
        hr.ObjectDataset(store),
        8,
        transform=sleeping(0.005),
        shuffle=True,
        seed=0,
        **arguments,
    )


@functools.cache
def _server(latency: float) -> ObjectServer:
    objects = {f"objects/{name}": data for name, data in contents(OBJECTS, 4_000).items()}
    return ObjectServer(objects, latency=latency).start()


def kept(sample: Any) -> bool:
    """A filter that keeps all samples, so that the map before it is applied before batching."""
    return True


Make = Callable[..., hr.DataLoader[Any]]
# A loader of each kind, and the seconds of a training step.
CASES: dict[str, tuple[Make, float]] = {
    "transform of 5 ms": (
        lambda **n: hr.DataLoader(Numbers(), 8, transform=sleeping(0.005), **n),
        0.01,
    ),
    "the same, no training step": (
        lambda **n: hr.DataLoader(Numbers(), 8, transform=sleeping(0.005), **n),
        0.0,
    ),
    "work of 20 µs a batch": (
        lambda **n: hr.DataLoader(Numbers(), 8, collate_fn=len, **n),
        0.005,
    ),
    "functions of a stream": (
        lambda **n: hr.DataLoader(Stream().map(sleeping(0.005)).filter(kept), 8, **n),
        0.01,
    ),
    "the loop is the limit": (
        lambda **n: hr.DataLoader(Numbers(), 8, transform=sleeping(0.0005), **n),
        0.05,
    ),
    **{f"store, {name}": (functools.partial(of_store, name), 0.01) for name in STORES},
}


def of_pipelines(stack: ExitStack) -> dict[str, tuple[Make, float]]:
    """The pipelines of pipelines.py as cases."""
    made = {name: make() for name, make in pipelines(stack).items()}
    return {
        name: (
            functools.partial(pipeline.make, concurrency="auto", prefetch_factor=None),
            pipeline.step,
        )
        for name, pipeline in made.items()
    }


class Reading(NamedTuple):
    """What was measured of a loader."""

    rate: float  # batches a second
    digest: str  # the SHA-256 of the first batches
    numbers: list[int]  # of workers, in their order


def read(loader: hr.DataLoader[Any], step: float, seconds: float, last: float) -> Reading:
    """Read epochs for some seconds, of which the `last` count for the rate: the whole epochs in them, if there are."""
    digest, times, numbers, starts = hashlib.sha256(), [], [], []
    began = time.perf_counter()
    while not times or times[-1] < seconds or len(times) < COMPARED:
        starts.append(len(times))
        for batch in loader:
            if len(times) < COMPARED:
                digest.update(repr(batch).encode())
            time.sleep(step)
            times.append(time.perf_counter() - began)
            numbers.append(loader.num_workers)
            if times[-1] > seconds and len(times) >= COMPARED:
                break
    counted = [number for number, at in enumerate(times) if at > times[-1] - last]
    epochs = [number for number in starts[1:] if number > counted[0]]
    first, *_, end = [each - 1 for each in epochs] if len(epochs) > 1 else counted
    changes = [number for number, _ in itertools.groupby(numbers)]
    return Reading(
        (end - first) / (times[end] - times[first]), digest.hexdigest(), changes
    )


def of_rank(
    rank: int, ranks: int, workers: int | str, seconds: float, begin: Any, results: Any
) -> None:
    """Read as one rank of a host, at the same time as the others."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    with hr.DataLoader(
        Numbers(), 8, transform=computing, shuffle=True, seed=0, num_workers=workers
    ) as loader:
        next(iter(loader))  # the process is ready
        begin.wait()
        rate = read(loader, 0.0, seconds, seconds / 2).rate
        results.put(rate)


def compare_ranks(arguments: argparse.Namespace) -> None:
    """The rates of all ranks of this host together, with "auto" and with the best number for each."""
    spawn = multiprocessing.get_context("spawn")
    shares: list[float] = []
    for _ in range(arguments.rounds):
        found: dict[Any, float] = {}
        for workers in (0, 1, 2, "auto"):
            begin, results = spawn.Barrier(arguments.ranks), spawn.Queue()
            seconds = (
                arguments.seconds if workers == "auto" else 2 * arguments.fixed_seconds
            )
            given = arguments.ranks, workers, seconds, begin, results
            ranks = [
                spawn.Process(target=of_rank, args=(rank, *given))
                for rank in range(arguments.ranks)
            ]
            for process in ranks:
                process.start()
            reached = [results.get() for _ in ranks]
            for process in ranks:
                process.join()
            found[workers] = sum(reached)
        print(
            ", ".join(f"{workers}: {rate:.1f}" for workers, rate in found.items()),
            "batches/s",
            flush=True,
        )
        shares.append(
            found["auto"]
            / max(rate for workers, rate in found.items() if workers != "auto")
        )
    claim(
        f'num_workers="auto" on {arguments.ranks} ranks of a host',
        Figure("of the best", shares, at_least=0.9),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fixed-seconds", type=float, default=6.0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pipelines", action="store_true")
    parser.add_argument("--sweep", type=int, nargs="+", default=SWEEP)
    arguments = parse_arguments(
        parser, rounds=1, seconds=8.0, fixed_seconds=3.0, only="transform"
    )
    print(describe_machine())
    logging.basicConfig(format="  %(message)s")
    logging.getLogger("headrace").setLevel(logging.INFO)  # the decisions
    if arguments.ranks > 1:
        compare_ranks(arguments)
        return
    control.usable_cores = lambda: CORES  # type: ignore[attr-defined]
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    with ExitStack() as stack:
        cases = of_pipelines(stack) if arguments.pipelines else CASES
        compare(cases, arguments)


def compare(cases: dict[str, tuple[Make, float]], arguments: argparse.Namespace) -> None:
    """The rates of "auto" and of each number of a sweep, in turn."""
    names = arguments.only.split(",")
    chosen = [
        case
        for case in cases
        if (case in names if arguments.pipelines else arguments.only in case)
    ]
    shares: dict[str, list[float]] = {}
    for round_number in range(arguments.rounds):
        for case in chosen or cases:
            make, step = cases[case]
            found: dict[Any, Reading] = {}
            for workers in arguments.sweep:
                with make(num_workers=workers) as loader:
                    found[workers] = read(
                        loader, step, arguments.fixed_seconds, arguments.fixed_seconds / 2
                    )
            by_rate = sorted(found, key=lambda workers: found[workers].rate)
            best = by_rate[-1]
            row = ", ".join(
                f"{workers}: {reading.rate:.1f}" for workers, reading in found.items()
            )
            print(f"round {round_number + 1}, {case}: {row} batches/s", flush=True)
            for start in sorted({1, max(1, by_rate[0])}):
                with make(num_workers="auto") as loader:
                    # as by a state in which the number was found
                    loader._control.search.number = start
                    reading = read(loader, step, arguments.seconds, arguments.seconds / 2)
                assert {reading.digest} == {each.digest for each in found.values()}, (
                    f"{case}: batches differ"
                )
                share = reading.rate / found[best].rate
                shares.setdefault(f"{case}, from {start}", []).append(share)
                print(
                    f"  from {start}: {share:.2f} of the best, {best}; {reading.numbers}",
                    flush=True,
                )
    claim(
        'num_workers="auto" after a minute, of the best of a sweep',
        *(
            Figure(f"of the best, {case}", values, at_least=0.9)
            for case, values in shares.items()
        ),
    )


if __name__ == "__main__":
    main()
