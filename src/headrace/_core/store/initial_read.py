"""The first request for an object of which nothing is known: its beginning, and with it its size and version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import obstore

if TYPE_CHECKING:
    from obstore.store import ObjectStore


@dataclass(frozen=True, slots=True)
class InitialRead:
    """The first bytes of an object, and what came with them.

    Attributes:
        data: the bytes.
        size: of the whole object, in bytes.
        etag: its entity tag; None where the store has none.
    """

    data: memoryview
    size: int
    etag: str | None


async def begin(store: ObjectStore, key: str, etag: str | None, length: int | None) -> InitialRead:
    """Ask for the beginning of an object, by one request; errors are obstore's.

    Args:
        store: where it is.
        key: the object.
        etag: what its entity tag must be; None for any.
        length: how many bytes, at most; None for all.
    """
    options: dict[str, Any] = {}
    if etag is not None:
        options["if_match"] = etag
    if length is not None:
        options["range"] = (0, length)
    result = await obstore.get_async(store, key, options=options)  # type: ignore[arg-type]
    return InitialRead(memoryview(await result.bytes_async()), result.meta["size"], result.meta["e_tag"])
