"""The seeds of an epoch, drawn from torch's generators in torch's order, or taken from a saved state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe

from headrace._core.order.order import EpochOrder
from headrace._core.order.spec import LoaderSpec, TorchLoader
from headrace._core.order.state import LoaderState
from headrace._core.seeding import batch_seed
from headrace._core.torchcompat.datapipes import PipeSeeds, seed_pipe


class EpochSeeds:
    """Draws the seeds of one loader's epochs.

    Attributes:
        kept: the seed that persistent workers began with; None before, and without such workers.
    """

    def __init__(self, spec: LoaderSpec) -> None:
        self._source = spec.source
        self._seed = spec.options["seed"]
        self._is_async = spec.kind.is_async
        self._pipe_seeds = PipeSeeds()
        self.kept: int | None = None

    def draw(
        self, loader: TorchLoader, epoch: int, order: EpochOrder, resumed: LoaderState | None
    ) -> tuple[Iterator[Any], int]:
        """The draws of the sampler, and the seed of the batches' seeds, after `resumed`, if a state was restored."""
        if resumed is not None and resumed.kept_seed is not None:
            self.kept = resumed.kept_seed
        if resumed is None or order.resumed is None:
            draws = order.draws()
            if not loader.num_workers or self._is_async or self.kept:
                return draws, self._base_seed(loader)
            base_seed = self._base_seed(loader)
            draws = order.draws()  # torch does so too; it shows where a sampler draws in `__iter__`
            self.draw_for_pipe(loader, epoch, None)  # as does torch, which uses the first
            return draws, base_seed
        order.restore_generator(resumed)
        if resumed.base_seed is None:
            drawn = self._base_seed(loader)
            return order.draws(), drawn
        if loader.generator is not None:
            self._base_seed(loader)  # so that later epochs draw what they would have drawn
        draws = order.draws()
        if loader.persistent_workers and not self._is_async:
            self.kept = resumed.base_seed
        return draws, resumed.base_seed

    def draw_for_pipe(self, loader: TorchLoader, epoch: int, resumed: LoaderState | None) -> int | None:
        """Seed a datapipe's shuffles; its seed, or None of another dataset."""
        if not isinstance(self._source, IterDataPipe):
            return None
        drawn = self._pipe_seeds.draw(loader.generator) if self._seed is None else batch_seed(self._seed, epoch, 0) >> 1
        if resumed is not None and resumed.pipe_seed is not None:
            drawn = resumed.pipe_seed
        seed_pipe(self._source, drawn)
        return drawn

    def _base_seed(self, loader: TorchLoader) -> int:
        if self._seed is not None:
            return self._seed
        # As torch does, and in the same place, so that the same torch.manual_seed gives the same order: at each iter(),
        # but only once for workers that persist.
        if self.kept is None:
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
            if not (loader.persistent_workers and not self._is_async):
                return drawn
            self.kept = drawn
        return self.kept
