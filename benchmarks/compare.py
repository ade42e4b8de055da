"""Compares the results of two runs of `run_all.py`: which figures got worse, by more than they vary within each run.

Figures of claims are joined by name. One is worse if its range over the repetitions of B lies
wholly on the worse side of its range in A. Figures with fewer than three repetitions have no range
worth the name, and are shown apart if their claim is met in one run only. With five repetitions,
one figure in 252 is worse by chance: measure it again before you look for the cause.

Exit status: 0 if nothing got worse; 1 if a figure did, or a benchmark fails that ran before; 2 if
the files cannot be compared.

    python benchmarks/compare.py A.json B.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1  # of the file of results
FEWEST = 3  # repetitions that make a range

Key = tuple[str, str, str]  # the benchmark, the claim, the words of the figure


@dataclass(frozen=True)
class Row:
    """A figure of a claim in one run."""

    values: tuple[float, ...]
    value: float
    higher_is_better: bool
    met: bool | None

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({min(self.values):.4g} to {max(self.values):.4g})"

    def is_worse_than(self, other: Row) -> bool:
        """Whether every repetition is worse than every one of the other."""
        if self.higher_is_better:
            return max(self.values) < min(other.values)
        return min(self.values) > max(other.values)


class NotComparable(Exception):
    """The files cannot be compared, with the reason."""


def load(path: Path) -> dict[str, Any]:
    """The results of a run.

    Raises:
        NotComparable: it is not a file of results, or one of a quick run.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotComparable(f"{path}: {error}") from error
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise NotComparable(
            f"{path} is not a file of results that this version of run_all.py writes"
        )
    if results["quick"]:
        raise NotComparable(f"{path} is of a quick run, of which nothing is claimed")
    return results


def rows_of(results: Mapping[str, Any]) -> dict[Key, Row]:
    """The figures of all claims.

    Raises:
        NotComparable: two figures have the same name.
    """
    rows: dict[Key, Row] = {}
    for record in results["records"]:
        for figure in record.get("figures", ()):
            key = record["file"], record["claim"], figure["words"]
            if key in rows:
                raise NotComparable(f"two figures have one name: {shown(key)}")
            values = tuple(figure["values"])
            rows[key] = Row(values, figure["value"], figure["higher_is_better"], figure["met"])
    return rows


def shown(key: Key) -> str:
    return f"{key[0].removesuffix('.py')}: {key[1]}: {key[2]}"


def cautions(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """What makes a comparison doubtful."""
    for name in ("cpu", "cores", "memory_bytes", "kernel", "python"):
        if a["machine"][name] != b["machine"][name]:
            yield f"the machines differ: {name} {a['machine'][name]} and {b['machine'][name]}"
    before, now = a["machine"]["versions"], b["machine"]["versions"]
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield f"versions differ: {name} {before.get(name, 'none')} and {now.get(name, 'none')}"
    for file, ended in b["benchmarks"].items():
        given, other = ended.get("arguments"), a["benchmarks"].get(file, {}).get("arguments")
        if None not in (given, other) and given != other:
            yield f"{file} ran with other arguments: {shlex.join(other)!r} and {shlex.join(given)!r}"
    for name, results in (("A", a), ("B", b)):
        if results["changed"]:
            yield f"{name} was measured with changes that are not in commit {results['commit']}"
        if not results["complete"]:
            yield f"{name} ended before all benchmarks had run"
        busy = [
            file
            for file, ended in results["benchmarks"].items()
            if ended["status"] == "ran" and ended["load_before"][0] > results["machine"]["cores"]
        ]
        if busy:
            yield f"{name}: the machine was busy before {len(busy)} benchmarks: {', '.join(busy)}"


def failures(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The benchmarks that fail in B and ran in A, with the reason."""
    return [
        f"{name}: {ended['reason']}"
        for name, ended in b["benchmarks"].items()
        if ended["status"] == "failed" and a["benchmarks"].get(name, {}).get("status") == "ran"
    ]


def section(title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        print(f"{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Print the differences; whether nothing got worse.

    Raises:
        NotComparable: the two have no figure in common.
    """
    before, now = rows_of(a), rows_of(b)
    common = [key for key in before if key in now]
    failed = failures(a, b)
    if not common and not failed:
        raise NotComparable("the two runs have no figure in common")
    changes = {key: f"{shown(key)}: {before[key]} → {now[key]}" for key in common}
    ranged = {key for key in common if min(len(before[key].values), len(now[key].values)) >= FEWEST}
    worse = [key for key in common if key in ranged and now[key].is_worse_than(before[key])]
    better = [key for key in common if key in ranged and before[key].is_worse_than(now[key])]
    turned = [key for key in common if key not in ranged and before[key].met != now[key].met]
    section("doubtful", cautions(a, b))
    section("WORSE", [changes[key] for key in worse])
    section("FAILS NOW", failed)
    section("better", [changes[key] for key in better])
    section(
        "met in one run only, too few repetitions for a range", [changes[key] for key in turned]
    )
    section("only in A", [shown(key) for key in before if key not in now])
    section("only in B", [shown(key) for key in now if key not in before])
    print(f"{len(common) - len(worse) - len(better)} of {len(common)} figures within their ranges")
    return not worse and not failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, metavar="A", help="results of the earlier run")
    parser.add_argument("b", type=Path, metavar="B", help="results of the later run")
    arguments = parser.parse_args()
    try:
        good = compare(load(arguments.a), load(arguments.b))
    except NotComparable as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(not good)


if __name__ == "__main__":
    main()
