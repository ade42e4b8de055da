"""A plain torch training script's loading with only its import changed: what headrace gives to who changes no more.

A map-style torch dataset, batches of 64, `shuffle=True`, two workers, every other argument at its
default: samples of 4 KB (1,024 floats and a label) and of 602 KB (3 × 224 × 224 floats and a
label). Claimed for the first epoch, which is the script's: no slower than torch at 4 KB, 1.5 times
as fast at 602 KB. Claimed for the second epoch at 4 KB: 4 times as fast as torch, and 0.3 of the
limit.

Each script runs in a process of its own that has imported torch and made the dataset. Three
figures: milliseconds from before `from … import DataLoader` to the first batch; samples a second in
the first epoch, from before that import until the loader is gone, with its workers; and in the
second epoch of a loader with `persistent_workers=True`. The limit is two forked processes that read
and stack every other batch each, into the same memory, and send nothing.

Of headrace's time to the first batch the import takes most, so that its CPU time is shown too: of
`headrace.DataLoader` once torch is imported, of every name of headrace, and of the other packages
alone that a loader needs, which are the least that it could take.

Both loaders get the same seed and must give the same batches in the same order. In every sample the
first and the last value are checked as they come; the order, and all values of each epoch's last
batch, behind the clock.

    python benchmarks/drop_in.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness import Rounds, claim, describe_machine, interleave_figures, parse_arguments

BATCH = 64
STORED = 256  # different samples in memory
SEED = 7
UNITS = (
    "ms to the first batch",
    "samples/s, first epoch",
    "samples/s, second epoch, persistent workers",
)

LIMIT, HEADRACE, TORCH = "two bare loops", "headrace", "torch"
MODULES = {HEADRACE: "headrace", TORCH: "torch.utils.data"}


@dataclass(frozen=True)
class Case:
    """One size of samples."""

    shape: tuple[int, ...]
    batches: int  # in an epoch; torch takes 0.7 to 1 s
    aim: float  # times torch's first epoch
    aim_again: float | None = None  # times torch's second epoch
    share_again: float | None = None  # of the limit's second epoch

    @property
    def samples(self) -> int:
        return BATCH * self.batches

    def __str__(self) -> str:
        size = 4 * torch.Size(self.shape).numel() / 1e3
        return f"{size:.0f} KB a sample {list(self.shape)}, {self.batches} batches of {BATCH} an epoch, 2 workers"


CASES = (Case((1024,), 1000, 1.0, 4.0, 0.3), Case((3, 224, 224), 60, 1.5))


class Stored(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Arrays in memory, and labels; the first and the last value of a sample are its label."""

    def __init__(self, case: Case) -> None:
        self.length = case.samples
        self.stored = torch.rand(
            STORED, *case.shape, generator=torch.Generator().manual_seed(0)
        )
        flat = self.stored.view(STORED, -1)
        flat[:, 0] = flat[:, -1] = torch.arange(STORED)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.stored[index % STORED], index % STORED


@dataclass(frozen=True)
class Outcome:
    """What one script reached, in `UNITS`, and its labels in the order in which they came."""

    figures: tuple[float, float, float]
    labels: list[int]


