"""Combine the loader states of all ranks into a single state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed

from headrace._order.restore import of_all_ranks
from headrace._order.state import states_from_dict, states_to_dict
from headrace._ranks.rankinfo import has_process_group

if TYPE_CHECKING:
    from headrace.loader import DataLoader

__all__ = ["gather_state", "merge_states"]


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the states of all ranks into a single state.

    Load the merged state on every rank.

    Merging is for streams of which each rank reads different samples: streams of shards, and your
    own streams. The same number of ranks continues from the merged state, each rank with its own
    samples. With another number of ranks, `iter()` raises a `StateError`.

    States of map-style datasets with ``seed=`` or an `ElasticSampler`, and of streams with
    ``.split()``, are equal on all ranks and need no merging. For equal states, the result is any
    of the states, and any number of ranks can continue from the result.

    Args:
        states: results of `DataLoader.state_dict`, a state from each rank, in any order. All ranks
            have taken the same number of batches. If a rank reached the end of its samples
            earlier, its state may be from after the last batch or from after the loop.

    Returns:
        A state for `DataLoader.load_state_dict`.

    Raises:
        ValueError: `states` is empty.
        StateError: the states are not from all ranks of a single run, or cannot be merged.

    Example:
        >>> import headrace as hr
        >>> loader = hr.DataLoader(list(range(8)), batch_size=2)
        >>> hr.merge_states([loader.state_dict()]) == loader.state_dict()
        True
    """
    parsed = [states_from_dict(state) for state in states]
    if not parsed:
        raise ValueError("no state was given")
    if all(len(each) > 1 for each in parsed):  # each is already a merged state
        return states_to_dict(of_all_ranks(parsed[0]))
    return states_to_dict(of_all_ranks([state for state, *_ in parsed]))


def gather_state(
    loader: DataLoader[Any], group: torch.distributed.ProcessGroup | None = None
) -> dict[str, Any]:
    """Gather the states of all ranks and merge them.

    Save the result once and load the result on every rank. See `merge_states`.

    `gather_state` is a collective call: every rank of the group calls `gather_state` after the
    same batch, or after the end of its own samples. All ranks get the same state.
    `DataLoader.state_dict`, in contrast, never communicates.

    Args:
        loader: the loader of this rank.
        group: the process group. None: the group of the loader's `data_parallel=`, or else the
            default group. Without an initialized group, the result is the state of this process.

    Returns:
        A state for `DataLoader.load_state_dict`.

    Raises:
        StateError: the states cannot be merged; see `merge_states`.
        UnknownRankError: this process is not a member of `data_parallel=`.
    """
    gathered: list[Any] = [loader.state_dict()]
    if has_process_group():
        group = loader._control.group if group is None else group
        gathered *= torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, gathered[0], group)
    return merge_states(gathered)
