"""Errors of stores and shards."""

from __future__ import annotations

from headrace.errors.base import HeadraceError

__all__ = [
    "ChecksumError",
    "EmptyListingError",
    "ObjectChangedError",
    "ObjectNotFoundError",
    "ShardError",
    "StoreError",
    "StoreUnreachableError",
    "TruncatedShardError",
    "UnsafeMemberError",
]


class ShardError(HeadraceError, ValueError):
    """A shard is damaged or malformed. Samples before the damage have been delivered.

    Attributes:
        shard: the shard's URL, without secrets.
        member: name of the damaged file in a tar, or of the last file before the damage; None if there is none.
        offset: position in the shard, in bytes; of a compressed one, in its decompressed bytes; None if unknown.
    """

    shard: str | None = None
    member: str | None = None
    offset: int | None = None

    def __init__(self, what: str, *, shard: str, member: str | None = None, offset: int | None = None) -> None:
        where = [f"shard {shard}"]
        if member is not None:
            where.append(f"member {member!r}")
        if offset is not None:
            where.append(f"offset {offset}")
        super().__init__(f"{what} ({', '.join(where)})")
        self.shard = shard
        self.member = member
        self.offset = offset


class TruncatedShardError(ShardError, EOFError):
    """A shard ends too early: an upload or a download was interrupted."""


class UnsafeMemberError(ShardError):
    """A tar has a member whose path leads out of it, or that is a link or a device."""


class StoreError(HeadraceError, OSError):
    """A request to an object store failed.

    Attributes:
        url: URL of the request, without user names, passwords and query strings.
        key: the object's key, relative to `url`; None if the request was not for one object.
        index: the sample's index; None if the request was not for a sample.
        attempts: number of attempts.
        elapsed: seconds from the start of the first attempt to the end of the last.
        status: HTTP status of the last attempt; None if there was no response.
    """

    url: str | None = None
    key: str | None = None
    index: object = None
    attempts: int | None = None
    elapsed: float | None = None
    status: int | None = None

    def __init__(
        self,
        message: str,
        *,
        url: str,
        key: str | None = None,
        index: object = None,
        attempts: int = 1,
        elapsed: float | None = None,
        status: int | None = None,
    ) -> None:
        tried = "" if attempts == 1 and elapsed is None else f"; {_counted(attempts, elapsed)}"
        super().__init__(f"{message}{tried} ({url})")
        self.url = url
        self.key = key
        self.index = index
        self.attempts = attempts
        self.elapsed = elapsed
        self.status = status


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """An object that was listed or requested by key does not exist."""


class EmptyListingError(StoreError, FileNotFoundError):
    """A listing has no matching object."""


class StoreUnreachableError(StoreError, ConnectionError):
    """No response from the store within the time-out."""


class ObjectChangedError(StoreError):
    """An object was overwritten after it was listed."""


class ChecksumError(StoreError):
    """The received bytes did not match the checksum or the length, on every attempt."""


def _counted(attempts: int, elapsed: float | None) -> str:
    times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return times if elapsed is None else f"{times} in {elapsed:.2f} s"
