"""Entity tags: comparison, and compact storage for those of a listing."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headrace._core.store.string_array import StringArray, StringArrayBuilder

_MD5 = re.compile(r'"[0-9a-f]{32}"')


class Etags:
    """A compact sequence of entity tags; None for a missing one.

    Example:
        >>> Etags(['"d41d8cd98f00b204e9800998ecf8427e"', None])[0]
        '"d41d8cd98f00b204e9800998ecf8427e"'
    """

    def __init__(self, tags: Iterable[str | None]) -> None:
        if isinstance(tags, StringArray):
            strings = tags
        else:
            builder = StringArrayBuilder()
            for tag in tags:
                builder.append(tag or "")
            strings = builder.build()
        self._digests: bytes | None = None
        self._strings: StringArray | None = None
        # Most tags are an MD5 in hexadecimal, sixteen bytes. A million of them are 16 MB packed, and 38 as text.
        if all(map(_MD5.fullmatch, strings)):
            self._digests = b"".join(bytes.fromhex(tag[1:-1]) for tag in strings)
        elif any(strings):
            self._strings = strings

    def __bool__(self) -> bool:
        return bool(self._digests) or self._strings is not None

    def __getitem__(self, position: int) -> str | None:
        if self._digests is not None:
            start = position * 16 if position >= 0 else len(self._digests) + position * 16
            return f'"{self._digests[start : start + 16].hex()}"'
        return (self._strings[position] or None) if self._strings is not None else None


def strong(etag: str | None) -> str | None:
    """The tag if reads can be conditional on it: a weak tag matches nothing (RFC 9110, section 13.1.1)."""
    return None if etag is None or etag.startswith("W/") else etag


def same_tag(wanted: str | None, found: str | None) -> bool:
    """Whether an answer may be of the requested version; some servers ignore `If-Match`.

    Azure's listings leave out the quotes that its answers have, and proxies make strong tags weak.

    Example:
        >>> same_tag("0x8DE", '"0x8DE"'), same_tag('"a"', 'W/"b"'), same_tag('"a"', None)
        (True, False, True)
    """
    return wanted is None or found is None or _value(wanted) == _value(found)


def _value(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')
