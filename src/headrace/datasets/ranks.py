"""Which part of a stream this process reads: of so many ranks, and where torch's own loader reads it, workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed
from torch.utils.data import get_worker_info

__all__ = ["Place", "Uneven", "check_uneven", "this_rank"]

Uneven = Literal["drop", "pad", "repeat", "keep"]
"""What is done where ranks would get unequal numbers of samples.

``"drop"``: those that the smallest part has no counterpart for are left out. ``"pad"``: a part that has ended gives its
last sample again. ``"repeat"``: it begins again. ``"keep"``: nothing is done; ranks may differ.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """One of several readers who share a stream.

    Attributes:
        number: which, from 0.
        count: how many there are.
    """

    number: int
    count: int

    def in_worker(self) -> Place:
        """This place, divided among the workers of a torch loader where one of them asks."""
        worker = get_worker_info()
        if worker is None:
            return self
        return Place(self.number * worker.num_workers + worker.id, self.count * worker.num_workers)


def this_rank(rank: int | None, world_size: int | None) -> Place:
    """The place of this process in its training job.

    Args:
        rank: as given; None to ask `torch.distributed` where it is initialized, else what torchrun set in the
            environment, else 0.
        world_size: the same, else 1.

    Raises:
        ValueError: only one of the two is given, or they do not go together.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank} and world_size={world_size}: give both or neither")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        else:
            rank, world_size = 0, 1
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not one of world_size={world_size} ranks, which count from 0")
    return Place(rank, world_size)


def check_uneven(uneven: str) -> None:
    """Raise `ValueError` for what is no such policy."""
    if uneven not in get_args(Uneven):
        raise ValueError(f"uneven={uneven!r} must be one of {', '.join(map(repr, get_args(Uneven)))}")
