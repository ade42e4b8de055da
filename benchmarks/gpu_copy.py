"""Copies to a GPU while it computes: share of the peak bandwidth, and step time against a batch that is there already.

Claimed: copies reach 0.95 of the peak of a lone pinned copy while a matmul loop runs; a step takes
1.01 of one whose batch is on the device already, or the copy's own time where that is longer.
Beside headrace: torch's loader with `pin_memory`, and a prefetcher on a side stream as people write
it by hand. Then what page-locked slabs are worth (against staging and pageable memory), and what
packing is worth (114 small tensors).

Bytes at 64 places of every tensor are checked on the device, for all alike, within the clock; the
tests in `tests/gpu`, which run first, look at every byte. Made for one H100 with 16 cores and for
less than ten minutes.

    python benchmarks/gpu_copy.py [--short] [--no-tests]
    python benchmarks/gpu_copy.py --quick            # every path, without a GPU, with no figures
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from gpu_accelerator import Gpu, StandIn
from harness import Figure, Rounds, claim, describe_machine, interleave, parse_arguments

import headrace as hr
from headrace._consumer import control
from headrace._device.copy import Copier, Registry

MIB = 2**20
PEAKS = (1, 4, 16, 38, 64, 154, 256, 1024)
SMALL = 114
PLACES = 64  # where each tensor is looked at
WARM = 5  # steps of each round that do not count: the pipeline fills
# seconds behind which no further comparison begins, so that all ends within ten minutes
LIMIT = 8 * 60
RESIDENT, HEADRACE, TORCH, BY_HAND = (
    "resident",
    "headrace",
    "torch, pin_memory",
    "torch, by hand",
)

Batch = list[torch.Tensor]
Way = Callable[
    ["Bench", "Batches"], AbstractContextManager[Callable[[], Iterator[Batch]]]
]


class Batches(torch.utils.data.Dataset[Batch]):
    """Batches of `size` bytes in `parts` tensors, that cost the workers next to nothing to make."""

    def __init__(self, size: int, length: int, parts: int = 1) -> None:
        self.size, self.parts, self.length = size, parts, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        # Untouched pages cost nothing; the bytes that are checked differ for each batch.
        made = [
            torch.empty(self.size // self.parts, dtype=torch.uint8)
            for _ in range(self.parts)
        ]
        for part in made:
            places(part).fill_(index % 251)
        return made


def places(part: torch.Tensor) -> torch.Tensor:
    return part[:: max(1, len(part) // PLACES)]


class Step:
    """Matrix products that take the device about `seconds`."""

    def __init__(self, gpu: Gpu | StandIn, side: int, seconds: float) -> None:
        self.matrix = torch.eye(side, device=gpu.device, dtype=torch.bfloat16)
        self.times = 50
        gpu.seconds(self)  # clocks and libraries warm up
        self.times = max(1, round(self.times * seconds / gpu.seconds(self)))

    def __call__(self) -> None:
        for _ in range(self.times):
            torch.mm(self.matrix, self.matrix)


def nothing() -> None:
    """A step that does not compute."""


class Bench:
    """What is measured, on what, and how thoroughly.

    Args:
        gpu: the device.
        short: fewer rounds and steps.
    """

    def __init__(self, gpu: Gpu | StandIn, *, short: bool) -> None:
        self.gpu = gpu
        self.rehearses = isinstance(gpu, StandIn)
        self.unit = 1024 if self.rehearses else MIB
        self.rounds = 1 if self.rehearses else 3 if short else 5
        self.steps = WARM + (2 if self.rehearses else 25 if short else 55)
        # One core for the trainer, some for the workers' supervision and torch's pin thread.
        self.workers = (
            1 if self.rehearses else min(12, max(2, len(os.sched_getaffinity(0)) - 3))
        )
        self.side = 8 if self.rehearses else 4096
        self.began = time.monotonic()

    def batches(
        self, size: float, *, steps: int | None = None, parts: int = 1
    ) -> Batches:
        return Batches(round(size * self.unit), steps or self.steps, parts)

    def step(self, seconds: float) -> Step:
        return Step(self.gpu, self.side, seconds)

    def peak(self, size: int) -> float:
        """Bytes a second of a lone pinned copy of so many MiB, the best of three of about 2 GiB."""
        host, there = (
            self.gpu.host(size * self.unit),
            torch.empty(size * self.unit, dtype=torch.uint8),
        )
        there = there.to(self.gpu.device)
        times = max(2, 2048 // size)

        def copy() -> None:
            for _ in range(times):
                there.copy_(host, non_blocking=True)

        return size * self.unit * times / min(self.gpu.seconds(copy) for _ in range(3))

    def timed(
        self,
        batches: Iterator[Batch],
        step: Callable[[], None],
        steps: int,
        *,
        same: bool,
    ) -> float:
        """Milliseconds a step, the first few left out.

        Args:
            batches: as many as steps.
            step: what is computed with each.
            steps: how many.
            same: whether every batch is the first of its dataset.
        """
        seen = []
        began = 0.0
        for number in range(steps):
            if number == WARM:
                self.gpu.synchronize()
                began = time.perf_counter()
            batch = next(batches)
            step()
            seen.append(torch.stack([places(part) for part in batch]))
        self.gpu.synchronize()
        took = (time.perf_counter() - began) / (steps - WARM)
        for number, found in enumerate(seen):
            if found.unique().tolist() != [0 if same else number % 251]:
                raise AssertionError(f"batch {number} has a wrong byte")
        return 1e3 * took

    def compare(
        self,
        title: str,
        data: Batches,
        step: Callable[[], None],
        ways: Mapping[str, Way],
        against: str,
    ) -> Rounds | None:
        """Run all ways in turn and print their table; None where there was no time left, or nothing to be said."""
        print(f"\n{title}", flush=True)
        if time.monotonic() - self.began > LIMIT:
            print(f"left out: {LIMIT} s had passed")
            return None
        with ExitStack() as loaders:
            runs: dict[str, Callable[[], float]] = {}
            absent: dict[str, str] = {}
            for name, way in ways.items():
                begin = loaders.enter_context(way(self, data))

                def run(
                    begin: Callable[[], Iterator[Batch]] = begin, name: str = name
                ) -> float:
                    return self.timed(begin(), step, len(data), same=name == RESIDENT)

                try:
                    run()
                except RuntimeError as error:
                    if not name.startswith("torch"):
                        raise
                    # little /dev/shm, for one
                    absent[name] = f"failed: {str(error).splitlines()[0]}"
                else:
                    runs[name] = run
            rounds = interleave(runs, rounds=self.rounds, unit="ms a step")
        if self.rehearses:
            print(f"ran: {', '.join(runs)}")
            return None
        rounds.show(against=against, absent=absent)
        return rounds


@contextmanager
def resident(bench: Bench, data: Batches) -> Iterator[Callable[[], Iterator[Batch]]]:
    """The limit: a batch that is on the device."""
    batch = [part.to(bench.gpu.device) for part in data[0]]
    yield lambda: iter([batch] * len(data))


@contextmanager
def headrace(bench: Bench, data: Batches) -> Iterator[Callable[[], Iterator[Batch]]]:
    options = {
        "batch_size": None,
        "num_workers": bench.workers,
        "persistent_workers": True,
    }
    with hr.DataLoader(data, device=bench.gpu.device, **options) as loader:
        yield lambda: iter(loader)


@contextmanager
def staged(bench: Bench, data: Batches) -> Iterator[Callable[[], Iterator[Batch]]]:
    """Headrace where no slab may be page-locked: every batch goes through pinned memory."""
    refused = Registry()
    refused.refused = True
    with headrace(bench, data) as begin:

        def begin_staged() -> Iterator[Batch]:
            copier = control.Copier
            control.Copier = lambda streams: Copier(streams, refused)  # type: ignore[assignment,misc]
            try:
                return begin()
            finally:
                control.Copier = copier  # type: ignore[misc]

        yield begin_staged


@contextmanager
def pageable(bench: Bench, data: Batches) -> Iterator[Callable[[], Iterator[Batch]]]:
    """Headrace's batches in host memory, each copied by the loop."""
    with hr.DataLoader(
        data, batch_size=None, num_workers=bench.workers, persistent_workers=True
    ) as loader:
        yield lambda: (
            [part.to(bench.gpu.device, copy=True) for part in batch] for batch in loader
        )


