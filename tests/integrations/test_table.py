"""The tables of docs/trainers.md say what the tests here prove."""

import pytest

from tests.integrations import table

for package in ("lightning", "transformers", "ray", "ignite", "skorch", "fastai", "datasets", "timm", "monai"):
    pytest.importorskip(package, reason=f"{package} is not installed: make test-integrations")


def test_tables_are_those_of_the_tests():
    # In this process, which has imported most test modules, and not by `python -m`, which imports all trainers again.
    assert table.made_anew() == table.DOCUMENT.read_text(encoding="utf-8"), "out of date: run make trainers-table"
