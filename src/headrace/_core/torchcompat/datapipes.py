"""torch's data pipes: seeded for each epoch, and divided among ranks and workers, as torch's own loader does it."""

from __future__ import annotations

import torch
import torch.distributed
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings

from headrace._core.ranks.rankinfo import RankInfo


class PipeSeeds:
    """Draws the seeds that the random pipes of all ranks and workers share.

    A pipe that shuffles comes before the one that divides: all have to shuffle alike, or samples are repeated.
    """

    def __init__(self) -> None:
        # Of all ranks, on the CPU; made once, with the first seed.
        self._group: torch.distributed.ProcessGroup | None = None

    def draw(self, generator: torch.Generator | None) -> int:
        """The next seed; with several ranks that of rank 0, which is a collective call."""
        seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if self._group is None:
                self._group = torch.distributed.new_group(backend="gloo")
            torch.distributed.broadcast(seed, src=0, group=self._group)
        return int(seed)

    def __reduce__(self) -> tuple[object, ...]:
        return PipeSeeds, ()  # a process group stays in its process


def seed_pipe(dataset: IterDataPipe[object] | MapDataPipe[object], seed: int | None) -> None:
    """Seed the random pipes of a data pipe, which they use when they are read from the start next."""
    if seed is not None:
        generator = torch.Generator()
        generator.manual_seed(seed)
        graph_settings.apply_random_seed(dataset, generator)


def divide_pipe(dataset: object, rank: RankInfo, *, worker: int = 0, workers: int = 1) -> None:
    """Have the `sharding_filter` of a data pipe give this reader's part; does nothing with other datasets."""
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        graph_settings.apply_sharding(dataset, workers * rank.world_size, worker * rank.world_size + rank.rank)
