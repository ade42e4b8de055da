"""Checksums that users have of their objects: ``sha256:…``, ``md5:…``, ``crc32:…``, in hexadecimal."""

from __future__ import annotations

import hashlib
import re
import zlib

_LENGTHS = {"sha256": 64, "sha1": 40, "md5": 32, "crc32": 8}  # hexadecimal digits
_FORM = re.compile(r"(\w+):([0-9a-f]+)")


def check_form(checksum: str) -> None:
    """Refuse what `matches` could not compare with.

    Raises:
        ValueError: it is not ``algorithm:hexadecimal`` of an algorithm that is known.

    Example:
        >>> check_form("crc32:352441c2")
    """
    found = _FORM.fullmatch(checksum)
    if found is None or _LENGTHS.get(found[1]) != len(found[2]):
        known = ", ".join(_LENGTHS)
        raise ValueError(f"a checksum must be algorithm:hexadecimal, of one of {known}, but got {checksum!r}")


def matches(data: memoryview, checksum: str) -> bool:
    """Whether `data` has that checksum.

    Example:
        >>> matches(memoryview(b"abc"), "crc32:352441c2")
        True
    """
    algorithm, _, expected = checksum.partition(":")
    if algorithm == "crc32":
        return f"{zlib.crc32(data):08x}" == expected
    return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest() == expected
