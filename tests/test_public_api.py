"""The public face: what is exported is there, is documented, and its examples run."""

import ast
import doctest
import importlib.util
import inspect
from pathlib import Path

import pytest

import headrace
import tests.integrations.torchvision_ops  # noqa: F401  # before any module that imports torchvision
from tests import test_layering

SOURCE = Path(headrace.__file__).parent


def package_is_missing(module):
    """Whether it is for a package that is not installed; `make test-integrations` has them all."""
    if not module.startswith(
        ("headrace.integrations.", "headrace._links.ray", "headrace._shards.zarr_store")
    ):
        return False
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headrace"):
            raise
        return True
    return False


ALL_MODULES = [name for name in test_layering.MODULES if not package_is_missing(name)]
PRIVATE = ("headrace.collate", "headrace.options")  # beside those whose names say it
MODULES = [name for name in ALL_MODULES if name not in PRIVATE and "._" not in name]
EXPORTING = [
    name
    for name in MODULES
    if "__all__" in test_layering.MODULES[name].read_text("utf-8")
]


def defined_in(module):
    """The public functions and classes that a module's own source defines."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {
        node.name
        for node in tree.body
        if isinstance(node, kinds) and not node.name.startswith("_")
    }


def test_modules_of_the_page_of_policies_say_what_is_public():
    named = {
        f"headrace.{name}"
        for name in ("datasets", "decode", "errors", "testing", "types")
    }
    of_trainers = {name for name in MODULES if name.startswith("headrace.integrations.")}
    assert {"headrace", *named, *of_trainers} <= {*EXPORTING}


def test_exceptions_and_types_of_results_are_in_modules_of_their_own():
    assert {name for name in headrace.__all__ if name.endswith("Error")} == {
        "HeadraceError",
        "StateError",
        "StoreError",
    }
    assert not {*headrace.types.__all__, *headrace.errors.__all__} & {*headrace.__all__} - {
        "HeadraceError", "StateError", "StoreError",
    }  # fmt: skip
    lower = [name.lower() for name in headrace.__all__]
    assert len(lower) == len(set(lower))


@pytest.mark.parametrize("name", EXPORTING)
def test_a_module_exports_exactly_what_is_public_in_it(name):
    module = importlib.import_module(name)
    defined = defined_in(module)
    exported = getattr(module, "__all__", [])
    assert list(exported) == sorted(
        exported, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    assert defined <= set(exported)
    assert all(hasattr(module, exported_name) for exported_name in exported)
    assert not any(
        exported_name.startswith("_")
        for exported_name in exported
        if exported_name != "__version__"
    )


def test_type_checkers_are_told_that_it_is_typed():
    assert (SOURCE / "py.typed").is_file()


@pytest.mark.parametrize(
    "name",
    [name for name in headrace.__all__ if inspect.isclass(getattr(headrace, name))],
)
def test_public_methods_are_documented(name):
    methods = inspect.getmembers(getattr(headrace, name), inspect.isfunction)
    ours = [
        (method, fn)
        for method, fn in methods
        if fn.__module__.startswith("headrace") and method[0] != "_"
    ]
    assert [method for method, fn in ours if not inspect.getdoc(fn)] == []


NEEDED = {
    "TFRecord": "google_crc32c",
    "Zarr": "zarr",
}  # not in the environment of the trainers


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ALL_MODULES:
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        for example in finder.find(module):
            if example.examples:
                package = NEEDED.get(
                    example.name.rpartition(".")[2].removesuffix("Dataset"), "headrace"
                )
                reason = f"{package} is not installed: make test"
                there = pytest.mark.skipif(
                    importlib.util.find_spec(package) is None, reason=reason
                )
                yield pytest.param(example, id=example.name, marks=there)


@pytest.mark.parametrize("example", list(examples()))
def test_examples_in_docstrings_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    results = runner.run(example, out=said.append)
    assert results.failed == 0, "".join(said)


def test_dir_shows_public_names_only():
    assert {name for name in dir(headrace) if not name.startswith("__")} == {
        name for name in headrace.__all__ if not name.startswith("__")
    }