@contextmanager
def one_by_one(bench: Bench, data: Batches) -> Iterator[Callable[[], Iterator[Batch]]]:
    """Headrace's batches in pinned memory, each tensor copied by itself, ahead, on a side stream."""
    options = {
        "batch_size": None,
        "num_workers": bench.workers,
        "persistent_workers": True,
    }
    with hr.DataLoader(data, pin_memory=bench.gpu.pins, **options) as loader:
        yield lambda: ahead(bench.gpu, iter(loader))


@contextmanager
def slabs_at_hand(bench: Bench, data: Batches) -> Iterator[Callable[[], Iterator[Batch]]]:
    """The copies alone: slabs that lie ready, registered, and are copied again and again."""
    with hr.DataLoader(data, batch_size=None, num_workers=bench.workers) as loader:
        kept: list[Batch] = list(loader)
        registry = Registry()

        def begin() -> Iterator[Batch]:
            copier = Copier(control.streams_of(torch.device(bench.gpu.device)), registry)
            try:
                begun = [copier.begin(batch) for batch in kept[:2]]
                for batch in kept[2:]:
                    begun.append(copier.begin(batch))
                    yield copier.claim(begun.pop(0))
                for last in begun:
                    yield copier.claim(last)
            finally:
                copier.close()

        yield begin


def torchs(bench: Bench, data: Batches) -> torch.utils.data.DataLoader[Batch]:
    return torch.utils.data.DataLoader(
        data,
        batch_size=None,
        num_workers=bench.workers,
        pin_memory=bench.gpu.pins,
        persistent_workers=True,
    )


