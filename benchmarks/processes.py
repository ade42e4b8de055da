"""CPU time, memory and connections of a program's processes, from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = [
    "Cpu",
    "connections_of",
    "descendants",
    "engines_of",
    "private_size",
    "proportional_size",
]

NATIVE = "tokio"  # obstore's threads
ESTABLISHED = "01"


def descendants(pid: int) -> list[int]:
    """A process and all those below it."""
    found = [pid]
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has
                for child in (
                    Path(f"/proc/{pid}/task/{task}/children").read_text().split()
                ):
                    found += descendants(int(child))
    return found


def engines_of(pid: int) -> list[int]:
    """The engines' processes, by their titles."""
    return [
        each
        for each in descendants(pid)
        if b"headrace: loader" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


def proportional_size(pid: int) -> float:
    """The proportional set size of a process and its descendants, in MB."""
    return sum(_sizes(each)["Pss"] for each in descendants(pid))


def private_size(pid: int) -> float:
    """Memory of a process that no other shares, in MB."""
    sizes = _sizes(pid)
    return sizes["Private_Clean"] + sizes["Private_Dirty"]


def _sizes(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1000 for line in lines}


class Cpu:
    """CPU seconds of processes since the last call, of Python's threads and of obstore's.

    Args:
        pids: the processes; threads that end between two calls are not counted.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._before = self._threads()

    def __call__(self) -> tuple[float, float]:
        before, self._before = self._before, self._threads()
        python = native = 0.0
        for thread, (name, seconds) in self._before.items():
            spent = seconds - before.get(thread, ("", 0.0))[1]
            if name.startswith(NATIVE):
                native += spent
            else:
                python += spent
        return python, native

    def _threads(self) -> dict[tuple[int, str], tuple[str, float]]:
        found = {}
        for pid in self._pids:
            threads: list[str] = []
            with contextlib.suppress(OSError):  # the process has ended
                threads = os.listdir(f"/proc/{pid}/task")
            for thread in threads:
                with contextlib.suppress(OSError):  # it has ended
                    folder = Path(f"/proc/{pid}/task/{thread}")
                    seconds = int((folder / "schedstat").read_text().split()[0]) / 1e9
                    found[pid, thread] = (folder / "comm").read_text(), seconds
        return found


def connections_of(pid: int, port: int) -> int:
    """Established TCP connections of a process to a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = (line.split() for line in lines)
    found = {
        f"socket:[{each[9]}]"
        for each in fields
        if each[2].endswith(f":{port:04X}") and each[3] == ESTABLISHED
    }
    held = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it has been closed
            held.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return len(found & held)
