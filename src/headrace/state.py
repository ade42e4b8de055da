"""States of the loaders of several ranks as one, to continue with another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed

from headrace._core.order.restore import merged
from headrace._core.order.state import states_from_dict, states_to_dict

if TYPE_CHECKING:
    from headrace.loader import DataLoader

__all__ = ["gather_state", "merge_states"]


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of the states of all ranks, to be loaded on every rank, also of another number.

    Needed for streams of which each rank reads other samples: those split by shards, and your own. What is left of the
    epoch is divided among the new ranks: in the order in which the old ranks would have given out the samples, each to
    the next rank in turn. Where the new number of ranks is no divisor of the old one, some ranks read more than they
    give out, until the end of that epoch. States that are the same on all ranks (map-style datasets with ``seed=`` or
    an `ElasticSampler`, streams split by samples) need not be merged; one of them is returned.

    Args:
        states: from `DataLoader.state_dict`, of each rank after the same number of batches, in any order.

    Raises:
        ValueError: there is no state.
        StateError: they are not of all ranks of one run, or of loaders whose states cannot be merged.

    Example:
        >>> import headrace as hr
        >>> loader = hr.DataLoader(list(range(8)), batch_size=2)
        >>> hr.merge_states([loader.state_dict()]) == loader.state_dict()
        True
    """
    parsed = [states_from_dict(state) for state in states]
    if not parsed:
        raise ValueError("no state was given")
    if len(parsed[0]) > 1:  # saved by a trainer, with those of all ranks
        return merged(parsed[0]).to_dict()
    return merged([state for state, *_ in parsed]).to_dict()


def gather_state(loader: DataLoader[Any], group: torch.distributed.ProcessGroup | None = None) -> dict[str, Any]:
    """One state with those of all ranks of a loader, to be saved once and loaded on every rank.

    The same number of ranks continues each its own part; another number divides what is left, as with `merge_states`.
    A collective call: every rank of the group calls it, after the same batch, and gets the same state. Unlike it,
    `DataLoader.state_dict` never communicates.

    Args:
        loader: this rank's loader.
        group: the process group; None for that of the loader's `data_parallel=`, or the default one. Without an
            initialized group, the state of this process.

    Raises:
        StateError: as `merge_states`.
        UnknownRankError: this process is not a member of `data_parallel=`.
    """
    gathered: list[Any] = [loader.state_dict()]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = loader._control.group if group is None else group
        gathered *= torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, gathered[0], group)
    states = [state for each in gathered for state in states_from_dict(each)]
    whole = merged(states)  # or an error, while it can still be corrected
    return states_to_dict(states) if states[0].rank is not None else whole.to_dict()
