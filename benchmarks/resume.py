"""The cost of resuming: time and memory to restore, what keeping the state adds to `next()`, requests after a restore.

Restore: `load_state_dict`, `iter` and the first batch, at 0.9 of an epoch of 10⁶, 10⁸ and 10⁹
samples in random order, beside torchdata's `StatefulDataLoader` and Grain where they are installed;
each run is a process of its own, which has given out a batch before. Memory is the growth of the
resident set at its greatest. States at that position are made from those after the first batch.

`next()`: CPU time of the consumer's thread, a millisecond after the call before, with a queue of
batches. An earlier version can be compared with: the directory of its sources is the argument of
``--baseline``.

Requests: GETs until the first batch, of a loader that begins and of one restored in the middle of a
shard.

    python benchmarks/resume.py
    # Also peers that make the whole order, which takes minutes and 5 GB.
    python benchmarks/resume.py --peers-at-10-8
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import (
    Figure,
    Rounds,
    claim,
    describe_machine,
    interleave_figures,
    is_installed,
    parse_arguments,
)
from servers import ObjectServer

import headrace as hr

BATCH = 256
SAMPLES = 20_000  # of the stream
REST = 0.001  # seconds between two calls


class AtOnce(hr.AsyncDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> int:
        return index

    def __getitem__(self, index: int) -> int:
        return index


def restore_headrace(n: int) -> tuple[float, float]:
    from headrace._order.state import LoaderState

    def make() -> hr.DataLoader[Any]:
        return hr.DataLoader(AtOnce(n), BATCH, shuffle=True, seed=0)

    first = make()
    next(iter(first))
    batches = int(0.9 * n) // BATCH
    samples = batches * BATCH
    begun = LoaderState.from_dict(first.state_dict())
    state = begun._replace(cursor=samples, samples=samples, batches=batches).to_dict()
    first.close()
    loader = make()

    def restore() -> object:
        loader.load_state_dict(state)
        return next(iter(loader)).tolist()

    return measure(restore, hr.Permutation(n, 0)[samples : samples + BATCH].tolist())


def restore_torchdata(n: int) -> tuple[float, float]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        return StatefulDataLoader(AtOnce(n), BATCH, shuffle=True)

    first = iter(make())
    next(first)
    state = first.state_dict()
    batches = int(0.9 * n) // BATCH
    state["_num_yielded"] = state["_sampler_iter_yielded"] = batches
    samples = state["_sampler_iter_state"]
    samples["samples_yielded"] = samples["sampler_iter_state"]["yielded"] = (
        batches * BATCH
    )
    del first
    loader = make()

    def restore() -> object:
        loader.load_state_dict(state)
        return next(iter(loader)).tolist()

    return measure(restore, None)


def restore_grain(n: int) -> tuple[float, float]:
    import grain

    def make() -> Any:
        return iter(
            grain.MapDataset.range(n)
            .shuffle(seed=0)
            .batch(BATCH)
            .to_iter_dataset(grain.ReadOptions(0, 0))
        )

    first = make()
    next(first)
    state = {**first.get_state(), "next_index": int(0.9 * n) // BATCH}

    def restore() -> object:
        loader = make()
        loader.set_state(state)
        return next(loader).tolist()

    return measure(restore, None)


def measure(restore: Callable[[], object], expected: object) -> tuple[float, float]:
    """Milliseconds, and MiB by which the resident set grows."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = peak()
    began = time.perf_counter()
    first = restore()
    took = time.perf_counter() - began
    if expected is not None and first != expected:
        raise RuntimeError(
            "the first batch after the restore is wrong: this run does not count"
        )
    return took * 1e3, peak() - before


