"""Part of a stream that this process reads.

Ranks divide a stream. In torch's own loader, workers divide the rank's part again.
"""

from __future__ import annotations

import operator
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import get_worker_info

from headrace._ranks.rankinfo import (
    RankInfo,
    own_rank,
    rank_of_group,
    rank_of_loader,
    reader_divides,
)

undivided: ContextVar[bool] = ContextVar("headrace_undivided", default=False)
"""Whether streams that start now are read whole by all ranks and workers.

An outer `split` then divides the samples.
"""


@dataclass(frozen=True, slots=True)
class ReaderShare:
    """Part of a stream: number from 0, and number of equal parts."""

    index: int
    count: int

    def in_worker(self) -> ReaderShare:
        """Return this part, divided again among the workers of a torch loader.

        A worker's shards are not always among the rank's shards without workers.
        """
        worker = get_worker_info()
        if worker is None or undivided.get():
            return self
        return ReaderShare(
            self.index * worker.num_workers + worker.id, self.count * worker.num_workers
        )


class RankChoice:
    """Choice of the rank whose part of a stream is read.

    The user gives the rank, or `headrace.get_rank_info` determines the rank when reading starts.

    Attributes:
        given: the user's rank. None if the rank is determined when reading starts.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError(
                f"rank={rank} and world_size={world_size}: give both or neither"
            )
        self.given: ReaderShare | None = None
        # In a spawned worker of torch's own loader: rank of the parent process.
        self._of_parent: ReaderShare | None = None
        # In a spawned worker: whether the parent's reader divides the stream.
        self._divided = False
        if rank is not None and world_size is not None:
            rank, world_size = operator.index(rank), operator.index(world_size)
            if not 0 <= rank < world_size:
                raise ValueError(
                    f"rank={rank} is out of range for world_size={world_size}; ranks start at 0"
                )
            self.given = ReaderShare(rank, world_size)

    def shard(self) -> ReaderShare:
        """Return the current rank's part.

        The part is the whole stream if the caller divides the stream among ranks.
        """
        if not self._is_divided():
            return self._own()
        if self.given is not None and self.given.count > 1:
            raise ValueError(
                f"this stream was given rank={self.given.index}, world_size={self.given.count}, "
                f"and split() or accelerate divides its samples among ranks again: most of them "
                f"would never be read. Leave out rank= and world_size=; or split() and "
                f"accelerator.prepare(), which a headrace loader can do without."
            )
        return ReaderShare(0, 1)

    def _own(self) -> ReaderShare:
        if self.given is not None:
            check_given_rank(
                "a stream or sampler", self.given.index, self.given.count, rank_of_group()
            )
            return self.given
        if self._of_parent is not None and rank_of_loader() is None:
            return self._of_parent
        info = own_rank()
        return ReaderShare(info.rank, info.world_size)

    def _is_divided(self) -> bool:
        return self._divided or undivided.get() or reader_divides()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return self.__dict__
        # A worker spawned by torch's own loader inherits the environment, but neither the process
        # group nor the context variables of the code that iterates over the loader.
        return {
            "given": self.given,
            "_of_parent": self._own(),
            "_divided": self._is_divided(),
        }


def check_given_rank(
    what: str, rank: int, world_size: int, loader: RankInfo | None
) -> None:
    """Raise `ValueError` if a given rank differs from the loader's rank.

    The loader's rank is the rank in `data_parallel=`.
    """
    if (
        loader is None
        or world_size == 1
        or (rank, world_size) == (loader.rank, loader.world_size)
    ):
        return
    raise ValueError(
        f"data_parallel= has {loader.world_size} ranks, and this is rank {loader.rank}, but {what} "
        f"was made for rank {rank} of {world_size}: ranks that need the same batches would get "
        f"others. Give it the rank and the number of ranks in data_parallel=, or leave them out "
        f"where headrace asks for them (headrace.ElasticSampler, streams)"
    )
