"""The state of a loader in a trainer's checkpoint folder, and how much of the epoch is left after it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from headrace._core.order.restore import merged
from headrace._core.order.samplers import CursorSampler
from headrace._core.order.state import LoaderState
from headrace._core.ranks.rankinfo import get_rank_info
from headrace.errors import StateError
from headrace.loader import DataLoader

NAME = "headrace_loader"


def save_state(state: Mapping[str, Any], folder: str | Path, rank: int, world_size: int) -> None:
    """Write this rank's state into a checkpoint's folder; the file is whole or not there.

    Raises:
        StateError: the state of a dataset or sampler of the user's is of types that could not be read again.
    """
    path = Path(folder, _file_name(rank, world_size))
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank == 0:  # files of an earlier run on another number of ranks
        current = {_file_name(each, world_size) for each in range(world_size)}
        for file in path.parent.glob(f"{NAME}*.pth"):
            if file.name not in current:
                file.unlink(missing_ok=True)
    part = path.with_suffix(".part")
    torch.save(dict(state), part)
    try:
        torch.load(part, weights_only=True)
    except Exception as error:
        part.unlink()
        raise StateError(
            "the loader's state cannot be saved in a checkpoint: state_dict() of its dataset, iterator or sampler has "
            "values that torch.load(weights_only=True) refuses. Use numbers, strings, lists, dicts and tensors."
        ) from error
    os.replace(part, path)


def saved_state(folder: str | Path, rank: int, world_size: int) -> LoaderState | None:
    """The state for this rank; None if the folder has none.

    It is what this rank saved, or with another number of ranks the states of all ranks as one.

    Raises:
        StateError: the states of so many ranks are needed, but some are not there or cannot be merged.
    """
    own = Path(folder, _file_name(rank, world_size))
    files = sorted(Path(folder).glob(f"{NAME}*.pth"))
    if own.exists() and (state := _read(own)).ranks == world_size:
        return state
    if not files:
        return None
    states = [_read(file) for file in files]
    same_on_all = next((state for state in states if state.rank is None), None)
    if same_on_all is not None:
        return same_on_all
    try:
        return merged(states)
    except StateError as error:
        error.add_note(f"The states were read from {folder}, by rank {rank} of {world_size}.")
        raise


def batches_left(loader: DataLoader[Any], state: LoaderState) -> int:
    """The number of batches of the saved epoch that are left for this rank.

    Args:
        loader: has a length.
        state: fits the loader; may have been saved with other batches or another number of ranks.
    """
    if loader.batch_size is None and loader.batch_sampler is not None:
        return max(len(loader) - state.batches, 0)
    sampler: Any = loader.sampler
    ranks, drops, total = 1, False, 0
    if loader._control.spec.kind.is_iterable:
        ranks = get_rank_info().world_size
        with loader._control.counted():
            total = len(loader.dataset) * ranks
    elif isinstance(sampler, CursorSampler) and isinstance(sampler, DistributedSampler):
        ranks, drops = sampler.num_replicas, sampler.drop_last
        total = sampler.epoch_size
    else:
        total = len(sampler)
    samples = max(total - state.cursor, 0)
    samples = samples // ranks if drops else -(-samples // ranks)
    size = loader.batch_size or 1
    return samples // size if loader.drop_last else -(-samples // size)


def _file_name(rank: int, world_size: int) -> str:
    return f"{NAME}.pth" if world_size == 1 else f"{NAME}_{rank}.pth"


def _read(path: Path) -> LoaderState:
    try:
        return LoaderState.from_dict(torch.load(path, weights_only=True))
    except Exception as error:
        raise StateError(f"{path} cannot be read: {error}") from error