def peak() -> float:
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def tar_of(first: int, count: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(first, first + count):
            info = tarfile.TarInfo(f"{number:06}.txt")
            info.size = 200
            tar.addfile(info, io.BytesIO(b"x" * 200))
    return stream.getvalue()


def number_of(sample: Any) -> int:
    return int(sample["__key__"])


def calls(folder: str, count: int) -> tuple[float, ...]:
    """Medians in µs: `next()` of a map-style dataset, of it in random order and of a stream; `state_dict()` of two."""
    in_order = hr.DataLoader(AtOnce(BATCH * (count + 2)), BATCH, seed=0)
    shuffled = hr.DataLoader(AtOnce(BATCH * (count + 2)), BATCH, shuffle=True, seed=0)
    shards = hr.TarDataset(folder, shards_in_parallel=4).map(number_of)
    stream = hr.DataLoader(shards, SAMPLES // (count + 2))
    nexts, states = [], []
    for loader in (in_order, shuffled, stream):
        batches = iter(loader)
        next(batches)
        nexts.append(timed(lambda: next(batches), count))  # noqa: B023
        has_state = hasattr(loader, "state_dict")
        if loader is not shuffled:
            states.append(
                timed(loader.state_dict, count, rest=0) if has_state else float("nan")
            )
        loader.close()
    return (*nexts, *states)


def timed(call: Callable[[], object], count: int, rest: float = REST) -> float:
    times = []
    for _ in range(count):
        time.sleep(rest)
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e6


def first_requests(seconds: float) -> dict[str, tuple[int, int]]:
    """GETs for the first batch and what is prefetched with it: at the beginning, and after a restore within a shard."""
    shards = {f"tar/{shard}.tar": tar_of(shard * 1000, 1000) for shard in range(6)}
    lines = {
        f"lines/{shard}.txt": b"".join(b"%0200d\n" % line for line in range(3000))
        for shard in range(6)
    }
    options: dict[str, Any] = {"shards_in_parallel": 2, "chunk_bytes": 1 << 16}
    found = {}
    with ObjectServer({**shards, **lines}) as server:
        options["store"] = hr.Store(server.url, options=server.store_options)
        kinds: dict[str, Callable[[], Any]] = {
            "tar": lambda: hr.TarDataset(list(shards), **options),
            "tar, shuffled shards": lambda: hr.TarDataset(
                list(shards), shuffle=True, **options
            ),
            "lines": lambda: hr.LinesDataset(list(lines), **options),
        }
        for name, make in kinds.items():
            dataset = make()
            with hr.DataLoader(dataset, 32, collate_fn=list) as loader:
                batches = iter(loader)
                for _ in range(40):
                    next(batches)
                state = loader.state_dict()
            fresh, restored = (
                requests_of(server, dataset, each, seconds) for each in (None, state)
            )
            found[name] = fresh, restored
    return found


def requests_of(server: ObjectServer, dataset: Any, state: Any, seconds: float) -> int:
    settled(server, seconds)
    before = server.requests()["GET"]
    with hr.DataLoader(dataset, 32, collate_fn=list) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)  # kept, so that it prefetches
        next(batches)
        return settled(server, seconds) - before


def settled(server: ObjectServer, seconds: float) -> int:
    """The number of GETs, once it has not grown for that long."""
    count = -1
    while count != (now := server.requests()["GET"]):
        count = now
        time.sleep(seconds)
    return count


RESTORES = {
    "headrace": restore_headrace,
    "grain": restore_grain,
    "torchdata": restore_torchdata,
}
BASELINE = "before"
POWERS = {6: "⁶", 8: "⁸", 9: "⁹"}


def run_apart(*arguments: str, source: str | None = None) -> list[float]:
    environment = (
        dict(os.environ) if source is None else {**os.environ, "PYTHONPATH": source}
    )
    run = [sys.executable, __file__, *arguments]
    done = subprocess.run(
        run, check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return [float(figure) for figure in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument(
        "--baseline", help="the directory of an earlier version's sources"
    )
    arguments.add_argument("--peers-at-10-8", action="store_true")
    arguments.add_argument("--restore", nargs=2, help=argparse.SUPPRESS)
    arguments.add_argument("--calls", help=argparse.SUPPRESS)
    arguments.add_argument("--count", type=int, default=500, help="calls that are timed")
    arguments.add_argument(
        "--settled",
        type=float,
        default=1.5,
        help="seconds without a request after which it rests",
    )
    arguments.add_argument(
        "--powers",
        type=int,
        nargs="+",
        choices=POWERS,
        default=POWERS,
        help="of the lengths",
    )
    given = parse_arguments(arguments, rounds=1, count=20, settled=0.3, powers=(6, 9))
    if given.restore:
        name, n = given.restore
        print(json.dumps(RESTORES[name](int(n))))
        return
    if given.calls:
        print(json.dumps(calls(given.calls, given.count)))
        return
    print(describe_machine("torchdata", "grain"), flush=True)
    show_restores(given.rounds, given.powers, slow_peers=given.peers_at_10_8)
    show_calls(given.rounds, given.baseline, given.count)
    most = 0
    print("\nGETs for the first batch, at the beginning and after a restore")
    for name, (fresh, restored) in first_requests(given.settled).items():
        print(f"{name:24}  {fresh:4}  {restored:4}")
        most = max(most, restored - fresh)
    claim(
        "requests of a restore", Figure("more than at the beginning", [most], at_most=2)
    )


def show_restores(rounds: int, powers: Sequence[int], *, slow_peers: bool) -> None:
    contestants: dict[str, Callable[[], list[float]]] = {}
    for power in powers:
        for name in RESTORES:
            peer = name != "headrace"
            if (not peer or (power < 9 and is_installed(name))) and (
                name != "torchdata" or power < 8 or slow_peers
            ):
                label = f"{name}, 10{POWERS[power]}"
                contestants[label] = lambda name=name, power=power: run_apart(
                    "--restore", name, str(10**power)
                )
    times, memory = interleave_figures(contestants, rounds=rounds, units=("ms", "MiB"))
    for table in (times, memory):
        print()
        table.show(against="headrace, 10⁶")
    claim("a restore in 10⁹ samples", times.figure("headrace, 10⁹", at_most=50))
    claim(
        "memory of a restore in 10⁹ samples", memory.figure("headrace, 10⁹", at_most=19)
    )


def show_calls(rounds: int, baseline: str | None, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(8):
            Path(folder, f"{shard}.tar").write_bytes(
                tar_of(shard * SAMPLES // 8, SAMPLES // 8)
            )
        contestants = {
            "headrace": lambda: run_apart("--calls", folder, "--count", str(count))
        }
        kept = ("next(), map-style", "next(), shuffled", "next(), tar stream")
        if baseline:
            contestants[BASELINE] = lambda: run_apart(
                "--calls", folder, "--count", str(count), source=baseline
            )
        tables = interleave_figures(contestants, rounds=rounds, units=("µs",) * 5)
    names = (*kept, "state_dict(), map-style", "state_dict(), tar stream")
    for name, table in zip(names, tables, strict=True):
        print(f"\n{name}")
        if name not in kept:
            table = Rounds(table.unit, {"headrace": table.values["headrace"]})
        table.show(against="headrace")
        if name.startswith("state_dict"):
            claim(name, table.figure("headrace", at_most=100))
        elif baseline:
            more = table.differences("headrace", BASELINE)
            claim(f"{name} with its state kept", Figure("µs more", more, at_most=5))


if __name__ == "__main__":
    main()
