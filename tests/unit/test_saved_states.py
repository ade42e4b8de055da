"""States that were saved by this version of the layout, and by the one of the last release, still load.

`python -m tests.unit.test_saved_states` writes the files of a new version into tests/fixtures/states.
"""

import itertools
import json
import typing
from pathlib import Path

import pytest
import torch

import headrace as hr
from headrace import StateError
from headrace._order.state import VERSION, LoaderState
from tests.datasets import Numbers
from tests.unit.shards import tars as writer
from tests.unit.shards.resuming import in_memory
from tests.unit.streams.reading import Count, Plain

pytestmark = pytest.mark.filterwarnings("ignore:Plain has no state_dict")
SAVED = Path(__file__).parents[1] / "fixtures/states"
FOLDER = SAVED / str(VERSION)
TAKEN = 3  # batches before the state
CHANGED = f"""the layout of a state is not that of version {VERSION}: raise VERSION in
src/headrace/_order/state.py, keep reading version {VERSION} if a release has written it, and run
`python -m tests.unit.test_saved_states`, which writes the files of the new version"""

TARS = {
    f"{shard}.tar": writer.shard([f"{shard}{each}" for each in range(8)])
    for shard in range(4)
}
STORE = in_memory(TARS)


def loader(dataset, **options):
    return hr.DataLoader(dataset, batch_size=3, collate_fn=plain, **options)


def plain(batch):
    """The keys of samples of shards, and other samples as they are."""
    return [sample["__key__"] if isinstance(sample, dict) else sample for sample in batch]


def tokens(packed):
    return packed["tokens"].tolist()


def excluding():
    without = loader(Numbers(40), shuffle=True, seed=3)
    without.exclude(keys=[7])
    return without


LOADERS = {
    "seeded": lambda: loader(Numbers(40), shuffle=True, seed=3),
    "unseeded": lambda: loader(Numbers(40), shuffle=True),
    "generator": lambda: loader(Numbers(40), shuffle=True, generator=torch.Generator()),
    "elastic": lambda: loader(Numbers(40), sampler=hr.ElasticSampler(40, seed=3)),
    "excluding": excluding,
    "indexed": lambda: loader(
        hr.TarDataset.index(list(TARS), store=STORE), shuffle=True, seed=3
    ),
    "mix": lambda: loader(
        hr.mix([Numbers(40), Numbers(20)], weights=[3, 1]), shuffle=True, seed=3
    ),
    "tars": lambda: loader(
        hr.TarDataset(list(TARS), store=STORE, shuffle=True, buffer_size=4, seed=3)
    ),
    "chunks": lambda: loader(hr.TarDataset(list(TARS), store=STORE, chunk_bytes=1000)),
    "mixed-streams": lambda: loader(
        hr.mix([Plain(20), Count(30).split()], weights=[1, 2], stop="all", seed=3)
    ),
    "operations": lambda: loader(
        hr.concat([Plain(9).map(str), Count(30).filter(bool)]).shuffle(4, seed=3).take(30)
    ),
    "packed": lambda: loader(Count(60).map(lambda n: [n] * (n % 5)).pack(8).map(tokens)),
    "workers": lambda: loader(Count(30), num_workers=2),
}


def run(name):
    """The state after some batches, and the other batches of the epoch."""
    torch.manual_seed(5)
    with LOADERS[name]() as unbroken:
        batches = iter(unbroken)
        list(itertools.islice(batches, TAKEN))
        return {
            "state": json.loads(json.dumps(unbroken.state_dict())),
            "rest": list(batches),
        }


def fields(record):
    """The fields of a record and of the records in it, with their annotations."""
    annotations = {
        name: getattr(each, "__forward_arg__", str(each))
        for name, each in record.__annotations__.items()
    }
    found = {record.__name__: annotations}
    for kind in typing.get_type_hints(record).values():
        for inner in (kind, *typing.get_args(kind)):
            if hasattr(inner, "_fields"):
                found |= fields(inner)
    return found


def layout(value, path="", found=frozenset()):
    """Paths of the values, without positions in lists, with their types."""
    if isinstance(value, dict | list):
        named = (
            value.items() if isinstance(value, dict) else (("", each) for each in value)
        )
        return found.union(*(layout(each, f"{path}/{name}") for name, each in named))
    return {f"{path}: {type(value).__name__}"} if value is not None else set()


def read(path):
    return json.loads(path.read_text())


def test_fields_of_a_state_change_with_the_version_alone():
    assert read(FOLDER / "fields.json") == fields(LoaderState), CHANGED


@pytest.mark.parametrize("name", LOADERS)
def test_layout_of_a_state_changes_with_the_version_alone(name):
    assert layout(run(name)["state"]) == layout(read(FOLDER / f"{name}.json")["state"]), (
        CHANGED
    )


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SAVED.glob("*/*.json")) if path.stem in LOADERS],
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_saved_state_is_continued(path):
    saved = read(path)
    with LOADERS[path.stem]() as restored:
        restored.load_state_dict(saved["state"])
        assert list(restored) == saved["rest"]


@pytest.mark.parametrize(
    ("version", "release", "remedy"),
    [
        (VERSION + 1, "9.3.0", "install headrace 9.3.0 or later"),
        (VERSION - 1, "0.0.1", r"install headrace 0.0.1(?! or)"),
    ],
)
def test_state_of_another_version_names_the_release_that_wrote_the_state(
    version, release, remedy
):
    state = {**run("seeded")["state"], "version": version, "headrace": release}
    with pytest.raises(StateError, match=f"^headrace {release} wrote .* {remedy}"):
        LOADERS["seeded"]().load_state_dict(state)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True)  # the files of a version are never written again
    contents = {name: run(name) for name in LOADERS}
    for name, content in {"fields": fields(LoaderState), **contents}.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
