"""States of the loaders of several ranks as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed

from headrace._core.order.restore import of_all_ranks
from headrace._core.order.state import states_from_dict, states_to_dict

if TYPE_CHECKING:
    from headrace.loader import DataLoader

__all__ = ["gather_state", "merge_states"]


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state that holds the state of each rank, to be loaded on every rank.

    For streams of which each rank reads other samples: streams of shards, and your own. The same
    number of ranks continues, each its own part; another number is a `StateError` at `iter()`.
    States that are the same on all ranks (map-style datasets with ``seed=`` or an `ElasticSampler`,
    streams with ``.split()``) need not be merged: one of the states is returned, which any number
    of ranks can continue.

    Args:
        states: from `DataLoader.state_dict`, of each rank after the same number of batches, in any
            order. A rank whose part of a stream has ended before may have the state after its last
            batch, or after its loop.

    Raises:
        ValueError: there is no state.
        StateError: they are not of all ranks of one run, or of loaders whose states cannot be
            merged.

    Example:
        >>> import headrace as hr
        >>> loader = hr.DataLoader(list(range(8)), batch_size=2)
        >>> hr.merge_states([loader.state_dict()]) == loader.state_dict()
        True
    """
    parsed = [states_from_dict(state) for state in states]
    if not parsed:
        raise ValueError("no state was given")
    if all(len(each) > 1 for each in parsed):  # saved with those of all ranks
        return states_to_dict(of_all_ranks(parsed[0]))
    return states_to_dict(of_all_ranks([state for state, *_ in parsed]))


def gather_state(
    loader: DataLoader[Any], group: torch.distributed.ProcessGroup | None = None
) -> dict[str, Any]:
    """One state with those of all ranks of a loader, to be saved once and loaded on every rank.

    It is that of `merge_states`. A collective call: every rank of the group calls it, after the
    same batch or after the end of its part, and gets the same state. Unlike it,
    `DataLoader.state_dict` never communicates.

    Args:
        loader: this rank's loader.
        group: the process group; None for that of the loader's `data_parallel=`, or the default
            one. Without an initialized group, the state of this process.

    Raises:
        StateError: as `merge_states`.
        UnknownRankError: this process is not a member of `data_parallel=`.
    """
    gathered: list[Any] = [loader.state_dict()]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = loader._control.group if group is None else group
        gathered *= torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, gathered[0], group)
    return merge_states(gathered)
