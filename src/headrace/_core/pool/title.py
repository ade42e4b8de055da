"""The names of headrace's processes in `ps` and `top`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_PR_SET_NAME = 15
_COMM = 15  # bytes of a process's short name that Linux keeps

_owner: int | None = None


def set_owner(pid: int) -> None:
    """Set the process that this one, and those forked from it, belong to; by default it is the parent."""
    global _owner
    _owner = pid


def set_title(role: str) -> None:
    """Show this process as ``headrace: {role} of pid {owner}``: by setproctitle if that is installed.

    Otherwise the command line is overwritten, as far as it reaches; on Linux only. For child processes of headrace.
    """
    title = f"headrace: {role} of pid {os.getppid() if _owner is None else _owner}"
    try:
        from setproctitle import setproctitle
    except ImportError:
        if sys.platform == "linux":
            with contextlib.suppress(OSError, ValueError, IndexError):  # /proc is not mounted, or not Linux's
                _write_over_command_line(title.encode())
                ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:_COMM], 0, 0, 0)
    else:
        setproctitle(title)


def _write_over_command_line(title: bytes) -> None:
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # the name before it may hold spaces
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5); 0 where they may not be read
    if 0 < start < end:
        ctypes.memmove(start, title[: end - start - 1].ljust(end - start, b"\0"), end - start)
