"""Shared by all benchmarks: interleaved repetitions, medians with ranges, ratios within one run, and claims.

Absolute figures of a shared machine mean little; each benchmark runs the contestants and the limit
in turn, A B C A B C …, and compares within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import headrace

__all__ = [
    "RECORDS",
    "Figure",
    "Rounds",
    "claim",
    "commit",
    "describe_machine",
    "interleave",
    "interleave_figures",
    "is_installed",
    "is_quick",
    "machine",
    "parse_arguments",
]

RECORDS = "HEADRACE_BENCHMARK_RECORDS"
"""The environment variable that names the file in which claims and tables are collected, a line of JSON each."""

QUICK = "HEADRACE_BENCHMARK_QUICK"
"""The environment variable by which a benchmark's own processes know that it is a quick run."""


def parse_arguments(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parse the command line, with the option ``--quick``: little work, every check of bytes, and no claims.

    Args:
        parser: the benchmark's own.
        quick: what other options are with ``--quick`` unless they are given too.
    """
    parser.add_argument(
        "--quick",
        action="store_true",
        help="seconds in place of minutes: does it run? Claims nothing",
    )
    if parser.parse_args().quick:
        parser.set_defaults(**quick)
        os.environ[QUICK] = "1"
    return parser.parse_args()


def is_quick() -> bool:
    """Whether this is a quick run, of which nothing is claimed."""
    return QUICK in os.environ


@dataclass(frozen=True)
class Figure:
    """A figure of a claim.

    Attributes:
        words: what follows the number: its unit, or what it is a share of, e.g. ``"× torch"``.
        values: the figure in each repetition.
        at_least: the lowest value that is claimed; None if there is none.
        at_most: the highest value that is claimed.
        higher_is_better: needed if nothing is claimed of it.
        stated: the value that is compared with the claim, if it is not the median.
    """

    words: str
    values: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None
    higher_is_better: bool | None = None
    stated: float | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"the figure {self.words!r} has no value")
        if self.higher_is_better is None and (self.at_least is None) == (
            self.at_most is None
        ):
            raise ValueError(
                f"the figure {self.words!r} needs at_least, at_most or higher_is_better"
            )

    @property
    def value(self) -> float:
        """The value that is compared with the claim."""
        return statistics.median(self.values) if self.stated is None else self.stated

    @property
    def improves_upwards(self) -> bool:
        """Whether a higher value is better."""
        return (
            self.at_least is not None
            if self.higher_is_better is None
            else self.higher_is_better
        )

    @property
    def met(self) -> bool | None:
        """Whether the value is within what is claimed; None if nothing is."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def aim(self) -> str:
        """What is claimed, in words; empty if nothing is."""
        bounds = (("≥", self.at_least), ("≤", self.at_most))
        return ", ".join(
            f"{sign} {number(bound)} {self.words}"
            for sign, bound in bounds
            if bound is not None
        )

    def __str__(self) -> str:
        shown = f"{number(self.value)} {self.words}"
        if len(self.values) == 1:
            return shown
        return f"{shown} ({number(min(self.values))} to {number(max(self.values))})"


def number(value: float) -> str:
    """A figure with three digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


COSTS = ("ns", "µs", "ms", "s", "MB", "MiB", "requests")


@dataclass(frozen=True)
class Rounds:
    """The figure of each contestant in each round, in one unit."""

    unit: str
    values: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """The median of one contestant."""
        return statistics.median(self.values[name])

    def ratios(self, name: str, to: str) -> list[float]:
        """`name` divided by `to`, in each round."""
        return [a / b for a, b in zip(self.values[name], self.values[to], strict=True)]

    def differences(self, name: str, to: str) -> list[float]:
        """`name` less `to`, in each round."""
        return [a - b for a, b in zip(self.values[name], self.values[to], strict=True)]

    def ratio(self, name: str, to: str) -> float:
        """The median over the rounds of `name` divided by `to`, each within its round."""
        return statistics.median(self.ratios(name, to))

    @property
    def higher_is_better(self) -> bool:
        """Whether the unit is of a rate; a cost otherwise."""
        word = self.unit.replace(",", " ").split()[0]
        if word.endswith("/s"):
            return True
        if word in COSTS:
            return False
        raise ValueError(
            f"the unit {self.unit!r} begins neither with a rate (…/s) nor with one of {', '.join(COSTS)}"
        )

    def share(
        self,
        name: str,
        of: str,
        words: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> Figure:
        """The ratio of two contestants as the figure of a claim; `words` is ``of …`` by default."""
        words = words or f"of {of}"
        return Figure(
            words, self.ratios(name, of), at_least, at_most, self.higher_is_better
        )

    def figure(
        self,
        name: str,
        words: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> Figure:
        """The values of one contestant as the figure of a claim; `words` is the unit by default."""
        return Figure(
            words or self.unit,
            self.values[name],
            at_least,
            at_most,
            self.higher_is_better,
        )

    def show(self, *, against: str, absent: Mapping[str, str] | None = None) -> None:
        """Print a table: median, range, and the ratio to one contestant.

        Args:
            against: the contestant that the last column compares with.
            absent: contestants that did not run, with the reason.
        """
        absent = absent or {}
        width = max(map(len, (*self.values, *absent)))
        print(
            f"{'':{width}}  {'median':>10}  {'min':>10}  {'max':>10}  of {against}   [{self.unit}]"
        )
        for name, values in self.values.items():
            row = f"{name:{width}}  {self.median(name):10.4g}  {min(values):10.4g}  {max(values):10.4g}"
            print(f"{row}  {self.ratio(name, against):7.3f}")
        for name, why in absent.items():
            print(f"{name:{width}}  {why}")
        values = {name: list(given) for name, given in self.values.items()}
        record(
            {
                "table": self.unit,
                "against": against,
                "values": values,
                "absent": dict(absent),
            }
        )


def interleave(
    contestants: Mapping[str, Callable[[], float]], *, rounds: int, unit: str
) -> Rounds:
    """Run every contestant once in each round; a round before them warms up, but for a quick run.

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
    contestants: Mapping[str, Callable[[], Sequence[float]]],
    *,
    rounds: int,
    units: Sequence[str],
) -> tuple[Rounds, ...]:
    """As `interleave`, for contestants with more than one figure each: one `Rounds` for each of `units`."""
    values: tuple[dict[str, list[float]], ...] = tuple(
        {name: [] for name in contestants} for _ in units
    )
    warm_up = 0 if is_quick() else 1
    for number in range(rounds + warm_up):
        for name, run in contestants.items():
            figures = run()
            if number >= warm_up:
                for table, figure in zip(values, figures, strict=True):
                    table[name].append(figure)
    return tuple(Rounds(unit, table) for unit, table in zip(units, values, strict=True))