@contextmanager
def torch_pinned(bench: Bench, data: Batches) -> Iterator[Callable[[], Iterator[Batch]]]:
    loader = torchs(bench, data)
    yield lambda: (
        [part.to(bench.gpu.device, non_blocking=True) for part in batch]
        for batch in loader
    )


@contextmanager
def torch_prefetched(
    bench: Bench, data: Batches
) -> Iterator[Callable[[], Iterator[Batch]]]:
    loader = torchs(bench, data)
    yield lambda: ahead(bench.gpu, iter(loader))


def ahead(gpu: Gpu | StandIn, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The prefetcher that people write by hand: one batch ahead, on a stream of its own."""
    side, last = gpu.stream(), None

    def ready(coming: Batch) -> Batch:
        gpu.wait_for(side)
        for part in coming:
            gpu.used_here(part)
        return coming

    for batch in batches:
        # Its copy was enqueued a step ago, and the next is not enqueued yet.
        if last is not None:
            ready(last)
        with gpu.on(side):
            coming = [part.to(gpu.device, non_blocking=True) for part in batch]
        if last is not None:
            yield last
        last = coming
    if last is not None:
        yield ready(last)


def step_times(bench: Bench, peaks: Mapping[int, float]) -> None:
    ways: dict[str, Way] = {
        RESIDENT: resident,
        HEADRACE: headrace,
        TORCH: torch_pinned,
        BY_HAND: torch_prefetched,
    }
    for milliseconds in (5,) if bench.rehearses else (5, 50):
        step = bench.step(milliseconds / 1e3)
        steps = bench.steps if milliseconds == 5 else bench.steps // 2
        for size in (38,) if bench.rehearses else (4, 38, 154):
            title = f"{size} MiB, steps of {milliseconds} ms"
            rounds = bench.compare(
                title, bench.batches(size, steps=steps), step, ways, RESIDENT
            )
            if rounds is None:
                continue
            ratio = rounds.share(HEADRACE, RESIDENT, "of a resident batch", at_most=1.01)
            # A step cannot be shorter than its copy: there the link is the aim.
            took = rounds.figure(
                HEADRACE, "ms", at_most=size * MIB / peaks[size] * 1e3 / 0.95
            )
            aim = f"{ratio.aim}, or ≥ 0.95 of the link ({took.aim})"
            claim(title, ratio, took, aim=aim, met=bool(ratio.met or took.met))


def ablation(bench: Bench, peak: float) -> None:
    """Which memory the copies read, behind each other, while the device multiplies for 0.8 of a copy's time."""
    size = 38
    busy = bench.step(0.8 * size * bench.unit / peak)
    ways: dict[str, Way] = {
        "registered slab": headrace,
        "the copies alone": slabs_at_hand,
        "staging": staged,
        "pageable": pageable,
    }
    title = f"{size} MiB behind each other, under a matmul loop"
    rounds = bench.compare(title, bench.batches(size), busy, ways, "pageable")
    if rounds is None:
        return
    shares = {
        name: [size * MIB / (each / 1e3) / peak for each in rounds.values[name]]
        for name in ways
    }
    print(
        "; ".join(
            f"{name}: {statistics.median(share):.2f} of the peak"
            for name, share in shares.items()
        )
    )
    claim(
        "copies while computing",
        Figure("of the peak", shares["registered slab"], at_least=0.95),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--short",
        action="store_true",
        help="three rounds in place of five, and half the steps",
    )
    parser.add_argument("--no-tests", action="store_true", help="leave out tests/gpu")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="every path on the CPU, without figures; as --quick",
    )
    arguments = parse_arguments(parser, dry_run=True)
    if arguments.dry_run:
        gpu: Gpu | StandIn = StandIn()
    elif torch.cuda.is_available():
        gpu = Gpu()
    else:
        sys.exit("this needs a CUDA device; --dry-run takes every path without one")
    began = time.monotonic()
    if not (arguments.no_tests or arguments.dry_run):
        root = Path(__file__).parents[1]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/gpu",
        ]
        subprocess.run(command, cwd=root, check=True)
    print(f"{gpu.name()}; {describe_machine()}")
    bench = Bench(gpu, short=arguments.short)
    bench.began = began
    peaks = {size: bench.peak(size) for size in PEAKS}
    if not bench.rehearses:
        for size, reached in peaks.items():
            print(f"peak of a pinned copy of {size:5} MiB: {reached / 1e9:6.1f} GB/s")
    ablation(bench, peaks[38])
    packing: dict[str, Way] = {
        "packed": headrace,
        "one by one": one_by_one,
        "torch, one by one": torch_prefetched,
    }
    small = bench.batches(
        SMALL * 4 / 1024 if not bench.rehearses else SMALL * 4, parts=SMALL
    )
    bench.compare(f"{SMALL} tensors of 4 KiB", small, nothing, packing, "one by one")
    step_times(bench, peaks)
    print(f"\n{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
