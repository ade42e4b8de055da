"""The part of a stream that this process reads: its rank's, and in torch's own loader its worker's."""

from __future__ import annotations

import operator
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import get_worker_info

from headrace._core.ranks.rankinfo import RankInfo, own_rank, rank_of_group, reader_divides

undivided: ContextVar[bool] = ContextVar("headrace_undivided", default=False)
"""Whether streams that start now are read whole by all ranks and workers, because an outer `split` divides them."""


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """One of the equal parts of a stream, numbered from 0."""

    index: int
    count: int

    def in_worker(self) -> ShardOptions:
        """This part, divided again among the workers of a torch loader; each has other shards than its rank alone."""
        worker = get_worker_info()
        if worker is None or undivided.get():
            return self
        return ShardOptions(
            self.index * worker.num_workers + worker.id, self.count * worker.num_workers
        )


class RankChoice:
    """The rank whose part of a stream is read: given by the user, or that of `headrace.get_rank_info` at the start.

    Attributes:
        given: the rank that the user gave; None if it is determined when reading starts.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank} and world_size={world_size}: give both or neither")
        self.given: ShardOptions | None = None
        self._of_parent: ShardOptions | None = (
            None  # in a spawned worker: the rank of its parent process
        )
        self._divided = False  # in a spawned worker: whether the parent's reader divides the stream
        if rank is not None and world_size is not None:
            rank, world_size = operator.index(rank), operator.index(world_size)
            if not 0 <= rank < world_size:
                raise ValueError(
                    f"rank={rank} is out of range for world_size={world_size}; ranks start at 0"
                )
            self.given = ShardOptions(rank, world_size)

    def shard(self) -> ShardOptions:
        """The current rank's part; the whole stream if the caller divides it among ranks."""
        if not self._is_divided():
            return self._own()
        if self.given is not None and self.given.count > 1:
            raise ValueError(
                f"this stream was given rank={self.given.index}, world_size={self.given.count}, and split() or "
                f"accelerate divides its samples among ranks again: most of them would never be read. Leave out "
                f"rank= and world_size=; or split() and accelerator.prepare(), which a headrace loader can do without."
            )
        return ShardOptions(0, 1)

    def _own(self) -> ShardOptions:
        if self.given is not None:
            check_given_rank(
                "a stream or sampler", self.given.index, self.given.count, rank_of_group()
            )
            return self.given
        if self._of_parent is not None:
            return self._of_parent
        info = own_rank()
        return ShardOptions(info.rank, info.world_size)

    def _is_divided(self) -> bool:
        return self._divided or undivided.get() or reader_divides()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return self.__dict__
        # A worker spawned by torch's own loader inherits the environment, but neither the process
        # group nor the context variables of the code that iterates over the loader.
        return {"given": self.given, "_of_parent": self._own(), "_divided": self._is_divided()}


def check_given_rank(what: str, rank: int, world_size: int, loader: RankInfo | None) -> None:
    """Raise `ValueError` where a rank that the user gave is not that of the loader's `data_parallel=`."""
    if loader is None or world_size == 1 or (rank, world_size) == (loader.rank, loader.world_size):
        return
    raise ValueError(
        f"data_parallel= has {loader.world_size} ranks, and this is rank {loader.rank}, but {what} was made for rank "
        f"{rank} of {world_size}: ranks that need the same batches would get others. Give it the rank and the number "
        f"of ranks in data_parallel=, or leave them out where headrace asks for them (headrace.ElasticSampler, streams)"
    )
