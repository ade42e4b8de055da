"""Shared code of integrations: copies, orders and saved positions of loaders."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from headrace._base.array_types import IntArray
from headrace._device.streams import resolve
from headrace._order.samplers import SeededRandomSampler
from headrace._order.state import LoaderState
from headrace._random.seeding import batch_seed, isolated_generators, seed_everything
from headrace._ranks.distributed import ReaderShare
from headrace._ranks.rankinfo import RankInfo
from headrace.errors import StateError
from headrace.loader import DataLoader
from headrace.options import LoaderOptions
from headrace.samplers import ElasticSampler

State = Mapping[str, Any]
_AT_ONCE = 4096  # number of indices computed by a call


def copied_to(loader: DataLoader[Any], device: torch.device | None) -> DataLoader[Any]:
    """Copy a loader for a device.

    The copy has begun no iteration. Batches of the copy go to `device`, unless the loader has a
    device already, or `device` is None or a CPU.
    """
    made = copy.copy(loader)
    spec, target = made._control.spec, resolve(device)
    if spec.options["device"] is None and target is not None:
        made.__dict__.setdefault("device", device)  # a subclass may define the same name
        options = cast(LoaderOptions, {**spec.options, "device": device})
        made._control = made._control.with_spec(
            spec._replace(options=options, device=target)
        )
    return made


class ComputedOrder(NamedTuple):
    """Arguments that decide on a computed order."""

    shuffle: bool
    seed: int


def computed_order(sampler: Any, seed: int = 0) -> ComputedOrder | None:
    """Return a sampler's order, with the seed of the sampler or else `seed`.

    None for a sampler with an order that has to be drawn.
    """
    if type(sampler) is SequentialSampler:
        return ComputedOrder(False, seed)
    if type(sampler) is SeededRandomSampler:
        return ComputedOrder(True, sampler.seed)
    whole = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source)
    )
    return ComputedOrder(True, seed) if whole else None


class BatchwiseSampler(ElasticSampler):
    """Sampler that distributes an order to ranks batch by batch.

    Like `ElasticSampler`, but rank r gets the batches r, r + world_size and so on, as in
    accelerate. So the padding of the last step is at the end of the step, and
    `Accelerator.gather_for_metrics` cuts off the padding.

    Torch's shuffled order is replaced by a `Permutation`. From any other sampler, all indices are
    drawn at once, with generators temporarily seeded by seed and epoch. So every rank has the same
    order, also after resuming. The last step is padded from the beginning of the order.

    Example:
        >>> in_order = torch.utils.data.SequentialSampler(range(9))
        >>> [list(BatchwiseSampler(in_order, 2, RankInfo(rank, 2, ""))) for rank in range(2)]
        [[0, 1, 4, 5, 8, 0], [2, 3, 6, 7, 1, 2]]
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        rank: RankInfo,
        seed: int = 0,
        *,
        drop_last: bool = False,
    ) -> None:
        order = computed_order(sampler, seed)
        super().__init__(
            len(sampler),
            shuffle=order is None or order.shuffle,
            seed=seed if order is None else order.seed,
            drop_last=drop_last,
            rank=rank.rank,
            world_size=rank.world_size,
        )
        self.batch_size = batch_size
        self._drawn = sampler if order is None else None
        if order is None:
            self.order_of = type(sampler).__name__  # part of the loader's state

    @property
    def dealt_at_once(self) -> int:
        """Number of samples in a batch of a rank."""
        return self.batch_size

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Number of samples of this rank in a whole epoch."""
        full, last = self._steps(0, self._shard())
        return full * self.batch_size + last

    def remainder(self, cursor: int) -> int:
        """Return the number of samples in the last step.

        The number is over all ranks, without padding, and 0 if the last step is full. `cursor` is
        the position of all ranks at the beginning.
        """
        return max(self._length - cursor, 0) % (self.batch_size * self.num_replicas)

    def _order(self, epoch: int) -> Any:
        if self._drawn is None:
            return super()._order(epoch)
        own = getattr(self._drawn, "generator", None)
        generator = own if isinstance(own, torch.Generator) else torch.Generator()
        before, seed = generator.get_state(), batch_seed(self.seed, epoch, 0)
        with isolated_generators():
            seed_everything(seed)
            generator.manual_seed(seed)
            if hasattr(self._drawn, "set_epoch"):
                self._drawn.set_epoch(epoch)
            try:
                return np.fromiter(self._drawn, np.int64)
            finally:
                generator.set_state(before)

    def _steps(self, cursor: int, shard: ReaderShare) -> tuple[int, int]:
        """Return the numbers of full steps and of remaining samples.

        Full steps are counted from `cursor`. Remaining samples are this rank's samples in the last,
        incomplete step.
        """
        full, rest = divmod(max(self._length - cursor, 0), self.batch_size * shard.count)
        if self.drop_last or not rest:
            return full, 0
        return full, rest if shard.count == 1 else self.batch_size

    def _dealt(self, order: Any, shard: ReaderShare, cursor: int) -> Iterator[IntArray]:
        full, last = self._steps(cursor, shard)
        size, step = self.batch_size, self.batch_size * shard.count
        first, count = cursor + shard.index * size, full * size + last
        for start in range(0, count, _AT_ONCE):
            numbers = np.arange(start, min(start + _AT_ONCE, count), dtype=np.int64)
            positions = (first + numbers // size * step + numbers % size) % self._length
            yield positions if isinstance(order, range) else order[positions]


def save_state(state: State, folder: str | Path, name: str, rank: int) -> None:
    """Write the state of this rank to a file.

    The file is complete or absent, also after a kill.

    Raises:
        StateError: torch.load(weights_only=True) cannot read the state.
    """
    path = _path(folder, name, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks with equal batches write the same file.
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(dict(state), part)
    try:
        torch.load(part, weights_only=True)
    except Exception as error:
        part.unlink()
        text = "the state of the loader's dataset, iterator or sampler cannot be saved"
        raise StateError(
            f"{text}: torch.load(weights_only=True) refuses values in it"
        ) from error
    os.replace(part, path)


def load_state(folder: str | Path, name: str, rank: RankInfo) -> State | None:
    """Read the state for this rank from a folder.

    Without a file for this rank, or if the number of ranks changed, read the state of rank 0: the
    state may be equal on all ranks. The folder may have files of further ranks from an earlier
    run. The result is None if the folder has no state.
    """
    own = _path(folder, name, rank.rank)
    found = next((file for file in (_path(folder, name, 0), own) if file.exists()), None)
    if found is None:
        return None
    first = _read(found)
    as_many = LoaderState.from_dict(first).ranks == rank.world_size
    return _read(own) if as_many and own.exists() else first


def _path(folder: str | Path, name: str, rank: int) -> Path:
    return Path(folder, f"{name}_rank_{rank}.pth")


def _read(file: Path) -> State:
    state: State = torch.load(file, map_location="cpu", weights_only=True)
    return state
