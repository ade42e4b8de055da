"""Entity tags: which of them mean the same, and those of a listing in little memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["Etags", "same_tag", "strong"]

_MD5 = re.compile(r'"[0-9a-f]{32}"')


class Etags:
    """Tags by position; None where there is none.

    Args:
        tags: as they were listed.

    Example:
        >>> Etags(['"d41d8cd98f00b204e9800998ecf8427e"'])[0]
        '"d41d8cd98f00b204e9800998ecf8427e"'
    """

    def __init__(self, tags: Sequence[str | None]) -> None:
        self._packed: bytes | None = None
        self._tags: tuple[str | None, ...] = ()
        # Most tags are an MD5 in hexadecimal, sixteen bytes. A million of them are 16 MB packed, and 81 as strings.
        if all(tag is not None and _MD5.fullmatch(tag) for tag in tags):
            self._packed = b"".join(bytes.fromhex(tag[1:-1]) for tag in tags if tag is not None)
        elif any(tag is not None for tag in tags):
            self._tags = tuple(tags)

    def __getitem__(self, position: int) -> str | None:
        if self._packed is not None:
            start = position * 16 if position >= 0 else len(self._packed) + position * 16
            return f'"{self._packed[start : start + 16].hex()}"'
        return self._tags[position] if self._tags else None


def strong(etag: str | None) -> str | None:
    """The tag if a read can be conditional on it: a weak one matches nothing (RFC 9110, section 13.1.1)."""
    return None if etag is None or etag.startswith("W/") else etag


def same_tag(wanted: str | None, found: str | None) -> bool:
    """Whether an answer may be of the version that was asked for; some servers do not look at `If-Match`.

    Azure's listings leave out the quotes that its answers have.

    Example:
        >>> same_tag("0x8DE", '"0x8DE"'), same_tag('"a"', '"b"'), same_tag('"a"', None)
        (True, False, True)
    """
    return wanted is None or found is None or wanted.strip('"') == found.strip('"')
