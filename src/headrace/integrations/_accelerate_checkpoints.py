"""The positions of loaders in the checkpoints of accelerate: a file for each loader and rank."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace._core.order.state import LoaderState
from headrace._core.ranks.rankinfo import RankInfo
from headrace.errors import StateError
from headrace.integrations._accelerate_loader import PreparedLoader
from headrace.state import merge_states

# With their places among the loaders of the accelerator.
Loaders = Sequence[tuple[int, PreparedLoader[Any]]]


def save_states(accelerator: Any, loaders: Loaders, folder: str) -> None:
    """Save this rank's position of each loader."""
    _register_once(accelerator)
    for number, loader in loaders:
        rank = loader._division.rank
        file = _file(folder, number, rank.rank)
        partial = file.with_suffix(f".partial{accelerator.process_index}")  # tensor-parallel ranks save the same
        torch.save(loader.state_dict(), partial)
        os.replace(partial, file)
        for other in itertools.count(rank.world_size):  # of an earlier run with more ranks
            stale = _file(folder, number, other)
            if not stale.exists():
                break
            stale.unlink(missing_ok=True)  # by one of the ranks


def load_states(accelerator: Any, loaders: Loaders, folder: str) -> None:
    """Restore each loader's position: that of this rank; or with another number of ranks that of all.

    Raises:
        StateError: the checkpoint does not have what this rank needs, or it does not fit the loader.
    """
    _register_once(accelerator)
    for number, loader in loaders:
        saved = _saved(Path(folder), number)
        if not saved:
            warnings.warn(
                f"{folder} has no position of loader {number} of the accelerator: its next epoch begins anew. It was "
                f"saved without headrace.integrations.accelerate.prepare(), or with fewer loaders.",
                UserWarning,
                stacklevel=4,
            )
            continue
        loader.load_state_dict(_chosen(saved, loader._division.rank, folder))


def _chosen(saved: Mapping[int, Path], rank: RankInfo, folder: str) -> Mapping[str, Any]:
    first = _read(saved[min(saved)])
    state = LoaderState.from_dict(first)
    if state.ranks == rank.world_size and rank.rank in saved:
        return _read(saved[rank.rank])
    if len(saved) == state.ranks:
        return merge_states(map(_read, saved.values()))
    if state.rank is None:
        return first  # the same on all ranks, where each has its own file system, or only one has called save_state()
    raise StateError(
        f"{folder} has the loader's positions of the ranks {sorted(saved)}, and was saved with {state.ranks} ranks of "
        f"which each reads other samples: every rank has to call save_state(), and to find the files of all"
    )


def _read(file: Path) -> Mapping[str, Any]:
    # As accelerate loads what was registered for checkpointing: the state of a user's dataset may be any object.
    state: Mapping[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    return state


def _saved(folder: Path, number: int) -> dict[int, Path]:
    """The files of a loader, by rank."""
    files = folder.glob(f"headrace_loader_{number}_rank_*.bin")
    return {int(file.stem.rpartition("_")[2]): file for file in files}


def _file(folder: str, number: int, rank: int) -> Path:
    return Path(folder, f"headrace_loader_{number}_rank_{rank}.bin")


def _register_once(accelerator: Any) -> None:
    """Undo `register_for_checkpointing(loader)`, which would save one rank's position for all."""
    objects = accelerator._custom_objects
    objects[:] = [each for each in objects if not isinstance(each, PreparedLoader)]
