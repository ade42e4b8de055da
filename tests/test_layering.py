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
    {"_base", "_random", "_version"},
    {"errors"},
    {"_extras", "_ranks"},
    {"_torchcompat", "decode"},
    {"_records"},
    {"_eventloop", "collate", "telemetry"},
    {"_store", "_transport"},
    {"_device", "_pool", "_streams", "options"},
    {"_engine", "_shards", "testing"},
    {"_links", "_order"},
    {"_consumer", "datasets", "samplers"},
    {"loader", "types"},
    {"integrations", "packing", "state"},
    {"__init__", "cli"},
    {"__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path):
    parts = ("headrace", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def room_of(module):
    return (module.split(".")[1:] or ["__init__"])[0]


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
    assert [module for module in MODULES if room_of(module) not in FLOOR_OF] == []


def test_imports_point_down():
    pairs = [
        (module, name) for module, names in IMPORTS.items() for name in sorted(names)
    ]
    assert [pair for pair in pairs if points_up(*pair)] == []


def test_imported_modules_exist():
    assert {name for names in IMPORTS.values() for name in names} <= MODULES.keys()


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: names - {module} for module, names in IMPORTS.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("headrace._pool.supervisor", "from headrace._engine.fetch import FetchStage"),
        ("headrace._engine.engine", "from headrace._links import thread"),
        ("headrace._engine.engine", "def f():\n    import headrace.loader"),
        ("headrace._streams.kinds", "from headrace.datasets.combine import mix"),
        (
            "headrace._torchcompat.private",
            "from headrace._records.failure import Failure",
        ),
        ("headrace.errors", "import headrace"),
    ],
)
def test_an_import_that_points_up_is_caught(module, statement):
    (imported,) = imported_modules(ast.parse(statement))
    assert points_up(module, imported)
