"""Names of headrace import their own modules, and no others."""

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest

import headrace


def modules_after(program):
    """The modules that a fresh interpreter has imported after a program."""
    show = "; import sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program + show], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_the_loader_does_not_import_stores_shards_and_sidecars():
    imported = modules_after("import headrace; headrace.DataLoader")
    assert "headrace.loader" in imported
    unneeded = ("store.client", "shards.", "cache.", "manifest.", "runtime.process", "runtime.sidecar")
    assert [name for name in imported if name.startswith(tuple(f"headrace._core.{each}" for each in unneeded))] == []
    assert "headrace.telemetry.report" not in imported


def test_each_name_comes_from_the_module_that_the_list_of_names_says():
    tree = ast.parse(Path(headrace.__file__).with_name("_api.py").read_text(encoding="utf-8"))
    origins = {
        alias.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert headrace._modules_of_names() == {name: origins[name] for name in headrace.__all__}


def test_the_collector_is_as_before_after_an_import(monkeypatch):
    monkeypatch.delitem(headrace.__dict__, "DataLoader", raising=False)
    assert gc.isenabled()
    assert headrace.DataLoader is not None
    assert gc.isenabled()
    gc.disable()
    try:
        monkeypatch.delitem(headrace.__dict__, "DataLoader", raising=False)
        assert headrace.DataLoader is not None
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'headrace' has no attribute 'nothing'"):
        _ = headrace.nothing
