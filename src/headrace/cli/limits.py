"""What this process is granted: limits of its control groups, versions 1 and 2, as of a container, and free memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CgroupLimits", "available_memory"]

_UNLIMITED = 1 << 60  # bytes; version 1 writes a number near 2**63 where there is no limit


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limits of a process's groups; infinite where there is none.

    Attributes:
        cores: CPU seconds a second.
        memory: bytes.
        memory_left: bytes of the group that has fewest left.
        pids: processes and threads.
        pids_left: those that the group with fewest may still start.
    """

    cores: float = math.inf
    memory: float = math.inf
    memory_left: float = math.inf
    pids: float = math.inf
    pids_left: float = math.inf

    @classmethod
    def here(cls, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> CgroupLimits:
        """The limits of this process; none where the system has no control groups."""
        limits = cls()
        try:
            lines = membership.read_text().splitlines()
        except OSError:
            return limits
        for line in lines:
            _, controllers, path = line.split(":", 2)
            roots = [root, root / "unified"] if not controllers else [root / controllers, *_links(root, controllers)]
            for folder in _folders(roots, path):
                limits = limits._with(folder)
        return limits

    def _with(self, folder: Path) -> CgroupLimits:
        quota = _numbers(folder / "cpu.max") or _numbers(folder / "cpu.cfs_quota_us")
        period = quota[1:] or _numbers(folder / "cpu.cfs_period_us")
        cores = quota[0] / period[0] if quota and period and quota[0] > 0 else math.inf
        memory = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        memory = math.inf if memory > _UNLIMITED else memory
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes", missing=0.0)
        pids = _number(folder / "pids.max")
        started = _number(folder / "pids.current", missing=0.0)
        return CgroupLimits(
            min(self.cores, cores),
            min(self.memory, memory),
            min(self.memory_left, memory - used),
            min(self.pids, pids),
            min(self.pids_left, pids - started),
        )


def available_memory() -> float:
    """Bytes of memory that the machine has available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), math.inf)


def _links(root: Path, controllers: str) -> list[Path]:
    return [root / each for each in controllers.split(",")]


def _folders(roots: list[Path], path: str) -> Iterator[Path]:
    """A group's folder and those of its parents. Inside a container its path may be one of the host."""
    for root in roots:
        inner = root / path.lstrip("/")
        while inner != root and root in inner.parents:
            yield inner
            inner = inner.parent
        yield root


def _number(*files: Path, missing: float = math.inf) -> float:
    return next((numbers[0] for file in files if (numbers := _numbers(file))), missing)


def _numbers(file: Path) -> list[float]:
    try:
        return [math.inf if word == "max" else float(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
