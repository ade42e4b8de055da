"""Validation of keys from files: each must name an object under the dataset's URL."""

from __future__ import annotations

import re

from headrace._core.store.redaction import path_of

# Empty, ".", ".." between slashes, and ".." between backslashes too, which are slashes to Windows.
_LEADS_OUTSIDE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|(?:^|[/\\])\.\.(?:[/\\]|$)")


class KeyValidator:
    """Makes keys of one dataset from the text in a file."""

    def __init__(self, url: str, prefix: str = "", suffix: str = "") -> None:
        self._base = url.partition("?")[0].rstrip("/") + "/"
        path = path_of(url)
        self._directory = None if path is None else path.rstrip("/") + "/"
        self._prefix = prefix
        self._suffix = suffix

    def key(self, text: str) -> str:
        """The key, relative to the dataset's URL; accepts full URLs under it, and paths in its directory.

        Raises:
            ValueError: it is empty, or not under the dataset's URL.

        Example:
            >>> validator = KeyValidator("s3://bucket/train", suffix=".jpg")
            >>> validator.key("cats/001"), validator.key("s3://bucket/train/cats/002")
            ('cats/001.jpg', 'cats/002.jpg')
        """
        if not text or text.isspace():
            raise ValueError("it is empty")
        key = f"{self._prefix}{text}{self._suffix}"
        if "://" in key:
            if not key.startswith(self._base):
                raise ValueError(f"{_redacted(key)} is a URL that is not under the dataset's")
            key = key[len(self._base) :]
        elif self._directory is not None and key.startswith(self._directory):
            key = key[len(self._directory) :]
        if _LEADS_OUTSIDE.search(key):
            raise ValueError(f"{_redacted(key)} {_problem(key)}; keys are relative to the dataset's URL")
        if "\0" in key:
            raise ValueError(f"{_redacted(key)} has a zero byte")
        return key


def _problem(key: str) -> str:
    if key.startswith("/"):
        return "is an absolute path"
    if ".." in re.split(r"[/\\]", key):
        return "leads outside the dataset by '..'"
    if key.endswith("/"):
        return "is a directory, by its trailing slash"
    return "has an empty part or '.' in its path"


def _redacted(key: str) -> str:
    # Without a query string or a password: a URL in a list may be a signed one.
    bare = re.sub(r"//[^/@]*@", "//", key.partition("?")[0]) if "://" in key else key
    return repr(bare if len(bare) <= 200 else bare[:200] + "…")
