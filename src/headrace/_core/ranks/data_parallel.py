"""The ranks that a loader divides samples among: a process group or a mesh dimension that the user gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed

from headrace._core.ranks.rankinfo import GROUP, RankInfo, get_rank_info
from headrace.errors import UnknownRankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    DataParallel: TypeAlias = (
        ProcessGroup | DeviceMesh | Callable[[], ProcessGroup | DeviceMesh] | None
    )
else:  # torch may be built without torch.distributed
    DataParallel = Any


def checked(name: str, value: object) -> object:
    if value is None or callable(value) or _is_no_member(value):
        return value
    if isinstance(value, torch.distributed.ProcessGroup):
        return value
    if not _is_mesh(value):
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh, a function that returns "
            f"one of them, or None, but got {value!r}"
        )
    mesh: Any = value
    if mesh.ndim != 1:
        raise ValueError(
            f"{name} must be a mesh of one dimension, but this has {mesh.ndim}: {mesh!r}. Select the dimension whose "
            f'ranks get different batches, as in mesh["dp"]; of several, flatten the sub-mesh first.'
        )
    return value


def rank_among(data_parallel: DataParallel) -> RankInfo:
    """The rank of this process among those that divide the samples; of all ranks without `data_parallel`."""
    group = group_of(data_parallel)
    return get_rank_info() if group is None else RankInfo(group.rank(), group.size(), GROUP)


def group_of(data_parallel: DataParallel) -> ProcessGroup | None:
    """The process group of the ranks that divide the samples; None without `data_parallel`."""
    value: Any = data_parallel
    if value is None:
        return None
    if callable(value):
        value = checked("the return value of data_parallel", value())
        if value is None:
            raise TypeError(
                "the function data_parallel returned None, and not a process group or a mesh"
            )
    if _is_no_member(value):
        raise _not_a_member("the process group")
    if _is_mesh(value):
        if value.get_coordinate() is None:
            raise _not_a_member(repr(value))
        value = value.get_group()
    group: ProcessGroup = value
    if group.rank() < 0:
        raise _not_a_member("the process group")
    return group


def _not_a_member(what: str) -> UnknownRankError:
    return UnknownRankError(
        f"this process is no member of data_parallel=, {what}: iterate over the loader in members"
    )


def _is_no_member(value: object) -> bool:
    """Whether it is what `torch.distributed.new_group` returns in other processes than those of the group."""
    return type(value) is int and value == torch.distributed.GroupMember.NON_GROUP_MEMBER


def _is_mesh(value: object) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(value, DeviceMesh)
