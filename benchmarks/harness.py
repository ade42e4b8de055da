"""Shared by all benchmarks: interleaved repetitions, medians with ranges, ratios within one run.

Absolute figures of a shared machine mean little; each benchmark runs the contestants and the limit in turn, A B C A B
C …, and compares within each round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import headrace

__all__ = ["CLAIMS", "Rounds", "claim", "describe_machine", "interleave", "interleave_figures", "is_installed"]

CLAIMS = "HEADRACE_CLAIMS"
"""The environment variable that names the file in which claims are collected."""


@dataclass(frozen=True)
class Rounds:
    """The figure of each contestant in each round, in one unit."""

    unit: str
    values: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """The median of one contestant."""
        return statistics.median(self.values[name])

    def ratio(self, name: str, to: str) -> float:
        """The median over the rounds of `name` divided by `to`, each within its round."""
        return statistics.median(a / b for a, b in zip(self.values[name], self.values[to], strict=True))

    def show(self, *, against: str, absent: Mapping[str, str] | None = None) -> None:
        """Print a table: median, range, and the ratio to one contestant.

        Args:
            against: the contestant that the last column compares with.
            absent: contestants that did not run, with the reason.
        """
        absent = absent or {}
        width = max(map(len, (*self.values, *absent)))
        print(f"{'':{width}}  {'median':>10}  {'min':>10}  {'max':>10}  of {against}   [{self.unit}]")
        for name, values in self.values.items():
            row = f"{name:{width}}  {self.median(name):10.4g}  {min(values):10.4g}  {max(values):10.4g}"
            print(f"{row}  {self.ratio(name, against):7.3f}")
        for name, why in absent.items():
            print(f"{name:{width}}  {why}")


def interleave(contestants: Mapping[str, Callable[[], float]], *, rounds: int, unit: str) -> Rounds:
    """Run every contestant once in each round; the first round warms up and does not count.

    Args:
        contestants: each checks its own result, raises if it is wrong, and returns its figure.
        rounds: rounds that count.
        unit: of the figures.
    """

    def alone(run: Callable[[], float]) -> Callable[[], Sequence[float]]:
        return lambda: (run(),)

    alike = {name: alone(run) for name, run in contestants.items()}
    return interleave_figures(alike, rounds=rounds, units=(unit,))[0]


def interleave_figures(
    contestants: Mapping[str, Callable[[], Sequence[float]]], *, rounds: int, units: Sequence[str]
) -> tuple[Rounds, ...]:
    """As `interleave`, for contestants with more than one figure each: one `Rounds` for each of `units`."""
    values: tuple[dict[str, list[float]], ...] = tuple({name: [] for name in contestants} for _ in units)
    for number in range(rounds + 1):
        for name, run in contestants.items():
            figures = run()
            if number:
                for table, figure in zip(values, figures, strict=True):
                    table[name].append(figure)
    return tuple(Rounds(unit, table) for unit, table in zip(units, values, strict=True))


def claim(what: str, *, reached: str, aim: str, met: bool) -> None:
    """Print what was aimed at and what was reached, and add it to the table of all benchmarks if one is being made.

    Args:
        what: the work, in a few words.
        reached: the figures of this run.
        aim: the figures claimed.
        met: whether this run bears the claim out.
    """
    print(f"{what}: {reached}; aim: {aim}: {'met' if met else 'MISSED'}")
    if path := os.environ.get(CLAIMS):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([what, aim, reached, "met" if met else "MISSED"]) + "\n")


def is_installed(name: str) -> bool:
    """Whether a distribution is there to be compared with."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def describe_machine(*peers: str) -> str:
    """The machine, the versions and the commit, on one line.

    Args:
        peers: distributions that the benchmark compares with, beside those that every benchmark has.
    """
    names = filter(is_installed, ("torch", "obstore", "uvloop", "numpy", *peers))
    # From the package itself: where it is only on PYTHONPATH, no distribution of it is installed.
    versions = ", ".join((f"headrace {headrace.__version__}", *(f"{name} {version(name)}" for name in names)))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores, {platform.system()} {platform.machine()}, Python {sys.version.split()[0]}; "
        f"{versions}; commit {commit.stdout.strip() or 'unknown'}"
    )
