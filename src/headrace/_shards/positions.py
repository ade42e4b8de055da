"""Positions in the parts (shards, row groups) of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from headrace._shards.discovery import Shard
from headrace._store.head import Head, same_tag
from headrace._streams.resumable import State
from headrace.errors import StateError


class PartPosition(NamedTuple):
    """Position from which reading a part continues."""

    part: int  # number of the part in the user's list
    given: int = 0  # number of the part's samples that were given out
    drop: int = 0  # number of given samples that come again after the decoder's start
    # ``{"offset": …}`` in unpacked bytes. None at the start of the part.
    decoder: dict[str, Any] | None = None
    size: int | None = None  # bytes of the object, if known
    etag: str | None = None  # version of the object, if known

    def after(self, count: int) -> PartPosition:
        """Return the position `count` samples later, with the same start."""
        return self._replace(given=self.given + count, drop=self.drop + count)

    def to_state(self, taken: int = 0, head: Head | None = None) -> State:
        """Return the fields of the position `taken` samples later.

        The decoder's start stays the same. `head` belongs to the object.
        """
        known = self if head is None else self._replace(size=head.size, etag=head.etag)
        return known.after(taken)._asdict()

    def version_of(self, shard: Shard) -> Shard:
        """Return `shard` in the version of the position.

        Raises:
            StateError: the object has another version now.
        """
        if self.size is None or not shard.store.if_match:
            return shard
        head = shard.head
        if head is None:
            return replace(shard, head=Head(shard.key, self.size, self.etag))
        if head.size != self.size or not same_tag(self.etag, head.etag):
            raise StateError(
                f"{shard.name} has changed since the state was saved: it had {self.size} bytes "
                f"and the version {self.etag}, and has {head.size} bytes and the version "
                f"{head.etag}. Start this epoch again, or put back the old version"
            )
        return shard


def names_digest(names: Iterable[str]) -> str:
    """Return number and short hash of names.

    The hash shows whether a list of parts is still the same.
    """
    digest = hashlib.blake2b(digest_size=8)
    count = 0
    for name in names:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
        count += 1
    return f"{count} ({digest.hexdigest()})"
