"""The fields of a tar header."""

from __future__ import annotations

import functools
import re
import zlib

from headrace.errors import UnsafeMemberError

_BLANKS = 8 * ord(" ")  # of the checksum field, which counts as blanks in the sum


def safe_name(name: str, shard: str, offset: int | None = None) -> str:
    """Return a member's name without a leading ``./``.

    Raises:
        UnsafeMemberError: it is absolute, empty, or leads outside the directory in which it would be unpacked.
    """
    while name.startswith("./"):
        name = name[2:]
    # Both separators: the name may be unpacked on Windows.
    if (
        name[:1] in ("", "/", "\\")
        or name[1:2] == ":"
        or "\0" in name
        or (".." in name and ".." in re.split(r"[/\\]", name))
    ):
        what = "unsafe tar: the name leads outside the archive"
        raise UnsafeMemberError(what, shard=shard, member=name, offset=offset)
    return name


def parse_number(field: bytes) -> int | None:
    """Parse octal digits, or, with the first bit set, base 256 (GNU); None if invalid."""
    if field[0] & 0x80:
        return int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
    digits = field.rstrip(b"\0 ").lstrip(b" ")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        return None


def checksum_holds(header: bytes, field: bytes) -> bool:
    """Whether the bytes of a header, with blanks for the checksum field, add up to the number in that field."""
    expected = parse_number(field)
    if expected is None:
        return False
    # Adler-32 from 0 has in its lower half the sum modulo 65,521: 0.3 µs where `sum` takes 3. Sums that differ by the
    # modulus need a header in which no byte is right.
    added = (zlib.adler32(header, 0) & 0xFFFF) - sum(field) + _BLANKS
    if (added - expected) % 65521 == 0:
        return True
    signed = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:])
    return signed + _BLANKS == expected  # historic implementations add signed characters


@functools.lru_cache(4096)  # headers of text add up to a few thousand different sums
def sum_with_checksum_field(field: bytes) -> int:
    """The sum of all bytes of a header whose checksum field is right; -1 if the field holds no number."""
    expected = parse_number(field)
    return -1 if expected is None else expected + sum(field) - _BLANKS
