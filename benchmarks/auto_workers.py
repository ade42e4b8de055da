"""num_workers="auto" and engines="auto": the rate reached within a minute, of the best number of a sweep.

Transforms sleep, so that workers on this machine stand for those of a larger one; loaders count 16 cores.
Each case is read in turn with each number of the sweep, and by "auto" for a minute, whose last ten seconds count.
The SHA-256 of the first batches has to be the same. The last four cases read objects of 4 KB from a local server that
responds after 0, 20 and 100 ms, and from one of 20 ms that responds 503 above 2,000 requests/s.

With `--engines`, on a machine of at least 4 cores, the same for the number of engines, of fetches that compute.
With `--ranks 2` as many ranks read at the same time, with transforms that compute on the cores that there are. ::

    python benchmarks/auto_workers.py [--rounds 5] [--seconds 60] [--only "100 ms"] [--ranks 2] [--engines]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
from contents import contents
from harness import Figure, claim, describe_machine, parse_arguments
from servers import Fault, ObjectServer

import headrace as hr
from headrace._core.cgroup import usable_cores
from headrace._core.consumer import control

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


class Computed(Numbers):
    """Samples that take a millisecond of the event loop's thread, in epochs that take some seconds."""

    def __len__(self) -> int:
        return 8_000

    async def aget(self, index: int) -> np.ndarray:
        end = time.thread_time() + 0.001
        while time.thread_time() < end:
            pass
        return await super().aget(index)


class Stream(hr.AsyncIterableDataset):
    """The same, as a stream."""

    async def __aiter__(self) -> AsyncIterator[np.ndarray]:
        for index in range(10**7):
            if index % 64 == 0:
                await asyncio.sleep(0.001)
            yield np.full(16, index % 251, np.uint8)


def sleeping(seconds: float) -> Callable[[Any], Any]:
    """A transform that takes so long, and no core."""

    def transform(sample: Any) -> Any:
        time.sleep(seconds)
        return sample

    return transform


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
    return hr.DataLoader(hr.ObjectDataset(store), 8, transform=sleeping(0.005), shuffle=True, seed=0, **arguments)


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
    "transform of 5 ms": (lambda **n: hr.DataLoader(Numbers(), 8, transform=sleeping(0.005), **n), 0.01),
    "the same, no training step": (lambda **n: hr.DataLoader(Numbers(), 8, transform=sleeping(0.005), **n), 0.0),
    "work of 20 µs a batch": (lambda **n: hr.DataLoader(Numbers(), 8, collate_fn=len, **n), 0.005),
    "functions of a stream": (
        lambda **n: hr.DataLoader(Stream().map(sleeping(0.005)).filter(kept), 8, **n),
        0.01,
    ),
    "the loop is the limit": (lambda **n: hr.DataLoader(Numbers(), 8, transform=sleeping(0.0005), **n), 0.05),
    **{f"store, {name}": (functools.partial(of_store, name), 0.01) for name in STORES},
}


def rates(loader: hr.DataLoader[Any], step: float, seconds: float, last: float) -> tuple[float, str]:
    """Batches a second in the `last` of some seconds, and the SHA-256 of the first batches."""
    digest, times = hashlib.sha256(), []
    batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(loader))  # one epoch after another
    began = time.perf_counter()
    for number, batch in enumerate(batches):
        if number < COMPARED:
            digest.update(repr(batch).encode())
        time.sleep(step)
        times.append(time.perf_counter() - began)
        if times[-1] > seconds and number >= COMPARED:
            break
    del batches
    counted = [at for at in times if at > times[-1] - last]
    return (len(counted) - 1) / (counted[-1] - counted[0]), digest.hexdigest()