class Epoch:
    """Reads one epoch, and keeps what is checked behind the clock."""

    def __init__(self) -> None:
        self.labels: list[torch.Tensor] = []
        self.wrong = 0
        self.first = 0.0

    def read(self, loader: Any) -> None:
        for batch in loader:
            self.first = self.first or time.perf_counter()
            flat, labels = batch[0].view(len(batch[0]), -1), batch[1]
            self.wrong += not (
                torch.equal(flat[:, 0], flat[:, -1])
                and torch.equal(flat[:, 0].long(), labels)
            )
            self.labels.append(labels.clone())
        self.last = batch

    def check(self, dataset: Stored) -> list[int]:
        samples, labels = self.last
        order = torch.cat(self.labels)
        each_once = order.bincount().tolist() == [dataset.length // STORED] * STORED
        if (
            self.wrong
            or not each_once
            or not torch.equal(samples, dataset.stored[labels])
        ):
            raise RuntimeError("samples are missing or wrong: this run does not count")
        return order.tolist()


def alone(name: str, case: Case) -> Outcome:
    """Run a script in a process of its own: forked from this one, which has imported torch and not headrace."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(run_script, name, case).result()


def run_script(name: str, case: Case) -> Outcome:
    """What the script does, in this process."""
    dataset = Stored(case)
    if name == LIMIT:
        return run_bare_loops(dataset)
    first, again = Epoch(), Epoch()
    began = time.perf_counter()
    loader_class = importlib.import_module(MODULES[name]).DataLoader
    options: dict[str, Any] = {"shuffle": True, "num_workers": 2}
    loader = loader_class(
        dataset, BATCH, generator=torch.Generator().manual_seed(SEED), **options
    )
    first.read(loader)
    del loader
    ended = time.perf_counter()

    persistent = loader_class(
        dataset,
        BATCH,
        generator=torch.Generator().manual_seed(SEED),
        persistent_workers=True,
        **options,
    )
    Epoch().read(persistent)
    began_again = time.perf_counter()
    again.read(persistent)
    ended_again = time.perf_counter()
    figures = (
        (first.first - began) * 1e3,
        case.samples / (ended - began),
        case.samples / (ended_again - began_again),
    )
    return Outcome(figures, first.check(dataset) + again.check(dataset))


def run_bare_loops(dataset: Stored) -> Outcome:
    """Two processes that do a worker's work and send nothing."""
    began = time.perf_counter()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    ends = [ours for ours, _ in pipes]
    processes = [
        context.Process(target=collate_on_demand, args=(theirs, dataset, half))
        for half, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()

    def epoch() -> float:
        for end in ends:
            end.send(True)
        for end in ends:
            end.recv()
        first = time.perf_counter()
        for end in ends:
            end.recv()
        return first

    first = epoch()
    ended = time.perf_counter()
    epoch()
    ended_again = time.perf_counter()
    for end in ends:
        end.send(False)
    for process in processes:
        process.join()
    ending = time.perf_counter() - ended_again
    figures = (
        (first - began) * 1e3,
        dataset.length / (ended - began + ending),
        dataset.length / (ended_again - ended),
    )
    return Outcome(figures, [])


def collate_on_demand(requests: Connection, dataset: Stored, half: int) -> None:
    torch.set_num_threads(1)
    order = torch.randperm(
        dataset.length, generator=torch.Generator().manual_seed(SEED)
    ).tolist()
    out = torch.empty(BATCH, *dataset.stored.shape[1:])
    while requests.recv():
        for start in range(half * BATCH, dataset.length, 2 * BATCH):
            samples, labels = zip(
                *(dataset[index] for index in order[start : start + BATCH]), strict=True
            )
            torch.stack(samples, out=out)
            torch.tensor(labels)
            if start == half * BATCH:
                requests.send("first")
        requests.send("done")


NEEDED = ("cloudpickle", "uvloop")  # by a loader of a torch dataset
IMPORTED: dict[str, Callable[[], object]] = {
    "headrace.DataLoader": lambda: importlib.import_module("headrace").DataLoader,
    "every name": lambda: exec("from headrace import *", {}),
    "the packages it needs": lambda: [importlib.import_module(name) for name in NEEDED],
}


def import_cpu(name: str) -> tuple[float]:
    """Milliseconds of CPU for an import, in a process of its own, as `alone`."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(time_import, name).result()


def time_import(name: str) -> tuple[float]:
    began = time.process_time()
    IMPORTED[name]()
    return ((time.process_time() - began) * 1e3,)


def compare_imports(rounds: int) -> None:
    contestants = {name: functools.partial(import_cpu, name) for name in IMPORTED}
    (cpu,) = interleave_figures(
        contestants, rounds=rounds, units=("ms of CPU to import it",)
    )
    cpu.show(against="headrace.DataLoader")


def compare(case: Case, rounds: int) -> tuple[Rounds, ...]:
    orders: dict[str, list[int]] = {}

    def contestant(name: str) -> Callable[[], tuple[float, float, float]]:
        def run() -> tuple[float, float, float]:
            outcome = alone(name, case)
            if (
                outcome.labels
                and orders.setdefault("torch's", outcome.labels) != outcome.labels
            ):
                raise RuntimeError(
                    "the loaders give different orders: this run does not count"
                )
            return outcome.figures

        return run

    return interleave_figures(
        {name: contestant(name) for name in (LIMIT, HEADRACE, TORCH)},
        rounds=rounds,
        units=UNITS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, rounds=1)
    # In a quick run epochs are short, of whole passes over the stored samples.
    cases = [
        dataclasses.replace(case, batches=8) if arguments.quick else case
        for case in CASES
    ]
    compared = {case: compare(case, arguments.rounds) for case in cases}
    print(describe_machine())
    compare_imports(arguments.rounds)
    for case, tables in compared.items():
        print(f"\n{case}")
        for table in tables:
            table.show(against=LIMIT)
        to_first, first, again = tables
        claim(
            f"a torch script with its import changed, {case}",
            first.share(HEADRACE, TORCH, "× torch in the first epoch", at_least=case.aim),
            again.share(
                HEADRACE, TORCH, "× torch in the second epoch", at_least=case.aim_again
            ),
            again.share(
                HEADRACE,
                LIMIT,
                "of two bare loops in the second epoch",
                at_least=case.share_again,
            ),
            to_first.share(
                HEADRACE, TORCH, "× torch's time to the first batch", at_most=1.2
            ),
        )


if __name__ == "__main__":
    main()
