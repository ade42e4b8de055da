"""What integrations share: copies of loaders, their orders, and their positions in a trainer's checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from headrace._core.device.streams import resolve
from headrace._core.order.samplers import SeededRandomSampler
from headrace._core.order.state import LoaderState
from headrace._core.ranks.rankinfo import RankInfo
from headrace.errors import StateError
from headrace.loader import DataLoader
from headrace.options import LoaderOptions
from headrace.state import merge_states

State = Mapping[str, Any]


def copied(loader: DataLoader[Any], device: torch.device | None) -> DataLoader[Any]:
    """A copy of a loader, not iterated over; its batches go to `device`, unless the loader has one or this is a CPU."""
    made = copy.copy(loader)
    spec, target = made._control.spec, resolve(device)
    if spec.options["device"] is None and target is not None:
        made.__dict__.setdefault("device", device)  # a subclass may have an attribute of this name
        options = cast(LoaderOptions, {**spec.options, "device": device})
        made._control = made._control.on_device(dataclasses.replace(spec, options=options, device=target))
    return made


def computed_order(sampler: Any, seed: int = 0) -> tuple[bool, int] | None:
    """Whether a sampler's order is shuffled, and its own seed or the one given; None if it has to be drawn."""
    if type(sampler) is SequentialSampler:
        return False, seed
    if type(sampler) is SeededRandomSampler:
        return True, sampler.seed
    whole = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
    return (True, seed) if whole else None


def save_state(state: State, folder: str | Path, name: str, rank: int) -> None:
    """Write this rank's state, so that the file is whole or not there.

    Raises:
        StateError: the state of a dataset or sampler of the user's is of types that could not be read again.
    """
    path = _path(folder, name, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")  # ranks that share their batches write the same
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
    try:
        state: State = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(f"{file} cannot be read: {error}") from error
    return state
