"""Warnings of streams that several readers read whole, so that each sample comes several times."""

from __future__ import annotations

import warnings

from torch.utils.data import IterableDataset

from headrace._core.call_site import users_stacklevel
from headrace._core.interface.kinds import DatasetKind
from headrace._core.interface.replication import is_replicated
from headrace._core.rankinfo import RankInfo


class StreamChecks:
    """The checks of one loader's stream, each made once.

    Args:
        source: the dataset.
        kind: its kind; nothing is checked of a map-style one.
    """

    def __init__(self, source: object, kind: DatasetKind) -> None:
        self._source = source
        self._kind = kind
        self._ranks_checked = self._workers_checked = False

    def check(self, rank: RankInfo, workers: int) -> None:
        """Warn where each of several workers or ranks reads the whole stream."""
        if workers > 1 and self._kind is DatasetKind.ITERABLE and not self._workers_checked:
            self._workers_checked = True
            self._check_workers(workers)
        if rank.world_size > 1 and self._kind.is_iterable and not self._ranks_checked:
            self._ranks_checked = True
            self._check_ranks(rank)

    def _check_workers(self, workers: int) -> None:
        if not isinstance(self._source, IterableDataset):  # torch's loader takes no other stream
            name = type(self._source).__name__
            warnings.warn(
                f"each of {workers} workers reads all of {name}, so that each sample comes {workers} times: use "
                f"num_workers=0. If {name} divides itself by torch.utils.data.get_worker_info(), say so by the base "
                f"class torch.utils.data.IterableDataset",
                UserWarning,
                stacklevel=users_stacklevel(),
            )

    def _check_ranks(self, rank: RankInfo) -> None:
        if is_replicated(self._source):
            warnings.warn(
                f"each of {rank.world_size} ranks reads all of {type(self._source).__name__}: they train on the same "
                f"samples. Split the stream by its .split() or by headrace.split(), or have it read the part of its "
                f"rank, which headrace.get_rank_info() returns in __aiter__ or __iter__. A stream that is not the same "
                f"on all ranks declares this by an attribute: splits_by_rank = True",
                UserWarning,
                stacklevel=users_stacklevel(),
            )
