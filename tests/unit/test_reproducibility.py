"""The table of docs/reference/options.md, "Randomness": which changes leave a sample's random numbers as they are."""

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler

import headrace as hr
from headrace._ranks.rankinfo import RankInfo, temporary_rank
from tests.datasets import Numbers
from tests.unit.streams.reading import Count

LENGTH = 24
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
COLUMNS = (
    "`num_workers`",
    "`placement`",
    "`batch_size`",
    "number of ranks",
    "position restored",
)


def draw(sample):
    return sample, random.random() + np.random.random() + torch.rand(
        (), dtype=torch.float64
    ).item()


@hr.randomized
def draw_from_its_own(sample, rng):
    return sample, rng.random()


def keep(sample):
    return sample[1] > 0


def each(samples, draw):
    return [(sample, draw(sample)[1]) for sample in samples]


class Drawing(Dataset):
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.draw(index)


def map_style(rank, world):
    return {
        "dataset": Numbers(LENGTH),
        "sampler": DistributedSampler(Numbers(LENGTH), world, rank),
    }


def torchs(rank, world):
    return {
        "dataset": range(LENGTH),
        "sampler": DistributedSampler(range(LENGTH), world, rank),
    }


def torchs_that_draw(draw):
    return lambda rank, world: {
        "dataset": Drawing(draw),
        "sampler": DistributedSampler(range(LENGTH), world, rank),
    }


def stream(rank, world):
    return {"dataset": Count(LENGTH).split(rank=rank, world_size=world)}


def filtered(draw):
    return lambda rank, world: {
        "dataset": Count(LENGTH).map(draw).filter(keep).split(rank=rank, world_size=world)
    }


# By the table's rows: the loaders, as functions of rank and number of ranks, and what else they are
# given.
ROWS = {
    "`hr.randomized` functions of `transform`, `map`, `filter`": [
        (map_style, {"transform": draw_from_its_own}),
        (torchs, {"transform": draw_from_its_own}),
        (stream, {"transform": draw_from_its_own}),
        (filtered(draw_from_its_own), {}),
    ],
    "`random`, NumPy, torch, and generators held by a transform": [
        (map_style, {"transform": draw}),
        (torchs, {"transform": draw}),
        (torchs_that_draw(draw), {}),
        (torchs_that_draw(draw_from_its_own), {}),
        (stream, {"transform": draw}),
    ],
    "the same, in `filter` or in a `map` before it": [(filtered(draw), {})],
    "`collate_fn`, randomized or not": [
        (map_style, {"collate_fn": functools.partial(each, draw=draw)}),
        (torchs, {"collate_fn": functools.partial(each, draw=draw)}),
        (stream, {"collate_fn": functools.partial(each, draw=draw)}),
        (
            map_style,
            {
                "collate_fn": hr.randomized(
                    lambda samples, rng: [(each, rng.random()) for each in samples]
                )
            },
        ),
    ],
}


def numbers(make, common, *, world=1, restore_after=None, **options):
    """Every sample of all ranks with its number."""
    found = []
    for rank in range(world):
        with temporary_rank(RankInfo(rank, world, "test")):
            options = {
                "batch_size": 4,
                "seed": 3,
                "collate_fn": list,
                **common,
                **options,
            }
            with hr.DataLoader(**make(rank, world), **options) as loader:
                if restore_after is None:
                    found += list(loader)
                    continue
                batches = iter(loader)
                found += [next(batches) for _ in range(restore_after)]
                state = loader.state_dict()
            with hr.DataLoader(**make(rank, world), **options) as loader:
                loader.load_state_dict(state)
                found += list(loader)
    return sorted(sample for batch in found for sample in batch)


CHANGES = {
    "`num_workers`": [{"num_workers": 2}],
    "`placement`": [{"placement": "process"}, {"placement": "thread", "num_workers": 1}],
    "`batch_size`": [{"batch_size": 3}],
    "number of ranks": [{"world": 2}],
    "position restored": [{"restore_after": batches} for batches in (1, 5)],
}


def table():
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| drawn by | {' | '.join(COLUMNS)} |")
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = dict(zip(COLUMNS, cells, strict=True))


def test_the_table_has_the_rows_that_are_tested():
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("change", COLUMNS)
@pytest.mark.parametrize("row", ROWS)
def test_the_table_is_true(row, change):
    for make, common in ROWS[row]:
        usual = numbers(make, common)
        assert len(usual) == LENGTH
        for options in CHANGES[change]:
            changed = numbers(make, common, **options)
            assert (changed == usual) is (table()[row][change] == "✓"), (
                make,
                common,
                options,
            )


@pytest.mark.parametrize("row", ROWS)
def test_ranks_never_draw_the_same_numbers(row):
    for make, common in ROWS[row]:
        assert len({number for _, number in numbers(make, common, world=3)}) == LENGTH
