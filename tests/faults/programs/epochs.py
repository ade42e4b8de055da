"""One rank of a job that saves the state of its loader after each batch; run by `test_resume.py`, and killed.

After each batch the rank writes a file that names the samples it was given in this run, with the state to continue
after them, and replaces it by its final name. What it is given after the step that all ranks have saved is rolled
back, as in a trainer.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headrace as hr
from tests.datasets import Numbers, TorchStream
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


async def numbers():
    for number in range(N):
        yield number


class Counting(hr.AsyncIterableDataset):
    """A user's stream: each rank reads every n-th number."""

    splits_by_rank = True

    async def __aiter__(self):
        rank = hr.get_rank_info()
        for number in range(rank.rank, N, rank.world_size):
            yield number


class Remembering(hr.AsyncIterableDataset):
    """A user's stream that continues after its state."""

    splits_by_rank = True
    position = 0

    async def __aiter__(self):
        rank = hr.get_rank_info()
        for number in range(self.position, -(-(N - rank.rank) // rank.world_size)):
            self.position = number + 1
            yield rank.rank + number * rank.world_size
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


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
        ranks: the greatest number of ranks.
        global_cursor: whether the state of one rank is enough for all; otherwise each rank continues from its own.
        workers: the number of workers, where it must stay the same.
        state_bytes: the state is shorter than this; 0 where it grows with the ranks or readers.
        unequal: number of samples by which an epoch may differ from the dataset: given twice (positive) or dropped.
    """

    make: Callable[[Path], tuple[Any, Any]]
    ranks: int = 4
    global_cursor: bool = False
    workers: int | None = None
    state_bytes: int = 0
    unequal: int = 0


def elastic(folder):
    return Numbers(N), hr.ElasticSampler(N, seed=3)


def blocks(folder):
    return Numbers(N), hr.BlockShuffleSampler(N, block_size=4, blocks_at_once=12, seed=3)


KINDS = {
    "map-style, seed": Kind(lambda folder: (Numbers(N), None), ranks=1, global_cursor=True, state_bytes=1000),
    "elastic sampler": Kind(elastic, global_cursor=True, state_bytes=1000, unequal=3),
    "block sampler": Kind(blocks, global_cursor=True, state_bytes=1000, unequal=-3),
    "split by samples": Kind(
        lambda folder: (hr.from_async_iterable(numbers).split(remainder="keep"), None),
        global_cursor=True,
        state_bytes=1000,
    ),
    "tar, split by samples": Kind(
        lambda folder: (tars(folder).split(remainder="keep"), None), global_cursor=True, state_bytes=2000
    ),
    "tar, split by shards": Kind(lambda folder: (tars(folder), None)),
    "tar, shuffled": Kind(lambda folder: (tars(folder, shuffle=True, buffer_size=8), None)),
    "lines": Kind(lambda folder: (lines(folder), None)),
    "parquet": Kind(lambda folder: (rows(folder), None)),
    "torch iterable": Kind(lambda folder: (TorchStream(N), None), ranks=1, workers=2),
    "user's stream": Kind(lambda folder: (Counting(), None)),
    "user's stream with a state": Kind(lambda folder: (Remembering(), None)),
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
    warnings.filterwarnings("ignore", ".*has no state_dict|each of .* ranks reads all")
    dataset, sampler = KINDS[kind].make(shards)
    shuffle = True if kind == "map-style, seed" else None
    loader: hr.DataLoader[Any] = hr.DataLoader(dataset, sampler=sampler, shuffle=shuffle, seed=3, **options)
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
