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
NO_WORKERS = "no workers"
HEAD = """\
# Parity with torch's DataLoader

Each line is a behaviour of `torch.utils.data.DataLoader`. A test runs the same program with torch's loader and with
headrace's, in the same run, and compares batches, errors, warnings and side effects, in four settings:

{settings}

A and C have no workers. If a line does not apply to a setting for another reason, the reason stands behind the line.
An async dataset is compared with a sync dataset in torch's loader. Memory is pinned only where the tests run beside an
accelerator; elsewhere the lines on pinned memory compare torch's warnings and plain tensors.

This page is made from the tests in `tests/parity` by `make parity-table`. Intended differences are listed
[at the end](#differences).
"""


class _Collected:
    """A pytest plugin that keeps the tests which were collected."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def collected_in(folder: Path) -> list[pytest.Item]:
    """The tests of a folder, none of which is run."""
    collected = _Collected()
    quiet = [
        "--collect-only",
        "--quiet",
        "--quiet",
        "--no-header",
        "-p",
        "no:cacheprovider",
        str(folder),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = pytest.main(quiet, plugins=[collected])
    if code != 0:
        raise SystemExit(out.getvalue())
    return collected.items


def rendered(items: list[pytest.Item]) -> str:
    """The whole document.

    Raises:
        ValueError: a setting of a behaviour has neither a test nor a reason, or two answers.
    """
    from tests.parity.harness import NAMES  # after pytest has rewritten its assertions

    rows: dict[str, dict[str, dict[str, str]]] = {
        row: {} for row in ROWS
    }  # row, behaviour, setting
    for item in items:
        marker = item.get_closest_marker("parity")
        assert marker is not None
        row = rows[item.path.stem.removeprefix("test_").replace("_", " ")]
        line = row.setdefault(marker.kwargs["behaviour"], {})
        setting = item.callspec.params["setting"].name  # type: ignore[attr-defined]
        for name, answer in [*marker.kwargs["not_for"].items(), (setting, PROVEN)]:
            if line.setdefault(name, answer) != answer:
                raise ValueError(
                    f"{item.nodeid}: two answers for {name!r}: {answer!r} and {line[name]!r}"
                )
    letters = dict(zip(NAMES, "ABCD", strict=True))
    parts = [
        HEAD.format(
            settings="\n".join(f"- {letter}: {name}" for name, letter in letters.items())
        )
    ]
    for title, behaviours in rows.items():
        parts.append(f"## {title.capitalize()}\n")
        for behaviour, line in behaviours.items():
            if empty := set(NAMES) - line.keys():
                raise ValueError(
                    f"{title}: {behaviour}: no test and no reason for {empty}"
                )
            reasons: dict[str, list[str]] = defaultdict(list)
            for name in NAMES:
                if line[name] not in (PROVEN, NO_WORKERS):
                    reasons[line[name]].append(letters[name])
            exceptions = "; ".join(
                f"{', '.join(each)}: {reason}" for reason, each in reasons.items()
            )
            parts.append(f"- {behaviour}" + (f" (*{exceptions}*)" if exceptions else ""))
        parts.append("")
    return "\n".join(parts)


def made_anew() -> str:
    """The document for the tests of now."""
    _, heading, by_hand = DOCUMENT.read_text(encoding="utf-8").partition(
        "## Differences\n"
    )
    items = [item for item in collected_in(HERE) if item.get_closest_marker("parity")]
    return f"{rendered(items)}\n{heading}{by_hand}"


if __name__ == "__main__":
    document = made_anew()
    if "--check" in sys.argv[1:]:
        if DOCUMENT.read_text(encoding="utf-8") != document:
            sys.exit(f"{DOCUMENT.name} is out of date: run make parity-table")
    else:
        DOCUMENT.write_text(document, encoding="utf-8")