def record(entry: Mapping[str, Any]) -> None:
    """Add a line to the records of all benchmarks, if they are collected."""
    if path := os.environ.get(RECORDS):
        with open(path, "a", encoding="utf-8") as file:
            file.write(
                json.dumps({"file": Path(sys.argv[0]).name, **entry}, allow_nan=False)
                + "\n"
            )


def claim(
    what: str, *figures: Figure, aim: str = "", reached: str = "", met: bool | None = None
) -> None:
    """Print what was aimed at and what was reached, and record it if all benchmarks run. A quick run claims nothing.

    Args:
        what: the work, in a few words.
        figures: of this run.
        aim: what is claimed, in words, if it is not that each figure is within its bounds.
        reached: the figures in words, if there is more to say.
        met: whether this run bears the claim out, if it is not that each figure is within its
            bounds.
    """
    if is_quick():
        print(f"{what}: a quick run, nothing is claimed")
        return
    judged = [figure.met for figure in figures if figure.met is not None]
    if met is None and judged:
        met = all(judged)
    aim = aim or "; ".join(figure.aim for figure in figures if figure.aim)
    reached = reached or "; ".join(map(str, figures))
    print(
        f"{what}: {reached}; aim: {aim or 'none'}{'' if met is None else ': met' if met else ': MISSED'}"
    )
    rows = [
        {
            "words": figure.words,
            "values": list(figure.values),
            "value": figure.value,
            "higher_is_better": figure.improves_upwards,
            "at_least": figure.at_least,
            "at_most": figure.at_most,
            "met": figure.met,
        }
        for figure in figures
    ]
    record({"claim": what, "aim": aim, "reached": reached, "met": met, "figures": rows})


def is_installed(name: str) -> bool:
    """Whether a distribution is there to be compared with."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def versions(peers: Iterable[str]) -> dict[str, str]:
    """Versions of what every benchmark has, and of those peers that are installed."""
    names = filter(is_installed, ("torch", "obstore", "uvloop", "numpy", *peers))
    # headrace's from the package itself: where it is only on PYTHONPATH, no distribution of it is
    # installed.
    return {"headrace": headrace.__version__, **{name: version(name) for name in names}}


def commit() -> tuple[str, bool]:
    """The commit of this clone, and whether files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") or "unknown", bool(
        git("status", "--porcelain")
    )


def cores() -> int:
    """Cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def machine(*peers: str) -> dict[str, Any]:
    """The machine and the versions of what is compared."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [
        line.partition(":")[2].strip() for line in lines if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor() or "unknown",
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(peers),
    }


def describe_machine(*peers: str) -> str:
    """The machine, the versions and the commit, on one line.

    Args:
        peers: distributions that the benchmark compares with, beside those that every benchmark
            has.
    """
    named = ", ".join(f"{name} {given}" for name, given in versions(peers).items())
    revision, changed = commit()
    return (
        f"{cores()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}; "
        f"{named}; commit {revision}{', changed' if changed else ''}"
    )
