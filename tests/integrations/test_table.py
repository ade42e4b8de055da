"""The tables of docs/trainers.md say what the tests here prove.

A test proves cells with ``@pytest.mark.proves(column, *rows)``. A cell that no test can prove has
its reason in the dictionary NOT_PROVEN of a test module, by (column, row).
"""

import re
from pathlib import Path

import pytest

from tests.parity.table import collected_in

for package in (
    "lightning",
    "transformers",
    "ray",
    "ignite",
    "skorch",
    "fastai",
    "datasets",
    "timm",
    "monai",
):
    pytest.importorskip(
        package, reason=f"{package} is not installed: make test-integrations"
    )

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "trainers.md"


def cells_of_document():
    """The cells of its tables, by (column, row): ✓, or why not."""
    cells = {}
    for table in re.findall(
        r"<!-- table: \w+ -->(.*?)<!-- end of table",
        DOCUMENT.read_text("utf-8"),
        re.DOTALL,
    ):
        heading = re.search(r"^In (.*?):$", table, re.MULTILINE | re.DOTALL)[1]
        columns = " ".join(heading.split()).split("; ")
        for row, missing in re.findall(
            r"^\| ([^|]+?) \| ?(.*?) ?\|$", table, re.MULTILINE
        ):
            reasons = dict(each.split(": ") for each in missing.split("; ") if each)
            assert reasons.keys() <= set(columns)
            cells |= {(column, row): reasons.get(column, "✓") for column in columns}
    return cells


def test_tables_are_those_of_the_tests():
    cells = {}
    for item in collected_in(HERE):
        for marker in item.iter_markers("proves"):
            column, *rows = marker.args
            cells |= {(column, row): "✓" for row in rows}
        for cell, reason in getattr(item.module, "NOT_PROVEN", {}).items():
            assert cells.setdefault(cell, reason) == reason, f"{cell} is proven by a test"
    assert cells == cells_of_document()
