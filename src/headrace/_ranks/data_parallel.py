"""Ranks among which a loader divides samples.

The user gives the ranks as a process group or a mesh dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed

from headrace._ranks.rankinfo import GROUP, RankInfo, get_rank_info
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
    """Return `value` if `value` can be `data_parallel=`.

    Raises:
        TypeError: the value is no process group, mesh, function or None.
        ValueError: the mesh has several dimensions.
    """
    if value is None or callable(value) or _is_no_member(value):
        return value
    if isinstance(value, torch.distributed.ProcessGroup):
        return value
    if not _is_mesh(value):
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh, "
            f"a function that returns one of them, or None, but got {value!r}"
        )
    mesh: Any = value
    if mesh.ndim != 1:
        raise ValueError(
            f"{name} must be a mesh of one dimension, but this has {mesh.ndim}: {mesh!r}. Select "
            f'the dimension whose ranks get different batches, as in mesh["dp"]; of several, '
            f"flatten the sub-mesh first."
        )
    return value


def rank_among(data_parallel: DataParallel) -> RankInfo:
    """Return the rank of this process in `data_parallel`.

    Without `data_parallel`, the rank is the rank among all ranks.
    """
    group = group_of(data_parallel)
    return (
        get_rank_info() if group is None else RankInfo(group.rank(), group.size(), GROUP)
    )


def group_of(data_parallel: DataParallel) -> ProcessGroup | None:
    """Return the process group of `data_parallel`, or None without `data_parallel`."""
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
    """Whether `value` stands for a group without this process.

    `torch.distributed.new_group` returns the value in processes outside the group.
    """
    return type(value) is int and value == torch.distributed.GroupMember.NON_GROUP_MEMBER


def _is_mesh(value: object) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(value, DeviceMesh)
