"""What a new process takes over from the one that starts it, and keeps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

# Of /proc/thread-self/status: the permissions, cores and memory that a process started by this thread would have.
_STATUS = ("Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")


class Inherited(NamedTuple):
    """What the zygote cannot be given later: environment variables that libraries read, limits, permissions, cores."""

    environment: dict[str, str]
    niceness: int
    limits: str
    status: tuple[str, ...]

    @classmethod
    def here(cls) -> Inherited:
        """As a process would have it that this thread starts now."""
        status = _contents("status").splitlines()
        return cls(
            dict(os.environ),
            os.nice(0),
            _contents("limits"),
            tuple(line for line in status if line.startswith(_STATUS)),
        )


def _contents(name: str) -> str:
    try:
        return Path("/proc/thread-self", name).read_text()
    except OSError:  # not Linux
        return ""
