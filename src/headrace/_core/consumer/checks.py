"""Checks at the start of an epoch: ranks and workers that are to get different samples, or the same, do so."""

from __future__ import annotations

import warnings

import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from headrace._core.order.samplers import CursorSampler
from headrace._core.order.spec import LoaderSpec, TorchLoader
from headrace._core.ranks.distributed import check_given_rank
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.streams.kinds import DatasetKind, splits_by_rank
from headrace._core.text import users_stacklevel


def check_stream(spec: LoaderSpec, rank: RankInfo, workers: int, done: set[str]) -> None:
    """Warn where each of several workers or ranks reads a whole stream; `done` has the checks that were made."""
    name = type(spec.source).__name__
    if workers > 1 and spec.kind is DatasetKind.ITERABLE and "workers" not in done:
        done.add("workers")
        if not isinstance(spec.source, IterableDataset):  # torch's loader takes no other stream
            _warn(
                f"each of {workers} workers reads all of {name}, so that each sample comes {workers} times: use "
                f"num_workers=0. If {name} divides itself by torch.utils.data.get_worker_info(), say so by the base "
                f"class torch.utils.data.IterableDataset"
            )
    if rank.world_size > 1 and spec.kind is DatasetKind.ASYNC_ITERABLE and "ranks" not in done:
        done.add("ranks")
        if not splits_by_rank(spec.source):
            _warn(
                f"each of {rank.world_size} ranks reads all of {name}, unless it splits itself: they train on the same "
                f"samples. Split it by its .split(), or have it read the part of its rank, which "
                f"headrace.get_rank_info() returns in __aiter__, and declare this by an attribute: "
                f"splits_by_rank = True"
            )


def check_data_parallel(loader: TorchLoader, rank: RankInfo, *, seed: int | None, stream: bool) -> None:
    """Raise `ValueError` where ranks of one data-parallel rank would get different batches; warn where all get all."""
    for part in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        given = getattr(part, "rank", None), getattr(part, "num_replicas", None)
        if isinstance(given[0], int) and isinstance(given[1], int):
            check_given_rank(f"the loader's {type(part).__name__}", given[0], given[1], rank)
    world = rank.world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
    if world > rank.world_size:
        shared = f"data_parallel= has {rank.world_size} of {world} ranks, so that the others get the same batches"
        if seed is None and loader.generator is None:
            raise ValueError(f"{shared}. They must draw the same random numbers: give the loader seed=")
        if not loader.in_order:
            raise ValueError(f"{shared}, but in_order=False gives each rank an order of its own: leave it out")
    inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
    of_one_rank = RandomSampler | SequentialSampler | CursorSampler
    divided = isinstance(inner, DistributedSampler) or not isinstance(inner, of_one_rank)
    whole = isinstance(loader.sampler, RandomSampler | SequentialSampler)
    if not stream and whole and rank.world_size > 1 and not divided:
        _warn(
            f"each of {rank.world_size} ranks of data_parallel= reads all samples of the dataset: divide them by "
            f"sampler=headrace.ElasticSampler(dataset, seed=...)"
        )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=users_stacklevel())
