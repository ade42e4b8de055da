"""The rest of an epoch that a trainer resumes, in the trainer's numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers.trainer_utils import has_length

from headrace._core.consumer.epoch import BatchIterator
from headrace._core.order.state import LoaderState
from headrace.loader import DataLoader

_END = object()


@dataclass(frozen=True, slots=True)
class ResumedEpoch:
    """An epoch of which batches were trained on before.

    Attributes:
        epoch: its number.
        batches: number of batches of the whole epoch; of a stream of unknown length, more than it can have.
        left: those that are left.
    """

    epoch: int
    batches: int
    left: int

    def steps(self, accumulation: int) -> int:
        """The number of optimizer steps that are left in it."""
        return -(-self.left // accumulation)

    def progress(self, of_rest: float, *, next_epoch: bool) -> float:
        """The number of epochs that have passed.

        Args:
            of_rest: the part of what was left that has passed.
            next_epoch: whether nothing was left, so that this is a part of the next epoch.
        """
        passed = round(of_rest * self.left)
        if not next_epoch:
            passed += self.batches - self.left
        elif self.left < self.batches:
            return self.epoch + 1 + passed / self.batches
        return self.epoch + passed / self.batches

    def last_step(self, epochs: float, step: int, accumulation: int) -> int:
        """The number of the training's last step, if it ends after so many epochs and `step` steps have been taken."""
        each = -(-self.batches // accumulation)
        done = self.epoch * each + each - self.steps(accumulation)
        return step + max(math.ceil(epochs * each) - done, 0)

    def epochs_until(self, last_step: int, step: int, accumulation: int) -> int:
        """The number of epochs that are begun until `last_step`, if `step` steps have been taken."""
        each = -(-self.batches // accumulation)
        return self.epoch + 1 + max(math.ceil((last_step - step - self.steps(accumulation)) / each), 0)


class EpochBatches:
    """The batches of one epoch of a loader, for a trainer that calls `iter()` once.

    Args:
        loader: the loader.
        epoch: the epoch's number.
        restored: whether the loader was restored. If nothing is left of that epoch, the next one follows.

    Attributes:
        batches: the loader's iterator; None before `iter()`.
        skipped: whether nothing was left of the restored epoch.
    """

    def __init__(self, loader: DataLoader[Any], epoch: int, *, restored: bool) -> None:
        self._loader = loader
        self._epoch = epoch
        self._restored = restored
        self.batches: BatchIterator[Any] | None = None
        self.skipped = False

    def __iter__(self) -> Iterator[Any]:
        self._loader.set_epoch(self._epoch)  # of a restored one for torch datasets alone
        batches = self._begin()
        if not self._restored:
            return batches
        first = next(batches, _END)
        if first is not _END:
            return itertools.chain((first,), batches)
        self.skipped = True
        # With a length, it was known that nothing was left.
        self._loader.set_epoch(self._epoch if has_length(self._loader) else self._epoch + 1)
        return self._begin()

    def _begin(self) -> Iterator[Any]:
        batches = iter(self._loader)
        assert isinstance(batches, BatchIterator)
        self.batches = batches
        return batches

    def finish(self) -> None:
        """End the epoch, if all its batches were given: the Trainer does not ask for more than there are."""
        if self.batches is None or not has_length(self._loader):
            return
        if LoaderState.from_dict(self.batches.state_dict()).batches >= len(self._loader):
            next(self.batches, None)

    def close(self) -> None:
        """Stop fetching for this epoch."""
        if self.batches is not None:
            self.batches.close()
