"""Names of headrace import their own modules, and no others."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headrace


def modules_after(program):
    """The modules that a fresh interpreter has imported after a program."""
    show = "; import sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program + show], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def test_the_loader_does_not_import_stores_shards_and_sidecars():
    imported = modules_after("import headrace; headrace.DataLoader")
    assert "headrace.loader" in imported
    unneeded = (
        "store.client",
        "shards.",
        "store.disk_cache",
        "links.process",
        "links.sidecar",
    )
    assert [
        name
        for name in imported
        if name.startswith(tuple(f"headrace._{each}" for each in unneeded))
    ] == []
    assert "headrace.telemetry.report" not in imported
    assert not imported & {"obstore", "numpy.random"}


def test_type_checkers_see_the_names_that_are_imported():
    checked = {
        alias.name: node.module
        for node in ast.walk(
            ast.parse(Path(headrace.__file__).read_text(encoding="utf-8"))
        )
        if isinstance(node, ast.ImportFrom)
        and node.module not in ("typing", "headrace", "headrace._version")
        for alias in node.names
    }
    assert checked == headrace._MODULES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match="module 'headrace' has no attribute 'nothing'"
    ):
        _ = headrace.nothing
