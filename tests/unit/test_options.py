"""Checks, defaults and documentation of the options; the size of the look-ahead."""

import asyncio
import inspect
import pydoc
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace import SkipErrors
from headrace._engine.look_ahead import (
    LEAST_AHEAD,
    MOST_CONCURRENCY,
    LookAheadSize,
    look_ahead,
    most_concurrency,
    most_fetches,
)
from headrace.options import MEMORY_BUDGET, OPTIONS, checked_options


@pytest.mark.parametrize(
    ("option", "error", "says"),
    [
        ({"concurrency": 0}, ValueError, "at least 1"),
        ({"concurrency": "fast"}, TypeError, "'fast'"),
        ({"concurrency": True}, TypeError, "True"),
        ({"concurrency": 2.0}, TypeError, "2.0"),
        ({"concurrency": None}, TypeError, "None"),
        ({"memory_budget": 0}, ValueError, "at least 1"),
        ({"on_error": "ignore"}, ValueError, "'ignore'"),
        ({"on_error": None}, ValueError, "None"),
        ({"on_error": SkipErrors}, ValueError, "class .*SkipErrors"),
        ({"on_error": asyncio.sleep}, ValueError, "a plain function"),
        ({"placement": "moon"}, ValueError, "'moon'"),
        ({"seed": -1}, ValueError, "-1"),
        ({"seed": 2**63}, ValueError, "between"),
        ({"transform": 3}, TypeError, "transform must be callable"),
        ({"retry": "3"}, TypeError, "RetryPolicy"),
        ({"device_prefetch": -1}, ValueError, "at least 0"),
        ({"hedge": "always"}, ValueError, "'always'"),
    ],
)
def test_invalid_option_is_refused_with_its_name_and_value(option, error, says):
    (name,) = option
    with pytest.raises(error, match=says) as caught:
        checked_options(option)
    assert name in str(caught.value)


def test_defaults_are_valid():
    options = checked_options({})
    assert options == {name: option.default for name, option in OPTIONS.items()}
    assert most_fetches(options) == most_concurrency(), (
        "the look-ahead has to cover what it may grow to"
    )
    assert options["memory_budget"] == MEMORY_BUDGET


def takes_any_keyword(function):
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin
        return False
    return any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
    )


def test_unknown_keyword_is_refused_with_the_nearest_one(tmp_path):
    (tmp_path / "0.jsonl").touch()
    (tmp_path / "0.tar").touch()
    calls = {
        "DataLoader": lambda: hr.DataLoader([1], concurency=3),
        "TarDataset": lambda: hr.TarDataset(tmp_path, field=["a"]),
        "LinesDataset": lambda: hr.LinesDataset(tmp_path, shufle=True),
        "TFRecordDataset": lambda: hr.TFRecordDataset(tmp_path, shufle=True),
        "index": lambda: hr.TarDataset.index(tmp_path, field=["a"]),
    }
    public = {name: getattr(hr, name) for name in hr.__all__}
    public |= {
        name: function
        for part in public.values()
        if inspect.isclass(part)
        for name, function in inspect.getmembers(part, inspect.isroutine)
        if not name.startswith("_")
        and str(getattr(function, "__module__", "")).startswith("headrace")
    }
    taking_any = {
        name
        for name, function in public.items()
        if callable(function) and takes_any_keyword(function)
    }
    assert taking_any - {"HeadraceError", "StoreError", "StateError"} <= calls.keys()
    for call in calls.values():
        with pytest.raises(
            TypeError,
            match=r"\(\) got an unexpected keyword argument '\w+'. Did you mean '\w+'\?",
        ):
            call()


def test_options_are_shown_with_type_and_default_in_signature_and_help():
    parameters = inspect.signature(hr.DataLoader).parameters
    text = pydoc.render_doc(hr.DataLoader, renderer=pydoc.plaintext)
    for name, option in OPTIONS.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == option.default
        assert parameters[name].annotation is not inspect.Parameter.empty
    documented = re.findall(r"^ \| {6}(\w+): \S", text, re.M)
    assert set(documented) >= parameters.keys()
    table = (Path(__file__).parents[2] / "docs/reference/options.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == parameters.keys()
    of_class, _, _ = text.partition("Methods defined here")
    assert of_class.count("\n") <= 85, "what is longer belongs into that table"
    # 215 lines of 120 columns; to torch's class copyreg adds an attribute, on pickling
    own, _, _ = text.partition("Methods inherited from")
    assert own.count("\n") <= 215 * 120 / 100


@given(
    workers=st.integers(1, 64),
    concurrency=st.integers(0, 4096),
    batch_size=st.integers(1, 4096),
)
def test_look_ahead_covers_the_window_and_one_batch_more(
    workers, concurrency, batch_size
):
    ahead = look_ahead(
        workers, prefetch_factor=None, concurrency=concurrency, batch_size=batch_size
    )
    least = 2 * workers if concurrency == 0 else max(LEAST_AHEAD, 2 * workers)
    assert ahead >= least
    assert concurrency == 0 or (ahead - 1) * batch_size >= concurrency
    assert ahead == least or (ahead - 2) * batch_size < concurrency


def test_next_epoch_begins_with_the_look_ahead_that_this_one_found():
    ahead = LookAheadSize(6, 20)
    for _ in range(5):
        ahead.extend(1)
    for least, most, batches in [(6, 20, 11), (8, 20, 13), (4, 7, 7), (4, 4, 4)]:
        ahead.resize(least, most)
        assert ahead.batches == batches


@pytest.mark.parametrize(("descriptors", "most"), [(600, 300), (4000, MOST_CONCURRENCY)])
def test_auto_concurrency_uses_at_most_half_of_the_descriptors(descriptors, most):
    resource = pytest.importorskip("resource", reason="not there on Windows")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < descriptors:
        pytest.skip(
            f"the hard limit of descriptors, {before[1]}, is lower than {descriptors}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        assert most_concurrency() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
