"""Cores and memory available to this process."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class CgroupLimits(NamedTuple):
    """The tightest limits of a control group and all parent groups.

    Control groups are of version 2. A missing limit is infinite.

    Attributes:
        cores: CPU seconds per second.
        memory: memory limit in bytes.
    """

    cores: float = math.inf
    memory: float = math.inf

    @classmethod
    def here(
        cls,
        root: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
    ) -> CgroupLimits:
        """Return the limits of this process.

        All limits are infinite on systems without control groups of version 2.
        """
        groups = [
            line for line in _text(membership).splitlines() if line.startswith("0::")
        ]
        # Inside a container, the path may be a path of the host.
        folder = root / "".join(groups).removeprefix("0::").lstrip("/")
        limits = cls()
        for each in (folder, *folder.parents):
            if each.is_relative_to(root):
                quota, period = _numbers(each / "cpu.max", math.inf, 1.0)
                (memory,) = _numbers(each / "memory.max", math.inf)
                limits = cls(
                    min(limits.cores, quota / period), min(limits.memory, memory)
                )
        return limits


def available_memory() -> float:
    lines = _text(Path("/proc/meminfo")).splitlines()
    return next(
        (
            int(line.split()[1]) * 1024.0
            for line in lines
            if line.startswith("MemAvailable:")
        ),
        math.inf,
    )


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _numbers(file: Path, *missing: float) -> Sequence[float]:
    words = _text(file).split()
    return [math.inf if word == "max" else float(word) for word in words] or missing


def usable_cores() -> float:
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    return min(cores, CgroupLimits.here().cores)


def queued_seconds() -> float:
    """Return the seconds in which this thread has waited for a core so far; 0.0 if unknown."""
    with contextlib.suppress(OSError, IndexError):  # not Linux, or no descriptor is left
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    return 0.0
