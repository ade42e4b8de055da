"""The folder of a disk cache: made for its owner alone, refused where others could put something into it."""

from __future__ import annotations

import contextlib
import os
import stat

from headrace.errors import CacheFolderError


def secure_folder(folder: str) -> None:
    """Make a folder for the files of a cache, or check the one that is there.

    Args:
        folder: an absolute path. What is made, its parents too, is this user's only, whatever the umask.

    Raises:
        CacheFolderError: it belongs to another user, or others may write to it.
        NotADirectoryError: it is something else.
        OSError: it cannot be made.
    """
    try:
        link = os.lstat(folder)
    except FileNotFoundError:
        parent = os.path.dirname(folder)
        if not os.path.isdir(parent):
            secure_folder(parent)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(folder, 0o700)
        link = os.lstat(folder)
    status = os.stat(folder) if stat.S_ISLNK(link.st_mode) else link
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"the folder of a cache is something else: {folder}")
    if not hasattr(os, "geteuid"):  # Windows, where a user's folders are his by their place
        return
    me = os.geteuid()
    if status is not link and link.st_uid not in (me, 0):
        raise CacheFolderError(folder, f"it is a link that user {link.st_uid} has made")
    if status.st_uid != me:
        raise CacheFolderError(folder, f"it belongs to user {status.st_uid}, and this process runs as user {me}")
    if status.st_mode & 0o022:
        raise CacheFolderError(folder, f"other users may write to it (its mode is {status.st_mode & 0o7777:o})")
