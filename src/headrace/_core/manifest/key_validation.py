"""What a key in a file of keys may be: an object under the dataset's URL, and nothing that leads out of it."""

from __future__ import annotations

import re

from headrace._core.store.redaction import path_of

# Empty, ".", ".." between slashes, and ".." between backslashes too, which are slashes to Windows.
_LEADS_OUT = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|(?:^|[/\\])\.\.(?:[/\\]|$)")


class KeyValidator:
    """Makes keys of what a file says, for one dataset.

    Args:
        url: the dataset's.
        prefix: what is put before each key.
        suffix: what is put behind it.
    """

    def __init__(self, url: str, prefix: str = "", suffix: str = "") -> None:
        self._inside = url.partition("?")[0].rstrip("/") + "/"
        path = path_of(url)
        self._directory = None if path is None else path.rstrip("/") + "/"
        self._prefix = prefix
        self._suffix = suffix

    def key(self, said: str) -> str:
        """The key, relative to the dataset's URL; full URLs within it, and paths within a directory, are taken too.

        Raises:
            ValueError: it names nothing, or something that is not under the dataset's URL.

        Example:
            >>> rules = KeyValidator("s3://bucket/train", suffix=".jpg")
            >>> rules.key("cats/001"), rules.key("s3://bucket/train/cats/002")
            ('cats/001.jpg', 'cats/002.jpg')
        """
        if not said or said.isspace():
            raise ValueError("it is empty")
        key = f"{self._prefix}{said}{self._suffix}"
        if "://" in key:
            if not key.startswith(self._inside):
                raise ValueError(f"{_shown(key)} is a URL that is not under the dataset's")
            key = key[len(self._inside) :]
        elif self._directory is not None and key.startswith(self._directory):
            key = key[len(self._directory) :]
        if _LEADS_OUT.search(key):
            raise ValueError(f"{_shown(key)} {_what(key)}; keys are relative to the dataset's URL")
        if "\0" in key:
            raise ValueError(f"{_shown(key)} has a zero byte")
        return key


def _what(key: str) -> str:
    if key.startswith("/"):
        return "is an absolute path"
    if ".." in re.split(r"[/\\]", key):
        return "leads out of the dataset by '..'"
    if key.endswith("/"):
        return "is a directory, by its slash at the end"
    return "has an empty part or '.' in its path"


def _shown(key: str) -> str:
    # Without a query string or a password: a URL in a list may be a signed one.
    bare = re.sub(r"//[^/@]*@", "//", key.partition("?")[0]) if "://" in key else key
    return repr(bare if len(bare) <= 200 else bare[:200] + "…")
