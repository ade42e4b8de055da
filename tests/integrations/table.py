"""The tables of docs/trainers.md, made from the tests that are collected: ``python -m tests.integrations.table``."""

from __future__ import annotations

import contextlib
import io
import re
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "trainers.md"
TICK = "✓"

Table = tuple[tuple[str, ...], tuple[str, ...]]  # columns and rows

TABLES: dict[str, Table] = {
    "trainers": (
        (
            "Lightning Trainer",
            "Lightning Fabric",
            "accelerate",
            "transformers Trainer",
            "Ray Train",
            "torchtitan",
            "ignite",
            "skorch",
            "fastai",
        ),
        (
            "headrace fetches",
            "transform is applied once",
            "each sample once, on two ranks",
            "another order in each epoch",
            "equal steps for streams of unknown length",
            "evaluation",
            "exact resume in mid-epoch",
            "resume at the end of an epoch",
            "resume on another number of ranks",
            "equal weights after an interruption",
            "nothing left behind",
        ),
    ),
    "datasets": (
        (
            "HF datasets, map-style",
            "HF IterableDataset",
            "webdataset",
            "litdata",
            "s3torchconnector, map-style",
            "s3torchconnector, stream",
            "torchdata.nodes",
        ),
        (
            "same samples as in torch's loader",
            "with workers",
            "each sample once, on two ranks",
            "exact resume in mid-epoch",
        ),
    ),
    "libraries": (
        ("timm", "ultralytics", "PyTorch Geometric", "MONAI"),
        ("identical batches", "identical batches with workers"),
    ),
}


class Collected:
    """A pytest plugin that collects the tests and runs none."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def cells_of(items: list[pytest.Item]) -> dict[str, dict[str, str]]:
    """For each column its cells, by row.

    A test proves cells with ``@pytest.mark.proves(column, *rows)``. A cell that no test can prove has its reason in
    the dictionary NOT_PROVEN of a test module, by (column, row).

    Raises:
        ValueError: a cell is unknown, or is filled in two ways.
    """
    known = {column: rows for columns, rows in TABLES.values() for column in columns}
    cells: dict[str, dict[str, str]] = defaultdict(dict)

    def fill(where: str, column: str, row: str, text: str) -> None:
        if row not in known.get(column, ()):
            raise ValueError(f"{where}: the tables have no cell {column!r}, {row!r}")
        if cells[column].setdefault(row, text) != text:
            raise ValueError(f"{where}: two answers for {column!r}, {row!r}: {text!r} and {cells[column][row]!r}")

    for item in items:
        for marker in item.iter_markers("proves"):
            column, *rows = marker.args
            for row in rows:
                fill(item.nodeid, column, row, TICK)
    for module in {item.module for item in items}:  # type: ignore[attr-defined]
        for (column, row), reason in getattr(module, "NOT_PROVEN", {}).items():
            fill(module.__name__, column, row, reason)
    return cells


def rendered(name: str, items: list[pytest.Item]) -> str:
    """One table.

    Raises:
        ValueError: a cell is empty.
    """
    cells = cells_of(items)
    columns, rows = TABLES[name]
    empty = [(column, row) for column in columns for row in rows if row not in cells[column]]
    if empty:
        raise ValueError(f"no test and no reason for {empty}")
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|:---:" * len(columns) + "|"]
    lines += [f"| {row} | " + " | ".join(cells[column][row] for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def made_anew() -> str:
    """The document with the tables of the tests as they are now."""
    collected = Collected()
    quiet = ["--collect-only", "--quiet", "--quiet", "--no-header", "-p", "no:cacheprovider", str(HERE)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = pytest.main(quiet, plugins=[collected])
    if code != 0:
        raise SystemExit(out.getvalue())
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in TABLES:
        start, end = f"<!-- table: {name} -->\n", f"<!-- end of table: {name} -->"
        pattern = re.escape(start) + ".*?" + re.escape(end)
        table = f"{start}\n{rendered(name, collected.items)}\n\n{end}"
        text, found = re.subn(pattern, lambda _, table=table: table, text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"{DOCUMENT.name} must have one place for the table {name!r}, but has {found}")
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(made_anew(), encoding="utf-8")
