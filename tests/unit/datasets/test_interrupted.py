"""Datasets of shards in a loader interrupted after any batch of two epochs: the same batches follow.

A transform that draws random numbers is part of them.
"""

import itertools
import json
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

import headrace as hr
from tests.unit.datasets.formats import plain
from tests.unit.shards import tars

EPOCHS = 2
COUNTS = (4, 1, 0, 6)  # samples of each shard
N = sum(COUNTS)


def write_datasets(folder):
    """Eleven samples in each format."""
    for name in ("tar", "lines", "parquet"):
        (folder / name).mkdir()
    first = 0
    for shard, count in enumerate(COUNTS):
        values = range(first, first + count)
        first += count
        (folder / "tar" / f"{shard}.tar").write_bytes(tars.shard([f"{value:02}" for value in values]))
        (folder / "lines" / f"{shard}.jsonl").write_text("".join(f'{{"x": {value}}}\n' for value in values))
    table = pyarrow.table({"x": range(N), "text": [str(value) for value in range(N)]})
    pyarrow.parquet.write_table(table, folder / "parquet" / "0.parquet", row_group_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    write_datasets(folder)
    return folder


def tar(folder, **options):
    return hr.TarDataset(folder / "tar", chunk_bytes=600, shards_in_parallel=2, **options)


def lines(folder, **options):
    return hr.LinesDataset(folder / "lines", chunk_bytes=10, shards_in_parallel=2, **options)


def parquet(folder, **options):
    return hr.ParquetDataset(folder / "parquet", **options)


DATASETS = {
    "tar, shuffled": lambda folder: tar(folder, shuffle=True, buffer_size=4),
    "lines, shuffled": lambda folder: lines(folder, shuffle=True, buffer_size=4),
    "parquet rows, shuffled": lambda folder: parquet(folder, shuffle=True, buffer_size=4),
    "parquet tables": lambda folder: parquet(folder, format="arrow", table_rows=2),
    "cached, indexed": lambda folder: hr.TarDataset.index(folder / "tar").cache(folder / "cache"),
    "concat": lambda folder: hr.concat([tar(folder), lines(folder, shuffle=True)]),
    "mix, repeated": lambda folder: hr.mix([tar(folder).repeat(2), lines(folder).repeat()], [1, 1]),
    "map and filter": lambda folder: lines(folder).map(with_noise).filter(is_likely),
}


def with_noise(sample):
    """Draw from every global generator."""
    return sample, random.random(), np.random.random(), torch.rand(()).item()


def is_likely(sample):
    return sample[1] < 0.8


def loader_of(dataset):
    shuffle = True if hasattr(dataset, "aget") else None
    return hr.DataLoader(dataset, 3, shuffle=shuffle, seed=5, transform=with_noise, collate_fn=list)


def states_and_batches(loader):
    """For each epoch, the state before each batch and after the last; and its batches."""
    for _ in range(EPOCHS):
        states, batches = [json.dumps(loader.state_dict())], []
        for batch in loader:
            batches.append(plain(batch))
            states.append(json.dumps(loader.state_dict()))
        yield states, batches


@pytest.mark.filterwarnings("ignore:.* has no state_dict", "ignore:.*cannot be saved", "ignore:.*read again")
@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_batches_after_an_interruption_are_those_of_the_uninterrupted_run(make, folder):
    dataset = make(folder)
    with loader_of(dataset) as loader:
        epochs = list(states_and_batches(loader))
    assert len({repr(batch) for _, batches in epochs for batch in batches}) == sum(len(each) for _, each in epochs)
    following = [batches[:1] for _, batches in epochs[1:]] + [[]]
    for (states, batches), of_next in zip(epochs, following, strict=True):
        for delivered, state in enumerate(states):
            with loader_of(dataset) as restored:
                restored.load_state_dict(json.loads(state))
                assert [*map(plain, restored)] == batches[delivered:]
                if of_next and delivered % 2:  # and the next epoch begins as it would have
                    assert [*map(plain, itertools.islice(restored, 1))] == of_next
