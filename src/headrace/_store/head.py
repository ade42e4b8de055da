"""Metadata of objects, and checks of bytes that were read."""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headrace._store.errors import Cause, RequestFailure

if TYPE_CHECKING:
    from obstore import ObjectMeta

_LENGTHS = {"sha256": 64, "sha1": 40, "md5": 32, "crc32": 8}  # hexadecimal digits
_FORM = re.compile(r"(\w+):([0-9a-f]+)")


LARGEST = 2**63 - 1  # bytes; a server may claim twice as much


@dataclass(frozen=True, slots=True)
class Head:
    key: str  # key of the object
    size: int  # bytes
    etag: str | None  # version of the object; None if the store gives none
    # Time of the last modification as ISO 8601; None if unknown.
    modified: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, key: str, meta: ObjectMeta) -> Head:
        when = meta["last_modified"]
        # If a server gives no time, obstore gives 1970.
        modified = when.isoformat() if when.timestamp() > 0 else None
        return cls(key, min(meta["size"], LARGEST), meta["e_tag"], modified)

    @property
    def version(self) -> str | None:
        """Entity tag, else the modification time, else None.

        Distinguishes versions of the same size.
        """
        return self.etag or self.modified


class InitialRead(NamedTuple):
    """The data and the metadata of an object, from a single request.

    Used if the size or the version of the object is unknown.
    """

    data: memoryview
    head: Head


def check_version(known: Head, found: Head, *, sized: bool = True) -> None:
    """Raise `RequestFailure` if `found` is another version than `known`.

    An entity tag or a modification time of None is unknown. Weak entity tags are compared too. The
    modification times are compared unless both versions have strong tags.

    Args:
        known: the expected version.
        found: the version of an answer.
        sized: whether the size is known.
    """
    untagged = strong(known.etag) is None or strong(found.etag) is None
    # Listings give fractions of seconds; `Last-Modified` does not.
    moved = (
        untagged
        and known.modified is not None
        and found.modified is not None
        and known.modified[:19] != found.modified[:19]
    )
    resized = sized and known.size != found.size
    without_tag = known.etag is None or found.etag is None
    if not same_tag(known.etag, found.etag) or moved or (resized and without_tag):
        raise RequestFailure(Cause.CHANGED)
    if resized:
        # Two sizes under one entity tag: the answer is wrong. The next answer may be right.
        sizes = f"it has {found.size} bytes under the same entity tag, and {known.size}"
        raise RequestFailure(Cause.WRONG_LENGTH, detail=f"{sizes} were expected")


def check_bytes(data: memoryview, length: int, checksum: str | None = None) -> None:
    """Raise `RequestFailure` if `data` has another length or checksum."""
    if len(data) != length:
        raise RequestFailure(
            Cause.WRONG_LENGTH,
            detail=f"{len(data)} bytes came, and {length} were expected",
        )
    if checksum is not None and not matches(data, checksum):
        raise RequestFailure(Cause.DAMAGED)


def strong(etag: str | None) -> str | None:
    """Return a strong entity tag, or None.

    Reads cannot be conditional on a weak tag: it matches nothing (RFC 9110, section 13.1.1).
    """
    return None if etag is None or etag.startswith("W/") else etag


def same_tag(wanted: str | None, found: str | None) -> bool:
    """Return whether two entity tags may name the same version.

    Some servers ignore `If-Match`, so answers are checked. Azure leaves out the quotes of entity
    tags in listings, and proxies make strong tags weak.

    Example:
        >>> same_tag("0x8DE", '"0x8DE"'), same_tag('"a"', 'W/"b"'), same_tag('"a"', None)
        (True, False, True)
    """
    return wanted is None or found is None or _value(wanted) == _value(found)


def _value(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def check_form(checksum: str) -> str:
    """Return `checksum` if `matches` can compare it, else raise `ValueError`."""
    found = _FORM.fullmatch(checksum)
    if found is None or _LENGTHS.get(found[1]) != len(found[2]):
        known = ", ".join(_LENGTHS)
        raise ValueError(
            f"a checksum must be algorithm:hexadecimal, of one of {known}, but got {checksum!r}"
        )
    return checksum


def matches(data: memoryview, checksum: str) -> bool:
    """Return whether `data` has the checksum `checksum`.

    Example:
        >>> matches(memoryview(b"abc"), "crc32:352441c2")
        True
    """
    algorithm, _, expected = checksum.partition(":")
    if algorithm == "crc32":
        return f"{zlib.crc32(data):08x}" == expected
    return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest() == expected
