"""The fields of a tar's header: what they say, and whether they are right."""

from __future__ import annotations

import functools
import re
import zlib

from headrace.errors import UnsafeMemberError

_BLANKS = 8 * ord(" ")  # for the checksum's own field, in the sum


def safe_name(name: str, shard: str, offset: int | None = None) -> str:
    """A member's name without a leading ``./``.

    Raises:
        UnsafeMemberError: it is absolute, empty, or leads out of where it would be unpacked.
    """
    while name.startswith("./"):
        name = name[2:]
    # Both separators: the name may be unpacked by someone on Windows.
    if (
        name[:1] in ("", "/", "\\")
        or name[1:2] == ":"
        or "\0" in name
        or (".." in name and ".." in re.split(r"[/\\]", name))
    ):
        raise UnsafeMemberError(
            "this tar is not safe: the name leads out of the archive", shard=shard, member=name, offset=offset
        )
    return name


def number(field: bytes) -> int | None:
    """A number as tar has it: octal digits, or, with the first bit set, base 256 (GNU)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
    digits = field.rstrip(b"\0 ").lstrip(b" ")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return None


def checksum_holds(header: bytes, field: bytes) -> bool:
    """Whether the bytes of a header, with blanks for the field itself, add up to what the field says."""
    told = number(field)
    if told is None:
        return False
    # Adler-32 from 0 has in its lower half the sum modulo 65,521: 0.3 µs where `sum` takes 3. Sums that differ by
    # the modulus need a header of which nothing is as it was.
    added = (zlib.adler32(header, 0) & 0xFFFF) - sum(field) + _BLANKS
    if (added - told) % 65521 == 0:
        return True
    signed = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:])
    return signed + _BLANKS == told  # as historic implementations had it, with signed characters


@functools.lru_cache(4096)  # headers of text add up to a few thousand different sums
def sum_with_field(field: bytes) -> int:
    """What all bytes of a header add up to, if its field for the sum is right; -1 if it holds no number."""
    told = number(field)
    return -1 if told is None else told + sum(field) - _BLANKS
