"""File descriptors that are sent to another process inside a pickled object."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar


class Descriptor:
    """An open file descriptor; closed with the last reference to this object.

    In an object that is sent over a channel it arrives as the receiver's own descriptor of the same file.

    Args:
        number: the descriptor; this owns it.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False

    @classmethod
    def duplicate(cls, number: int) -> Descriptor:
        """A new descriptor of the same file as `number`, whose owner keeps it."""
        return cls(os.dup(number))

    def same_file_as(self, other: Descriptor) -> bool:
        return os.path.samestat(os.fstat(self.number), os.fstat(other.number))


_received: ContextVar[Sequence[Descriptor]] = ContextVar("descriptors of the object that is being unpickled")


@contextlib.contextmanager
def received(descriptors: Sequence[Descriptor]) -> Iterator[None]:
    """Provide, inside the block, the descriptors that came with the object being unpickled."""
    token = _received.set(descriptors)
    try:
        yield
    finally:
        _received.reset(token)


def received_descriptor(position: int) -> Descriptor:
    """The descriptor at `position` among those that came with the object being unpickled."""
    return _received.get()[position]
