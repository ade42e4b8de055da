"""The parity table in the docs, made from the tests that are collected: ``python -m tests.parity.table``."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "parity.md"
ROWS = (
    "dataset kinds",
    "batching",
    "order",
    "workers",
    "collation",
    "pinned memory",
    "errors",
    "constructor",
    "ends",
)
PROVEN = "a test"
HEAD = """\
# Parity with torch's DataLoader

Each line is a behaviour of `torch.utils.data.DataLoader`. A test runs the same program with torch's loader and with
headrace's, in the same run, and compares batches, errors, warnings and side effects, in each of these settings:

{settings}

Where a line does not apply to a setting, the reason stands behind it. An async dataset is compared with torch reading
the same samples from a sync one. Memory is pinned only where the tests run beside an accelerator; elsewhere the lines
on pinned memory compare torch's warnings and plain tensors.

This page is made from the tests in `tests/parity` by `make parity-table`. What is different on purpose is listed in
[Migrating from torch](migrating-from-torch.md#differences).
"""


class Collected:
    """A pytest plugin that collects the parity tests and runs none."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = [item for item in session.items if item.get_closest_marker("parity")]


Line = dict[str, str]  # from setting to what its cell says


def lines_of(items: list[pytest.Item]) -> dict[str, dict[str, Line]]:
    """For each section its behaviours, for each behaviour the settings, each with `PROVEN` or a reason."""
    rows: dict[str, dict[str, Line]] = defaultdict(lambda: defaultdict(dict))
    for item in items:
        marker = item.get_closest_marker("parity")
        assert marker is not None
        row = item.path.stem.removeprefix("test_").replace("_", " ")
        if row not in ROWS:
            raise ValueError(f"{item.path.name} is not named after a row of the table")
        line = rows[row][marker.kwargs["behaviour"]]
        for setting, reason in marker.kwargs["not_for"].items():
            if line.setdefault(setting, reason) != reason:
                raise ValueError(f"{item.nodeid}: two answers for {setting!r}: {reason!r} and {line[setting]!r}")
        setting = item.callspec.params["setting"].name  # type: ignore[attr-defined]
        if line.setdefault(setting, PROVEN) != PROVEN:
            raise ValueError(f"{item.nodeid} runs where another test says: {line[setting]!r}")
    return rows


def rendered(items: list[pytest.Item]) -> str:
    """The whole document.

    Raises:
        ValueError: a cell is empty, or is filled in two ways.
    """
    from tests.parity.harness import NAMES

    rows = lines_of(items)
    parts = [HEAD.format(settings="\n".join(f"- {name}" for name in NAMES))]
    for row in ROWS:
        if row not in rows:
            continue
        parts.append(f"## {row.capitalize()}\n")
        for behaviour, line in rows[row].items():
            empty = [name for name in NAMES if name not in line]
            if empty:
                raise ValueError(f"{row}: {behaviour}: no test and no reason for {empty}")
            reasons: dict[str, list[str]] = defaultdict(list)
            for name in NAMES:
                if line[name] != PROVEN:
                    reasons[line[name]].append(name)
            exceptions = "; ".join(f"{_together(names)}: {reason}" for reason, names in reasons.items())
            parts.append(f"- {behaviour}" + (f" (*{exceptions}*)" if exceptions else ""))
        parts.append("")
    return "\n".join(parts)


def _together(names: list[str]) -> str:
    """`names`, or the kind of dataset alone if they are all settings of it."""
    from tests.parity.harness import NAMES

    for kind in {name.split(",")[0] for name in names}:
        if names == [name for name in NAMES if name.startswith(kind)]:
            return kind
    return " and ".join(names)


def made_anew() -> str:
    """The document for the tests of now."""
    collected = Collected()
    quiet = ["--collect-only", "--quiet", "--quiet", "--no-header", "-p", "no:cacheprovider", str(HERE)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = pytest.main(quiet, plugins=[collected])
    if code != 0:
        raise SystemExit(out.getvalue())
    return rendered(collected.items)


if __name__ == "__main__":
    document = made_anew()
    if "--check" in sys.argv[1:]:
        if DOCUMENT.read_text(encoding="utf-8") != document:
            sys.exit(f"{DOCUMENT.name} is out of date: run make parity-table")
    else:
        DOCUMENT.write_text(document, encoding="utf-8")
