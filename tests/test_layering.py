"""Imports point down only, and there are no cycles: an AST walk of the source against the table of rooms."""

import ast
import graphlib
from pathlib import Path

import pytest

import headrace

SOURCE = Path(headrace.__file__).parent

# From the lowest floor to the highest. A room may import itself and rooms on lower floors, never on
# its own.
FLOORS = (
    {
        "_version",
        "_core.array_types",
        "_core.cgroup",
        "_core.text",
        "_core.permutation",
        "_core.randomized",
    },
    {"errors", "_core.descriptors"},
    {"_core.ranks"},
    {"_core.torchcompat"},
    {"_core.failure", "_core.extras"},
    {"_core.batches"},
    {"_core.error_policy", "_core.retry_policy", "_core.remote_placement"},
    {"options", "decode"},
    {"_core.look_ahead"},
    {"collate", "telemetry", "_core.seeding", "_core.eventloop"},
    {"_core.store", "_core.messages"},
    {"_core.streams"},
    {"_core.shards", "_core.transport"},
    {"_core.pool"},
    {"_core.engine", "_core.device"},
    {"_core.links"},
    {"_core.ray_placement"},
    {"_core.order"},
    {"_core.consumer"},
    {"datasets", "samplers", "loader"},
    {"state", "packing"},
    {"integrations"},
    {"types"},
    {"__init__"},
    {"testing"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path):
    parts = ("headrace", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def room_of(module):
    parts = module.split(".")[1:] or ["__init__"]
    return ".".join(parts[:2] if parts[0] == "_core" and len(parts) > 1 else parts[:1])


def imported_modules(tree):
    """The headrace modules that a syntax tree imports, wherever the statement stands in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"line {node.lineno}: a relative import hides which room it is from"
            )
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inside]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "headrace")


IMPORTS = {
    module: set(imported_modules(ast.parse(path.read_text(encoding="utf-8"))))
    for module, path in MODULES.items()
}


def points_up(module, imported):
    here, there = room_of(module), room_of(imported)
    return here != there and FLOOR_OF[there] >= FLOOR_OF[here]


def test_every_module_has_a_room():
    assert [
        module
        for module in MODULES
        if module != "headrace._core" and room_of(module) not in FLOOR_OF
    ] == []


def test_imports_point_down():
    pairs = [(module, name) for module, names in IMPORTS.items() for name in sorted(names)]
    assert [pair for pair in pairs if points_up(*pair)] == []


def test_imported_modules_exist():
    assert {name for names in IMPORTS.values() for name in names} <= MODULES.keys()


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: names - {module} for module, names in IMPORTS.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("headrace._core.pool.supervisor", "from headrace._core.engine.fetch import FetchStage"),
        ("headrace._core.engine.engine", "from headrace._core.links import thread"),
        ("headrace._core.engine.engine", "def f():\n    import headrace.loader"),
        ("headrace._core.streams.kinds", "from headrace.datasets.combine import mix"),
        ("headrace._core.torchcompat.private", "from headrace._core.failure import Failure"),
        ("headrace.errors", "import headrace"),
    ],
)
def test_an_import_that_points_up_is_caught(module, statement):
    (imported,) = imported_modules(ast.parse(statement))
    assert points_up(module, imported)
