"""The folder of a disk cache: private to its owner, refused where other users could write to it."""

from __future__ import annotations

import contextlib
import os
import stat

from headrace.errors import CacheFolderError


def secure_folder(folder: str) -> None:
    """Create a folder for the files of a cache, or check the existing one.

    Args:
        folder: an absolute path. New folders, parents included, get mode 0700, whatever the umask.

    Raises:
        CacheFolderError: it belongs to another user, or others may write to it.
        NotADirectoryError: it is not a folder.
        OSError: it cannot be created.
    """
    try:
        link = os.lstat(folder)
    except FileNotFoundError:
        parent = os.path.dirname(folder)
        if not os.path.isdir(parent):
            secure_folder(parent)
        with contextlib.suppress(FileExistsError):  # created by another process meanwhile
            os.mkdir(folder, 0o700)
        link = os.lstat(folder)
    status = os.stat(folder) if stat.S_ISLNK(link.st_mode) else link
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"the cache folder is not a folder: {folder}")
    if not hasattr(os, "geteuid"):  # Windows: folders in a user's profile are private by default
        return
    me = os.geteuid()
    if status is not link and link.st_uid not in (me, 0):
        raise CacheFolderError(folder, f"it is a symbolic link created by user {link.st_uid}")
    if status.st_uid != me:
        raise CacheFolderError(folder, f"it belongs to user {status.st_uid}, and this process runs as user {me}")
    if status.st_mode & 0o022:
        raise CacheFolderError(folder, f"other users may write to it (its mode is {status.st_mode & 0o7777:o})")
