"""Metadata of objects, and checks of the bytes that are read of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headrace._core.store.checksums import matches
from headrace._core.store.errors import Cause, RequestFailure

if TYPE_CHECKING:
    from obstore import ObjectMeta


@dataclass(frozen=True, slots=True)
class Head:
    """A store's metadata of an object.

    Attributes:
        key: the object's.
        size: in bytes.
        etag: its version; None if the store gives none.
        modified: the time of its last modification, as ISO 8601; None if unknown.
    """

    key: str
    size: int
    etag: str | None
    modified: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, key: str, meta: ObjectMeta) -> Head:
        """From obstore's metadata."""
        when = meta["last_modified"]
        # obstore gives 1970 where a server gives no time.
        return cls(key, meta["size"], meta["e_tag"], when.isoformat() if when.timestamp() > 0 else None)


class InitialRead(NamedTuple):
    """Bytes of an object of unknown size or version, and its metadata, from one request."""

    data: memoryview
    head: Head


def check_bytes(
    data: memoryview | RequestFailure, length: int, checksum: str | None = None
) -> memoryview | RequestFailure:
    """The bytes if they have that length and checksum, else why not."""
    if isinstance(data, RequestFailure):
        return data
    if len(data) != length:
        return RequestFailure(Cause.WRONG_LENGTH, detail=f"{len(data)} bytes came, and {length} were expected")
    if checksum is not None and not matches(data, checksum):
        return RequestFailure(Cause.DAMAGED)
    return data
