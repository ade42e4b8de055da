"""The cost of a random order: nanoseconds of CPU an index, and memory, beside torch's and NumPy's.

Arrays of a million indices: `headrace.Permutation`, of which it is the beginning of an order of
10⁹, NumPy's `Generator.permutation` and `torch.randperm`; and as Python ints, as samplers give
them. One plain NumPy operation shows how busy the machine is. Times are of this thread's CPU.
Memory is the growth of the resident set of a process of its own, at its greatest.

    python benchmarks/permutation.py
    # Check that each n up to 4,096, and around 2**k up to k = 24, is bijective for five keys.
    python benchmarks/permutation.py --check
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness import Figure, claim, describe_machine, interleave, parse_arguments

import headrace as hr

N = 1_000_000
LONG = 1_000_000_000
MEMORY: dict[str, Callable[[], object]] = {
    "headrace.Permutation, 10⁹": lambda: sum(
        map(len, itertools.islice(hr.Permutation(LONG, 0).blocks(), 100))
    ),
    "headrace.ElasticSampler, 10⁹": lambda: sum(
        itertools.islice(hr.ElasticSampler(LONG), N)
    ),
    "torch.randperm, 10⁷": lambda: torch.randperm(10 * N),
    "torch.randperm, tolist, 10⁷": lambda: torch.randperm(10 * N).tolist(),
}


def cost(draw: Callable[[], object]) -> float:
    began = time.thread_time()
    draw()
    return (time.thread_time() - began) / N * 1e9


def growth(draw: Callable[[], object]) -> float:
    """MiB by which the resident set is greater at its peak than before."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the imports
    before = peak()
    draw()
    return peak() - before


def peak() -> float:
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def is_bijective(n: int, seed: int) -> bool:
    seen = np.zeros(n, dtype=bool)
    for block in hr.Permutation(n, seed, epoch=seed).blocks():
        seen[block] = True
    return bool(seen.all())


def check() -> None:
    around = [2**k + offset for k in range(1, 25) for offset in (-1, 0, 1)]
    lengths = [*range(4097), *around]
    wrong = [(n, seed) for seed in range(5) for n in lengths if not is_bijective(n, seed)]
    print(
        f"{5 * len(lengths):,} permutations, of up to 2**24 + 1 values: {len(wrong)} are not bijective {wrong}"
    )
    sys.exit(bool(wrong))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--memory", help=argparse.SUPPRESS)
    given = parse_arguments(arguments, rounds=1)
    if given.memory:
        hr.Permutation(10, 0)[:]
        print(growth(MEMORY[given.memory]))
        return
    if given.check:
        check()
    print(describe_machine(), flush=True)
    if not all(is_bijective(n, seed) for n, seed in ((1, 0), (4097, 1), (N, 2))):
        raise RuntimeError(
            "an order lacks an index or has one twice: this run does not count"
        )
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    ones = np.ones(2**14, dtype=np.uint32)
    contestants = {
        "one np.multiply (uint32)": lambda: [
            np.multiply(ones, ones, out=ones) for _ in range(N // 2**14)
        ],
        "headrace.Permutation": lambda: hr.Permutation(N, 0)[:],
        "headrace.Permutation of 10⁹": lambda: hr.Permutation(LONG, 0)[N : 2 * N],
        "np.random.Generator.permutation": lambda: generator.permutation(N),
        "torch.randperm": lambda: torch.randperm(N),
        "headrace.Permutation, tolist": lambda: hr.Permutation(N, 0)[:].tolist(),
        "headrace.ElasticSampler, list": lambda: list(
            hr.ElasticSampler(N).indices_from(0)
        ),
        "torch.randperm, tolist": lambda: torch.randperm(N).tolist(),
    }
    timed = {name: (lambda draw=draw: cost(draw)) for name, draw in contestants.items()}
    costs = interleave(timed, rounds=given.rounds, unit="ns an index")
    costs.show(against="torch.randperm, tolist")
    print("\ngreatest memory [MiB]")
    for name in MEMORY:
        run = [sys.executable, __file__, "--memory", name]
        print(
            f"{name:32}  {float(subprocess.run(run, check=True, capture_output=True, text=True).stdout):8.1f}"
        )
    pairs = zip(
        costs.values["headrace.Permutation"],
        costs.values["headrace.Permutation of 10⁹"],
        strict=True,
    )
    claim("an index of a random order", Figure("ns", list(map(max, pairs)), at_most=34))


if __name__ == "__main__":
    main()
