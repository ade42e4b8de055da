"""The connection to a Ray cluster, and its free resources."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
import ray.util.client

from headrace._core.ray_placement import RayPlacement


def check_connected() -> None:
    """Check that batches can be received through Ray; headrace does not connect by itself.

    Raises:
        RuntimeError: this process is not connected to a cluster, or only by Ray Client.
    """
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "placement=RayPlacement(...) needs a process of the cluster: Ray Client (ray://) has no object store here. "
            "Start the program with `ray job submit`, or on a node of the cluster with ray.init(address='auto')."
        )
    if not ray.is_initialized():
        raise RuntimeError(
            "placement=RayPlacement(...) needs a connection to a Ray cluster, which headrace does not open by itself: "
            "call ray.init(address='auto') on a node of the cluster, or ray.init() for one on this machine."
        )


def connection() -> tuple[str, str] | None:
    """What identifies this process's connection to a cluster; None without one.

    It is compared before each call: one without a connection, or of an actor of an earlier one, would start Ray anew.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_worker_id()  # the latter follows from the number of the job


def shortage(asked: RayPlacement) -> str:
    """What each engine asks for, and what the cluster has, in words."""
    wanted = {"CPU": asked.cpus_per_engine, **(asked.resources or {})}
    for option, resource in (("num_gpus", "GPU"), ("memory", "memory")):
        if asked.options.get(option):
            wanted[resource] = asked.options[option]
    text = f"each asks for {_amounts(wanted, wanted)}"
    with contextlib.suppress(Exception):  # the cluster does not answer, which Ray reports by itself
        free, all_ = ray.available_resources(), ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        text += f"; the cluster of {nodes} node{'s' if nodes != 1 else ''} has {_amounts(all_, wanted)}, of which "
        text += f"{_amounts(free, wanted)} are free"
    return text


def _amounts(amounts: dict[str, Any], names: dict[str, Any]) -> str:
    return ", ".join(f"{amounts.get(name, 0):g} {name}" for name in names)
