"""Other processes of this machine: which of them run a loader, and why one cannot be shown. From /proc on Linux.

A process may end at any time, or be of another user: after an `OSError` nothing is known of it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from headrace.telemetry.live_socket import LISTENER, PROTOCOL

__all__ = ["command_of", "environment_of", "has_ended", "jobs_of", "jobs_of_user", "why_silent"]

PROC = Path("/proc")
HELPER = re.compile(r"headrace: .* of pid (\d+)")


def jobs_of(pid: int) -> list[int]:
    """The processes to show for `pid`: itself, or its descendants that run a loader, as of a launcher.

    Raises:
        ValueError: there is none; the message says why.
        OSError: the process belongs to another user, or has ended.
    """
    if not _has_proc():
        os.kill(pid, 0)
        return [pid]
    uid = _uid_of(pid)
    if uid is None or _state_of(pid) == "Z":
        raise ProcessLookupError(f"there is no process {pid} (one in a container has another id inside it)")
    if uid != os.geteuid():
        name = _user_name(uid)
        raise PermissionError(f"process {pid} belongs to user {name}: sudo -u {name} headrace top {pid}")
    if _protocol_of(pid) is not None:
        jobs = [pid]
    else:
        jobs = [each for each in _descendants(pid) if _protocol_of(each) is not None]
    for job in jobs:
        if (protocol := _protocol_of(job)) != PROTOCOL:
            raise ValueError(
                f"the headrace of process {job} speaks protocol {protocol} of `headrace top`, and this one {PROTOCOL}: "
                f"run the `headrace` of the job's environment"
            )
    if not jobs:
        raise ValueError(_why_no_loader(pid))
    return jobs


def jobs_of_user() -> list[int]:
    """This user's processes that run a loader.

    Raises:
        ValueError: this system does not list processes as Linux does.
    """
    if not _has_proc():
        raise ValueError("jobs are listed on Linux only: name the process, headrace top PID")
    return [pid for pid in _all_pids() if _uid_of(pid) == os.geteuid() and _protocol_of(pid) == PROTOCOL]


def command_of(pid: int) -> str:
    """The command line; empty where the system does not show it."""
    with contextlib.suppress(OSError):
        words = (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words)
    return ""


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty where the system does not show it."""
    with contextlib.suppress(OSError):
        lines = (PROC / str(pid) / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
        return dict(line.split("=", 1) for line in lines if "=" in line)
    return {}


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or only its exit status."""
    if _has_proc():
        return _state_of(pid) in ("", "Z")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def why_silent(pid: int) -> str:
    """Why a process that can be shown does not answer."""
    if has_ended(pid):
        return f"process {pid} has ended"
    if _state_of(pid) in ("T", "t"):
        return f"process {pid} is stopped: kill -CONT {pid}"
    if _namespace(pid, "mnt") != _namespace("self", "mnt"):
        return f"process {pid} is in a container: run `headrace top` there (docker exec, kubectl exec)"
    if _has_proc() and _protocol_of(pid) is None:
        return _why_no_loader(pid)
    return (
        f"process {pid} does not answer: a call holds the GIL, or the job has another XDG_RUNTIME_DIR or TMPDIR than "
        f"at its start (set the same ones for `headrace top`)"
    )


def _why_no_loader(pid: int) -> str:
    command = command_of(pid)
    if helper := HELPER.match(command):
        return f"process {pid} belongs to a loader in process {helper[1]}: headrace top {helper[1]}"
    name = command[:60] or "?"
    if not _is_python(pid):
        return f"process {pid} ({name}) is not a Python process, and has no child that runs a loader"
    return (
        f"process {pid} ({name}) runs no loader: it has begun no iteration, has closed its loaders, or has a headrace "
        f"without `headrace top`"
    )


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        if "python" in os.path.basename(os.readlink(PROC / str(pid) / "exe")):
            return True
        return b"libpython" in (PROC / str(pid) / "maps").read_bytes()
    return False


def _has_proc() -> bool:
    return (PROC / "self" / "task").is_dir()


def _all_pids() -> list[int]:
    return sorted(int(name) for name in os.listdir(PROC) if name.isdecimal())


def _protocol_of(pid: int) -> int | None:
    """The number in the name of the thread that answers `headrace top`; None if there is none."""
    for name in _thread_names(pid):
        if name.startswith(LISTENER) and (number := name.removeprefix(LISTENER)).isdecimal():
            return int(number)
    return None


def _thread_names(pid: int) -> Iterator[str]:
    folder = PROC / str(pid) / "task"
    with contextlib.suppress(OSError):
        for thread in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield (folder / thread / "comm").read_text(errors="replace").rstrip("\n")


def _status_of(pid: int, name: str) -> list[str]:
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return line.split()[1:]
    return []


def _uid_of(pid: int) -> int | None:
    """The effective user."""
    users = _status_of(pid, "Uid")
    return int(users[1]) if users else None


def _state_of(pid: int) -> str:
    return (_status_of(pid, "State") or [""])[0]


def _descendants(pid: int) -> list[int]:
    children = defaultdict(list)
    for each in _all_pids():
        if parent := _status_of(each, "PPid"):
            children[int(parent[0])].append(each)
    found, left = [], [pid]
    while left:
        new = children.pop(left.pop(0), [])
        found += new
        left += new
    return found


def _namespace(pid: int | str, kind: str) -> str:
    try:
        return os.readlink(PROC / str(pid) / "ns" / kind)
    except OSError:
        return ""


def _user_name(uid: int) -> str:
    import pwd  # not on Windows

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
