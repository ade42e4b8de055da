"""Names of headrace import their own modules, and no others."""

import gc
import subprocess
import sys

import pytest

import headrace
from headrace import _api


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
    assert not imported & {"obstore", "numpy.random"}


def test_each_name_is_that_of_the_list_of_names():
    assert headrace.__all__ == _api.__all__
    assert [name for name in _api.__all__ if getattr(headrace, name) is not getattr(_api, name)] == []


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
