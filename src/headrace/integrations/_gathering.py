"""Loaders for accelerate's `gather_for_metrics`, which needs to know the last batch and the samples that fill it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import recursively_apply
from transformers.trainer_pt_utils import find_batch_size

from headrace._core.ranks.rankinfo import reading_divided
from headrace.loader import DataLoader

_END = object()


class GatheredBatches:
    """One rank's batches of a loader, of which `gather_for_metrics` gives each sample once, in order.

    Has the loader's attributes.

    Args:
        loader: gives this rank's batches; where `divided`, those of all ranks, which have equal parts of each.
        batch_size: samples in a batch of all ranks.
        samples: number of samples of all ranks; None if unknown, so that nothing is cut off after several ranks.
        rank: of this process.
        world_size: number of ranks.
        divided: whether each batch is divided here.

    Attributes:
        end_of_dataloader: whether the batch given out last was the last; accelerate reads it.
        remainder: number of samples in it over all ranks, or 0 if it is full; -1 if unknown. accelerate reads it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batch_size: int,
        samples: int | None,
        rank: int,
        world_size: int,
        *,
        divided: bool,
    ) -> None:
        self._loader = loader
        self._batch_size = batch_size
        self._samples = samples
        self._rank, self._world_size = rank, world_size
        self._divided = divided
        self.end_of_dataloader = False
        self.remainder = -1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not yet set, while unpickling
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader, self.remainder = False, -1
        state = GradientState()
        state._add_dataloader(self)
        try:
            with reading_divided(self._divided):
                batches = iter(self._loader)
            batch = next(batches, _END)
            while batch is not _END:
                ahead = next(batches, _END)
                if ahead is _END:
                    self.end_of_dataloader = True
                    self.remainder = self._remainder(batch)
                yield self._part(batch) if self._divided else batch
                batch = ahead
        finally:
            state._remove_dataloader(self)

    def _remainder(self, last: Any) -> int:
        if self._loader.drop_last:
            return -1
        counted = self._divided or self._world_size == 1
        samples = find_batch_size(last) if counted else self._samples
        return -1 if samples is None else samples % self._batch_size

    def _part(self, batch: Any) -> Any:
        """This rank's samples of a batch; one that is not full is repeated until it is."""
        samples = find_batch_size(batch)
        if samples is None:
            raise ValueError(
                f"a batch of an evaluated stream must have a tensor, by whose first dimension it is divided among "
                f"{self._world_size} ranks, but got {type(batch).__name__}"
            )
        size = self._batch_size // self._world_size
        taken = torch.arange(self._rank * size, (self._rank + 1) * size) % samples
        return recursively_apply(lambda tensor: tensor[taken.to(tensor.device)], batch)
