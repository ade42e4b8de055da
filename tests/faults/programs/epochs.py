"""One rank of a job that saves the state of its loader, run by `test_resume.py` and killed; the datasets that it reads.

What it is given after the state is rolled back, as in a trainer.
"""

from __future__ import annotations

import json
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
    first = 0
    for number, count in enumerate(SHARDS):
        values = range(first, first + count)
        first += count
        (folder / f"{number}.txt").write_text("".join(f"{value}\n" for value in values))
        tar = members(
            *((f"{value:04}.txt", f"{value:<700}".encode()) for value in values)
        )
        (folder / f"{number}.tar").write_bytes(tar)


def number_of_member(sample):
    return int(bytes(sample["txt"]))


def tars(folder, **options):
    dataset = hr.TarDataset(folder, chunk_bytes=1500, shards_in_parallel=3, **options)
    return dataset.map(number_of_member)


def lines(folder, **options):
    dataset = hr.LinesDataset(
        folder, chunk_bytes=10, shards_in_parallel=2, shuffle=True, **options
    )
    return dataset.map(int)


@dataclass(frozen=True)
class Kind:
    """A loader, and what about it may change at a restart.

    Attributes:
        make: makes the dataset and the sampler, None for `DataLoader`'s own, from the folder of the
            shards.
        global_cursor: whether any number of ranks continues from the state of one rank; otherwise
            as many ranks continue, each from its own state.
        state_bytes: the state is shorter than this; 0 where it grows with the ranks or readers.
    """

    make: Callable[[Path], tuple[Any, Any]]
    global_cursor: bool = False
    state_bytes: int = 0


def elastic(folder):
    return Numbers(N), hr.ElasticSampler(N, seed=3)


KINDS = {
    "elastic sampler": Kind(elastic, global_cursor=True, state_bytes=1000),
    "tar, split by samples": Kind(lambda folder: (tars(folder).split(), None)),
    "tar, shuffled": Kind(
        lambda folder: (tars(folder, shuffle=True, buffer_size=8), None)
    ),
    "lines": Kind(lambda folder: (lines(folder), None)),
}


def rank(
    kind: str,
    shards: Path,
    path: Path,
    state: Any,
    options: dict[str, Any],
    killed_after: int,
) -> None:
    """Give out batches until the epoch ends, or save the state after some of them, go on, and wait to be killed.

    Args:
        kind: a key of `KINDS`.
        shards: the folder of the shards.
        path: the file of the samples that were given out and of the state after them.
        state: the state to continue from; None to begin.
        options: of the loader.
        killed_after: number of the batch to save the state after; 0 to save the state at the end.
    """
    dataset, sampler = KINDS[kind].make(shards)
    loader: hr.DataLoader[Any] = hr.DataLoader(
        dataset, 2, sampler=sampler, seed=3, **options
    )
    if state is not None:
        loader.load_state_dict(state)
    given: list[int] = []
    for number, batch in enumerate(loader, 1):
        if number > killed_after > 0:
            signal.pause()
        given += torch.as_tensor(batch).tolist()
        if number == killed_after:
            save(path, given, loader)
    save(path, given, loader)


def save(path: Path, given: list[int], loader: Any) -> None:
    path.write_text(json.dumps({"given": given, "state": loader.state_dict()}))
    print("saved", flush=True)
