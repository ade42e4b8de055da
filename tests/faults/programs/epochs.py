"""One rank of a job that saves the state of its loader after each batch; run by `test_resume.py`, and killed.

After each batch the rank writes a file that names the samples it was given in this run, with the state to continue
after them, and replaces it by its final name. What it is given after the step that all ranks have saved is rolled
back, as in a trainer.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headrace as hr
from tests.datasets import Numbers
from tests.unit.shards.tars import members

SHARDS = (9, 1, 14, 5, 0, 11, 7, 13)  # samples of each
N = sum(SHARDS)


def write_shards(folder: Path) -> None:
    """Write the samples 0 to N-1 as shards of each format."""
    import pyarrow.parquet  # in the test only: it takes as long as the rest of a rank

    first = 0
    for number, count in enumerate(SHARDS):
        values = range(first, first + count)
        first += count
        (folder / f"{number}.txt").write_text("".join(f"{value}\n" for value in values))
        tar = members(*((f"{value:04}.txt", f"{value:<700}".encode()) for value in values))
        (folder / f"{number}.tar").write_bytes(tar)
    pyarrow.parquet.write_table(pyarrow.table({"x": range(N)}), folder / "rows.parquet", row_group_size=7)


def number_of_member(sample):
    return int(bytes(sample["txt"]))


def number_of_row(sample):
    return sample["x"]


def tars(folder, **options):
    dataset = hr.TarDataset(folder, chunk_bytes=1500, shards_in_parallel=3, remainder="keep", **options)
    return dataset.map(number_of_member)


def lines(folder, **options):
    dataset = hr.LinesDataset(folder, chunk_bytes=10, shards_in_parallel=2, remainder="keep", shuffle=True, **options)
    return dataset.map(int)


def rows(folder, **options):
    return hr.ParquetDataset(folder / "rows.parquet", shuffle=True, remainder="keep", **options).map(number_of_row)


@dataclass(frozen=True)
class Kind:
    """A loader, and what about it may change at a restart.

    Attributes:
        make: makes the dataset and the sampler, None for `DataLoader`'s own, from the folder of the shards.
        global_cursor: whether the state of one rank is enough for all; otherwise the states of all are merged.
        state_bytes: the state is shorter than this; 0 where it grows with the ranks or readers.
        unequal: number of samples that an epoch may give twice.
        buffer: samples that each rank may give again, where their number changes.
    """

    make: Callable[[Path], tuple[Any, Any]]
    global_cursor: bool = False
    state_bytes: int = 0
    unequal: int = 0
    buffer: int = 0


def elastic(folder):
    return Numbers(N), hr.ElasticSampler(N, seed=3)


KINDS = {
    "elastic sampler": Kind(elastic, global_cursor=True, state_bytes=1000, unequal=3),
    "tar, split by samples": Kind(
        lambda folder: (tars(folder).split(remainder="keep"), None), global_cursor=True, state_bytes=2000
    ),
    "tar, split by shards": Kind(lambda folder: (tars(folder), None)),
    "tar, shuffled": Kind(lambda folder: (tars(folder, shuffle=True, buffer_size=8), None), buffer=8),
    "lines": Kind(lambda folder: (lines(folder), None)),
    "parquet": Kind(lambda folder: (rows(folder), None)),
}


def rank(kind: str, shards: Path, prefix: Path, state: Any, options: dict[str, Any], last_step: int) -> None:
    """Give out batches until the epoch ends, or wait after `last_step` to be killed; print the number of each step.

    Args:
        kind: a key of `KINDS`.
        shards: the folder of the shards.
        prefix: of the files of saved states.
        state: the state to continue from; None to begin.
        options: of the loader.
        last_step: number of the batch to wait after; 0 for none.
    """
    dataset, sampler = KINDS[kind].make(shards)
    loader: hr.DataLoader[Any] = hr.DataLoader(dataset, sampler=sampler, seed=3, **options)
    if state is not None:
        loader.load_state_dict(state)
    batches = iter(loader)
    given: list[int] = []
    save(prefix, 0, given, loader)
    for step, batch in enumerate(batches, 1):
        given += torch.as_tensor(batch).tolist()
        save(prefix, step, given, loader)
        if step == last_step:
            signal.pause()
    print("end", flush=True)


def save(prefix: Path, step: int, given: list[int], loader: Any) -> None:
    path = prefix.with_name(f"{prefix.name}-{step}.json")
    path.with_suffix(".part").write_text(json.dumps({"given": given, "state": loader.state_dict()}))
    os.replace(path.with_suffix(".part"), path)
    print(step, flush=True)
