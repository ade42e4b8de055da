"""How long the first batch takes: from making the loader to `next()`, with a dataset of 1.28 million keys.

The objects come from a local store that takes 20 ms to the first byte; batches of 64, 64 fetches in
flight. Dataset, store client and loader are made anew each time, the dataset outside the clock.
Claimed: the thread placement needs at most two GETs (the limit, measured in the same round) and 50
ms; a process 150, once the helper process runs, as after the first round. Whatever the placement,
the dataset is never pickled into the pool's workers: pickles of it are counted, and the run fails
where there are more than the one that a loader's process needs. Torch pickles it into every worker
that it spawns.

Then, in a fresh interpreter each time, with 2 workers and scikit-learn in the transform: the first
loader's first batch, and the second's, beside torch's loader (which forks) and beside an
interpreter that imports torch, headrace and scikit-learn and ends. Claimed: the first takes at most
1.5 times that import, the second at most 0.3 s.

Last, in a fresh interpreter each time that has imported torch and headrace, placement="process"
without workers: from `iter()` to the first batch, for a loader that is iterated at once, for one
that was made some seconds before, while the program does other things, and for a second loader;
beside an interpreter that imports torch and ends. Claimed: at most 1.2 times that import at once,
since the helper process imports torch too, and else at most 0.15 s.

    python benchmarks/first_batch.py
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from typing import Any

import obstore
import torch
from harness import (
    Figure,
    claim,
    describe_machine,
    interleave,
    interleave_figures,
    parse_arguments,
)
from obstore.store import from_url
from servers import ObjectServer

import headrace as hr

KEYS = 1_280_000  # as ImageNet has
BATCH = 64
LATENCY = 0.020  # seconds to the first byte
SIZE = 1024
SEED = 7
AHEAD = 1024  # objects that exist: more than any loader fetches ahead of its first batch

LIMIT, HEADRACE, TORCH = "two GETs", "headrace, thread", "torch, spawn, 2 workers"
PROCESS = "headrace, process, 2 workers"


class Counted(hr.ObjectDataset):
    """An object dataset that counts how often it was pickled in this process."""

    pickles = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        Counted.pickles += 1
        return super().__reduce_ex__(protocol)


class Blocking(torch.utils.data.Dataset[int]):
    """The same for torch: a blocking GET in `__getitem__`."""

    def __init__(self, objects: Counted) -> None:
        self.objects = objects

    def __len__(self) -> int:
        return len(self.objects)

    def __getitem__(self, index: int) -> int:
        return len(self.objects[index].data)


def length(sample: hr.types.ObjectSample) -> int:
    return len(sample.data)


class Epoch:
    """The keys, and how a dataset of them is opened."""

    def __init__(self) -> None:
        self.keys = [
            f"train/n{i // 1300:08d}/n{i // 1300:08d}_{i:07d}.JPEG" for i in range(KEYS)
        ]
        first = torch.randperm(KEYS, generator=torch.Generator().manual_seed(SEED))[
            :AHEAD
        ]  # as the sampler draws
        self.needed = {*self.keys[:AHEAD], *(self.keys[i] for i in first)}

    def open(self, server: ObjectServer) -> Counted:
        Counted.pickles = 0
        return Counted(hr.Store(server.url, options=server.store_options), keys=self.keys)


def two_gets(server: ObjectServer, key: str) -> float:
    store = from_url(server.url, **server.store_options)
    began = time.perf_counter()
    for _ in range(2):
        received = obstore.get(store, key).bytes()
        if len(received) != SIZE:
            raise RuntimeError("the store gave a wrong object")
    return (time.perf_counter() - began) * 1e3


def first_batch(
    loader_class: Any, dataset: Any, *, pickles: int, **options: Any
) -> float:
    """Milliseconds to the first batch."""
    began = time.perf_counter()
    loader = loader_class(dataset, batch_size=BATCH, **options)
    batches = iter(loader)
    batch = next(batches)
    elapsed = time.perf_counter() - began
    if batch.tolist() != [SIZE] * BATCH:
        raise RuntimeError("the first batch is wrong: this run does not count")
    if Counted.pickles != pickles:
        raise RuntimeError(
            f"the dataset was pickled {Counted.pickles} times, {pickles} were expected"
        )
    if isinstance(loader, hr.DataLoader):
        loader.close()
    else:
        for (
            _
            # torch's workers may abort where an epoch is left in its middle, and say so.
        ) in batches:
            pass
    return elapsed * 1e3


class Numbers(hr.AsyncDataset[int]):
    def __len__(self) -> int:
        return 2 * BATCH

    async def aget(self, index: int) -> int:
        return index


class TorchNumbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> int:
        return with_scikit_learn(index)


def with_scikit_learn(number: int) -> int:
    import sklearn.ensemble

    assert sklearn.ensemble
    return number


def two_loaders(kind: str) -> None:
    """In an interpreter of its own: print the milliseconds to the first batch of two loaders."""
    with_scikit_learn(0)
    elapsed = []
    for _ in range(2):
        began = time.perf_counter()
        if kind == "headrace":
            loader: Any = hr.DataLoader(
                Numbers(), BATCH, num_workers=2, transform=with_scikit_learn
            )
        else:
            loader = torch.utils.data.DataLoader(TorchNumbers(), BATCH, num_workers=2)
        batches = iter(loader)
        if next(batches).tolist() != list(range(BATCH)):
            raise RuntimeError("the first batch is wrong: this run does not count")
        elapsed.append((time.perf_counter() - began) * 1e3)
        for _ in batches:
            pass
        del batches, loader
    print(*elapsed)


def in_fresh_interpreter(*words: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--two", *words],
        check=True,
        capture_output=True,
        text=True,
    )
    first, second = map(float, done.stdout.split())
    return first, second


def import_of(modules: str) -> tuple[float, float]:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
    elapsed = (time.perf_counter() - began) * 1e3
    return elapsed, elapsed


def starts(wait: float) -> None:
    """In an interpreter of its own: print the milliseconds from `iter()` to the first batch of two loaders."""
    # Due once after the imports, in 0.1 s, wherever the next allocations happen to be.
    gc.collect()
    elapsed = []
    for pause in (wait, 0.0):
        loader = hr.DataLoader(Numbers(), BATCH, placement="process")
        time.sleep(pause)  # the program's other work: it reads arguments, builds a model
        began = time.perf_counter()
        if next(iter(loader)).tolist() != list(range(BATCH)):
            raise RuntimeError("the first batch is wrong: this run does not count")
        elapsed.append((time.perf_counter() - began) * 1e3)
        loader.close()
    print(*elapsed)


TORCH_IMPORT, AT_ONCE, LATER = (
    "an import of torch",
    "headrace, at once",
    "headrace, made some seconds before",
)


def starts_of_the_helper(rounds: int, pause: float) -> None:
    first, second = interleave_figures(
        {
            TORCH_IMPORT: lambda: import_of("torch"),
            AT_ONCE: lambda: in_fresh_interpreter("starts", "0"),
            LATER: lambda: in_fresh_interpreter("starts", str(pause)),
        },
        rounds=rounds,
        units=("ms, first loader", "ms, second loader"),
    )
    print('placement="process", from iter(), each time in a fresh interpreter')
    for figures in (first, second):
        figures.show(against=TORCH_IMPORT)
    claim(
        "first batch in a process, the loader iterated at once",
        first.share(AT_ONCE, TORCH_IMPORT, "× an import of torch", at_most=1.2),
    )
    claim(
        "first batch in a process, the loader made before other work",
        first.figure(LATER, "ms", at_most=150),
        second.figure(LATER, "ms, the second loader", at_most=150),
    )


IMPORT = "the import alone"


def modules_in_workers(rounds: int) -> None:
    first, second = interleave_figures(
        {
            IMPORT: lambda: import_of(
                "torch, headrace.types, headrace.loader, sklearn.ensemble"
            ),
            "headrace": lambda: in_fresh_interpreter("headrace"),
            "torch": lambda: in_fresh_interpreter("torch"),
        },
        rounds=rounds,
        units=("ms, first loader", "ms, second loader"),
    )
    print("scikit-learn in the transform, 2 workers, each time in a fresh interpreter")
    for figures in (first, second):
        figures.show(against=IMPORT)
    claim(
        "first batch of the first loader, scikit-learn in the transform",
        first.share("headrace", IMPORT, "× importing it", at_most=1.5),
    )
    claim(
        "first batch of the second loader", second.figure("headrace", "ms", at_most=300)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--two", choices=("headrace", "torch", "starts"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "pause",
        nargs="?",
        type=float,
        default=4.0,
        help="seconds of the program's other work",
    )
    arguments = parse_arguments(parser, rounds=1, pause=1.0)
    if arguments.two == "starts":
        starts(arguments.pause)
        return
    if arguments.two:
        two_loaders(arguments.two)
        return
    starts_of_the_helper(arguments.rounds, arguments.pause)
    modules_in_workers(arguments.rounds)
    epoch = Epoch()
    with ObjectServer(
        {key: bytes(SIZE) for key in epoch.needed}, latency=LATENCY
    ) as server:

        def headrace(*, pickles: int, **options: Any) -> float:
            return first_batch(
                hr.DataLoader,
                epoch.open(server),
                pickles=pickles,
                transform=length,
                **options,
            )

        def shuffled() -> float:
            sampler = torch.utils.data.RandomSampler(
                epoch.keys, generator=torch.Generator().manual_seed(SEED)
            )
            return headrace(pickles=0, sampler=sampler)

        rounds = interleave(
            {
                LIMIT: lambda: two_gets(server, epoch.keys[0]),
                HEADRACE: lambda: headrace(pickles=0),
                "headrace, thread, shuffled": shuffled,
                "headrace, thread, 2 workers": lambda: headrace(
                    pickles=0, placement="thread", num_workers=2
                ),
                PROCESS: lambda: headrace(pickles=1, placement="process", num_workers=2),
                TORCH: lambda: first_batch(
                    torch.utils.data.DataLoader,
                    Blocking(epoch.open(server)),
                    pickles=2,
                    sampler=range(2 * BATCH),
                    num_workers=2,
                    multiprocessing_context="spawn",
                ),
            },
            rounds=arguments.rounds,
            unit="ms",
        )
    print(f"{KEYS} keys, {LATENCY * 1000:.0f} ms to the first byte, batches of {BATCH}")
    print(describe_machine())
    rounds.show(against=LIMIT)
    print(
        "pickles of the dataset: 0 into the pool's workers, 1 into a loader's process, 2 by torch; as was expected"
    )
    claim(
        f"first batch of {KEYS / 1e6:.2f} M keys, in a process",
        rounds.figure(PROCESS, "ms", at_most=150),
    )
    more = rounds.differences(HEADRACE, LIMIT)
    claim(
        f"first batch of {KEYS / 1e6:.2f} M keys, in a thread",
        Figure("ms more than 2 GETs", more, at_most=50),
    )


if __name__ == "__main__":
    main()
