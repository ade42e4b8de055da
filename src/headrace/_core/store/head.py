"""Metadata of objects, and checks of the bytes that are read of them."""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headrace._core.store.errors import Cause, RequestFailure

if TYPE_CHECKING:
    from obstore import ObjectMeta

_LENGTHS = {"sha256": 64, "sha1": 40, "md5": 32, "crc32": 8}  # hexadecimal digits
_FORM = re.compile(r"(\w+):([0-9a-f]+)")


LARGEST = 2**63 - 1  # bytes; a server may claim twice as many


@dataclass(frozen=True, slots=True)
class Head:
    key: str  # the object's
    size: int  # in bytes
    etag: str | None  # its version; None if the store gives none
    modified: str | None = field(
        default=None, compare=False
    )  # last modification, as ISO 8601; None if unknown

    @classmethod
    def of(cls, key: str, meta: ObjectMeta) -> Head:
        when = meta["last_modified"]
        # obstore gives 1970 where a server gives no time.
        modified = when.isoformat() if when.timestamp() > 0 else None
        return cls(key, min(meta["size"], LARGEST), meta["e_tag"], modified)

    @property
    def version(self) -> str | None:
        """What distinguishes versions of the same size: the entity tag, else the time; None if there is neither."""
        return self.etag or self.modified


class InitialRead(NamedTuple):
    """Bytes of an object of unknown size or version, and its metadata, from one request."""

    data: memoryview
    head: Head


def check_version(size: int | None, etag: str | None, modified: str | None, found: Head) -> None:
    """Raise `RequestFailure` if an answer is of another version than the one that is known; None is not known.

    Weak entity tags are compared too; the times of the last modification unless both have a strong
    tag.
    """
    untagged = strong(etag) is None or strong(found.etag) is None
    # Listings give fractions of seconds, and `Last-Modified` does not.
    moved = (
        untagged
        and modified is not None
        and found.modified is not None
        and modified[:19] != found.modified[:19]
    )
    resized = size not in (None, found.size)
    if (
        not same_tag(etag, found.etag)
        or moved
        or (resized and (etag is None or found.etag is None))
    ):
        raise RequestFailure(Cause.CHANGED)
    if resized:
        # The same version cannot have another size: it is the answer that is wrong, and may be
        # right the next time.
        detail = f"it has {found.size} bytes under the same entity tag, and {size} were expected"
        raise RequestFailure(Cause.WRONG_LENGTH, detail=detail)


def check_bytes(data: memoryview, length: int, checksum: str | None = None) -> None:
    """Raise `RequestFailure` if bytes are not those of that length and checksum."""
    if len(data) != length:
        raise RequestFailure(
            Cause.WRONG_LENGTH, detail=f"{len(data)} bytes came, and {length} were expected"
        )
    if checksum is not None and not matches(data, checksum):
        raise RequestFailure(Cause.DAMAGED)


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


def check_form(checksum: str) -> str:
    """Return a checksum, or raise `ValueError` for what `matches` could not compare with."""
    found = _FORM.fullmatch(checksum)
    if found is None or _LENGTHS.get(found[1]) != len(found[2]):
        known = ", ".join(_LENGTHS)
        raise ValueError(
            f"a checksum must be algorithm:hexadecimal, of one of {known}, but got {checksum!r}"
        )
    return checksum


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
