"""The positions of a loader in a trainer's checkpoint: a file for each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace._core.order.state import LoaderState
from headrace._core.ranks.rankinfo import RankInfo
from headrace.errors import StateError
from headrace.state import merge_states

State = Mapping[str, Any]


def save_state(state: State, folder: str | Path, name: str, rank: int) -> None:
    """Write this rank's state, so that the file is whole or not there."""
    path = _path(folder, name, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")  # ranks that share their batches write the same
    torch.save(dict(state), part)
    os.replace(part, path)


def load_state(folder: str | Path, name: str, rank: RankInfo) -> State | None:
    """The state for this rank; None if the folder has none.

    It is what this rank saved, or with another number of ranks the states of all as one. The folder may have files of
    more ranks, of an earlier run.

    Raises:
        StateError: each rank reads other samples, and the states of some are not there; or they cannot be merged.
    """
    own = _path(folder, name, rank.rank)
    found = next((file for file in (_path(folder, name, 0), own) if file.exists()), None)
    if found is None:
        return None
    first = _read(found)
    saved = LoaderState.from_dict(first)
    if saved.ranks == rank.world_size and own.exists():
        return _read(own)
    if saved.rank is None:
        return first  # the same on all ranks
    files = [_path(folder, name, number) for number in range(saved.ranks)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise StateError(
            f"{folder} was saved by {saved.ranks} ranks of which each reads other samples, and has no "
            f"{', '.join(missing)}: every rank has to save, and to find the files of all"
        )
    return merge_states(map(_read, files))


def _path(folder: str | Path, name: str, rank: int) -> Path:
    return Path(folder, f"{name}_rank_{rank}.pth")


def _read(file: Path) -> State:
    # The trainers read what was registered for a checkpoint so: the state of a user's dataset may be any object.
    state: State = torch.load(file, map_location="cpu", weights_only=False)
    return state
