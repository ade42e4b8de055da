"""Checks of a loader with `data_parallel=`: ranks that need the same batches get the same."""

from __future__ import annotations

import warnings

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from headrace._core.call_site import users_stacklevel
from headrace._core.consumer.cursor_sampler import CursorSampler
from headrace._core.consumer.order import TorchLoader
from headrace._core.interface.distributed import check_given_rank
from headrace._core.rankinfo import RankInfo


def check_data_parallel(loader: TorchLoader, rank: RankInfo, *, seed: int | None, stream: bool) -> None:
    """Raise `ValueError` where ranks of one data-parallel rank would get different batches; warn where all get all."""
    parts = (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    for part in parts:
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
    whole = isinstance(loader.sampler, RandomSampler | SequentialSampler)
    if not stream and whole and rank.world_size > 1 and not _is_divided(loader):
        warnings.warn(
            f"each of {rank.world_size} ranks of data_parallel= reads all samples of the dataset: divide them by "
            f"sampler=headrace.ElasticSampler(dataset, seed=...)",
            UserWarning,
            stacklevel=users_stacklevel(),
        )


def _is_divided(loader: TorchLoader) -> bool:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return isinstance(sampler, DistributedSampler) or not isinstance(
        sampler, RandomSampler | SequentialSampler | CursorSampler
    )