def of_rank(rank: int, ranks: int, workers: int | str, seconds: float, begin: Any, results: Any) -> None:
    """Read as one rank of a host, at the same time as the others."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    with hr.DataLoader(Numbers(), 8, transform=computing, shuffle=True, seed=0, num_workers=workers) as loader:
        next(iter(loader))  # the process is ready
        begin.wait()
        rate, _ = rates(loader, 0.0, seconds, seconds / 2)
        results.put((rate, loader.report().chosen))


def compare_ranks(arguments: argparse.Namespace) -> None:
    """The rates of all ranks of this host together, with "auto" and with the best number for each."""
    spawn = multiprocessing.get_context("spawn")
    shares: list[float] = []
    for _ in range(arguments.rounds):
        found: dict[Any, float] = {}
        for workers in (0, 1, 2, "auto"):
            begin, results = spawn.Barrier(arguments.ranks), spawn.Queue()
            seconds = arguments.seconds if workers == "auto" else 2 * arguments.fixed_seconds
            given = arguments.ranks, workers, seconds, begin, results
            ranks = [spawn.Process(target=of_rank, args=(rank, *given)) for rank in range(arguments.ranks)]
            for process in ranks:
                process.start()
            reached = [results.get() for _ in ranks]
            for process in ranks:
                process.join()
            found[workers] = sum(rate for rate, _ in reached)
            for _, chosen in reached:
                print(*(f"  {sentence}" for sentence in chosen), sep="\n")
        print(", ".join(f"{workers}: {rate:.1f}" for workers, rate in found.items()), "batches/s", flush=True)
        shares.append(found["auto"] / max(rate for workers, rate in found.items() if workers != "auto"))
    claim(f'num_workers="auto" on {arguments.ranks} ranks of a host', Figure("of the best", shares, at_least=0.9))


def compare_engines(arguments: argparse.Namespace) -> None:
    """The rates of fixed numbers of engines, and of "auto" after several epochs."""
    if usable_cores() < 4:
        sys.exit("engines of their own cores: this needs 4 cores at least")
    shares: list[float] = []
    for _ in range(arguments.rounds):
        found: dict[Any, float] = {}
        digests = set()
        for engines in (1, 2, 4, 8, "auto"):
            seconds = arguments.seconds if engines == "auto" else arguments.fixed_seconds
            with hr.DataLoader(Computed(), 8, shuffle=True, seed=0, engines=engines) as loader:
                found[engines], digest = rates(loader, 0.0, seconds, min(5.0, seconds / 2))
                digests.add(digest)
                print(*loader.report().chosen, sep="\n")
        assert len(digests) == 1, "batches differ"
        print(", ".join(f"{engines}: {rate:.1f}" for engines, rate in found.items()), "batches/s", flush=True)
        shares.append(found["auto"] / max(rate for engines, rate in found.items() if engines != "auto"))
    claim('engines="auto" after a minute', Figure("of the best", shares, at_least=0.9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fixed-seconds", type=float, default=6.0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--engines", action="store_true")
    arguments = parse_arguments(parser, rounds=1, seconds=8.0, fixed_seconds=3.0, only="transform")
    print(describe_machine())
    if arguments.engines:
        compare_engines(arguments)
        return
    if arguments.ranks > 1:
        compare_ranks(arguments)
        return
    control.usable_cores = lambda: CORES  # type: ignore[attr-defined]
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    cases = {case: made for case, made in CASES.items() if arguments.only in case}
    shares: dict[str, list[float]] = {case: [] for case in cases}
    for round_number in range(arguments.rounds):
        for case, (make, step) in cases.items():
            found: dict[Any, float] = {}
            digests = set()
            for workers in (*SWEEP, "auto"):
                fixed = workers != "auto"
                seconds = arguments.fixed_seconds if fixed else arguments.seconds
                with make(num_workers=workers) as loader:
                    found[workers], digest = rates(loader, step, seconds, min(10.0, seconds / 2))
                    digests.add(digest)
                    chosen = int(loader.num_workers)
                    if not fixed:
                        print(*loader.report().chosen, sep="\n")
            assert len(digests) == 1, f"{case}: batches differ"
            best = max(SWEEP, key=found.__getitem__)
            shares[case].append(found["auto"] / found[best])
            row = ", ".join(f"{workers}: {rate:.1f}" for workers, rate in found.items())
            print(f"round {round_number + 1}, {case}: {row} batches/s; chosen {chosen}, best {best}", flush=True)
    claim(
        'num_workers="auto" after a minute, of the best of a sweep',
        *(Figure(f"of the best, {case}", values, at_least=0.9) for case, values in shares.items()),
    )


if __name__ == "__main__":
    main()
