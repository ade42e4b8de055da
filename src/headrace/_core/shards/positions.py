"""Positions in the parts (shards, row groups) of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from headrace._core.shards.discovery import Shard
from headrace._core.store.head import Head, same_tag
from headrace._core.streams.resumable import State
from headrace.errors import StateError


class PartPosition(NamedTuple):
    """Where a part is read on."""

    part: int  # its number in the user's list
    given: int = 0  # number of its samples that were given out
    drop: int = 0  # how many of them come again after the place where the decoder starts
    decoder: dict[str, Any] | None = (
        None  # ``{"offset": …}`` in unpacked bytes; None at the start of the part
    )
    size: int | None = None  # bytes of the object, if known
    etag: str | None = None  # its version, if known

    def after(self, count: int) -> PartPosition:
        """The position `count` samples later, from the same place."""
        return self._replace(given=self.given + count, drop=self.drop + count)

    def to_state(self, taken: int = 0, head: Head | None = None) -> State:
        """The fields of the position `taken` samples later, from the same place; `head` is of the object."""
        known = self if head is None else self._replace(size=head.size, etag=head.etag)
        return known.after(taken)._asdict()

    def version_of(self, shard: Shard) -> Shard:
        """`shard` in the version of which the position is; raises `StateError` if it is another now."""
        if self.size is None or not shard.store.if_match:
            return shard
        head = shard.head
        if head is None:
            return replace(shard, head=Head(shard.key, self.size, self.etag))
        if head.size != self.size or not same_tag(self.etag, head.etag):
            raise StateError(
                f"{shard.name} has changed since the state was saved: it had {self.size} bytes and the version "
                f"{self.etag}, and has {head.size} bytes and the version {head.etag}. Start this epoch again, or put "
                f"back the old version"
            )
        return shard


def names_digest(names: Iterable[str]) -> str:
    """Number and short hash of names, to see whether a list of parts is still the same."""
    digest = hashlib.blake2b(digest_size=8)
    count = 0
    for name in names:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
        count += 1
    return f"{count} ({digest.hexdigest()})"
