"""The socket of `headrace top`, in the user's runtime folder: `top` listens on it, and the job connects.

A job opens nothing by itself. Once a second it looks for a socket with its process id in its name (`requests_for`), and
connects to it. It sends JSON lines and reads nothing. `top` removes the name as soon as the job has connected, so a
`top` or a job that is killed after that leaves nothing. A socket that refuses connections is of a `top` that was killed
before: the job, or the next `top`, removes it.

This module imports neither torch nor the loader: `headrace top` starts at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Mapping

__all__ = [
    "LISTENER",
    "PROTOCOL",
    "connect",
    "is_private",
    "is_supported",
    "listen",
    "peer_of",
    "remove_stale",
    "requests_for",
    "runtime_folder",
]

PROTOCOL = 1  # of the JSON lines; another number where an older `top` would misread them
LISTENER = "headrace-live-"  # the name of a job's thread, with the protocol's number; 15 characters are kept
SUFFIX = ".sock"
LONGEST_PATH = 100  # bytes; a socket's address has 104 to 108


def is_supported() -> bool:
    """Whether this system has Unix sockets and users: Windows has not."""
    return hasattr(socket, "AF_UNIX") and hasattr(os, "geteuid")


def runtime_folder(environment: Mapping[str, str]) -> str:
    """The folder for these sockets: in XDG_RUNTIME_DIR if that is the user's, else in the temporary folder."""
    given = environment.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):  # it does not exist
        if os.path.isabs(given) and os.stat(given).st_uid == os.geteuid():
            return os.path.join(given, "headrace")
    names = (environment.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    temporary = next((name for name in names if os.path.isabs(name) and os.path.isdir(name)), "/tmp")
    return os.path.join(temporary, f"headrace-{os.geteuid()}")


def is_private(folder: str) -> bool:
    """Whether it is a folder of this user, not a link, that others may not enter."""
    try:
        status = os.lstat(folder)
    except OSError:  # it does not exist
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def listen(folder: str, pid: int) -> tuple[socket.socket, str]:
    """A socket on which `top` waits for a job, and its path; the caller closes it and removes the path.

    Raises:
        PermissionError: the folder belongs to another user, or others may enter it.
        OSError: the folder or the socket cannot be made.
    """
    with contextlib.suppress(FileExistsError):  # by an earlier `top`; checked below
        os.mkdir(folder, 0o700)
    if not is_private(folder):
        raise PermissionError(
            f"{folder} is not a folder that only this user may enter: remove it, or set XDG_RUNTIME_DIR to one of yours"
        )
    path = os.path.join(folder, f"{pid}-{os.getpid()}{SUFFIX}")
    with contextlib.suppress(FileNotFoundError):  # of a process that had the same id
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            listening.bind(address)
        os.chmod(path, 0o600)  # before it listens: until then no one can connect
        listening.listen(4)
    except OSError:
        listening.close()
        with contextlib.suppress(OSError):  # it was not bound; the original error is raised
            os.unlink(path)
        raise
    return listening, path


def requests_for(pid: int, folder: str) -> list[str]:
    """The sockets that wait for a process; none if the folder is absent, or not private."""
    prefix = f"{pid}-"
    try:
        with os.scandir(folder) as entries:
            found = [each.path for each in entries if each.name.startswith(prefix) and each.name.endswith(SUFFIX)]
    except OSError:  # no `top` has made the folder yet
        return []
    return found if found and is_private(folder) else []


def connect(path: str) -> socket.socket | None:
    """A connection to a `top` of this user that does not block; None if there is none. Removes a stale socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError
        with _address(path) as address:
            connection.connect(address)
        user, _ = peer_of(connection)
        if user is None or user in (os.geteuid(), 0):
            return connection
    except ConnectionRefusedError:  # its `top` was killed
        with contextlib.suppress(OSError):  # removed by another process
            os.unlink(path)
    except OSError:  # it has gone, or many others connect: the next look finds out
        pass
    connection.close()
    return None


def remove_stale(folder: str) -> None:
    """Remove the sockets that no process listens on."""
    if is_private(folder):
        for name in os.listdir(folder):
            if name.endswith(SUFFIX) and (connection := connect(os.path.join(folder, name))) is not None:
                connection.close()  # another `top`, which takes this for a process that is not its job's


def peer_of(connection: socket.socket) -> tuple[int | None, int | None]:
    """User and process id of the other end; None where the system does not say."""
    if hasattr(socket, "SO_PEERCRED"):
        size = struct.calcsize("3i")
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return user, pid
    if sys.platform == "darwin":
        credentials = connection.getsockopt(0, 1, 76)  # SOL_LOCAL, LOCAL_PEERCRED: struct xucred
        return struct.unpack_from("2I", credentials)[1], None
    return None, None


@contextlib.contextmanager
def _address(path: str) -> Iterator[str]:
    """A path that fits into a socket's address: on Linux, through the descriptor of its folder where it is long."""
    if len(os.fsencode(path)) <= LONGEST_PATH or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)
