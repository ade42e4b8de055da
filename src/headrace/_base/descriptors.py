"""File descriptors: errors for a shortage, a reserve, and transfer.

Received descriptors arrive with a pickled object.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})


def shortage(purpose: str, number: int = errno.EMFILE) -> OSError:
    """Return the error for a shortage of descriptors.

    `purpose` completes the sentence "no file descriptor is left to …".
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OSError(
        number,
        f"no file descriptor is left to {purpose}: the limit is {limit} open files. "
        f"Raise it (`ulimit -n 4096`, or resource.setrlimit), or use fewer workers",
    )


@contextlib.contextmanager
def explained(purpose: str) -> Iterator[None]:
    """Replace a bare error for a shortage of descriptors by `shortage`."""
    try:
        yield
    except OSError as error:
        # Errors with a file name come from other code.
        if error.errno not in _SHORTAGES or error.filename is not None:
            raise
        raise shortage(purpose, error.errno) from error


def check_free(count: int) -> None:
    """Raise OSError unless `count` descriptors can be opened.

    For native code without handling of a shortage.
    """
    reserve = Reserve(count)
    reserve.close()
    if reserve.error is not None:
        raise reserve.error


class Reserve:
    """Descriptors held in reserve for receiving other descriptors.

    The reserve is closed before receiving. So receiving works even if no descriptor is free. A
    single thread uses a reserve.
    """

    def __init__(self, count: int) -> None:
        # The error, if fewer than `count` could be opened.
        self.error: OSError | None = None
        self._count = count
        self._held: list[int] = []
        self._fill()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Free the descriptors inside the block.

        After the block, as many descriptors as possible are opened again.
        """
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        self.error = None
        try:
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.error = OSError(error.errno, error.strerror)


class Descriptor:
    """Owner of an open file descriptor.

    The descriptor is closed with the last reference to the `Descriptor`. In an object sent over a
    channel, the receiver gets a descriptor of its own for the same file.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False

    @classmethod
    def duplicate(cls, number: int) -> Descriptor:
        """Return a new descriptor of the same file as `number`.

        The owner of `number` keeps `number`.
        """
        return cls(os.dup(number))

    def detach(self) -> int:
        """Return a duplicate for the caller to close.

        Reducers of `multiprocessing` call `detach` in the receiver.
        """
        return os.dup(self.number)

    def same_file_as(self, other: Descriptor) -> bool:
        return os.path.samestat(os.fstat(self.number), os.fstat(other.number))


_received: ContextVar[Sequence[Descriptor]] = ContextVar(
    "descriptors of the object that is being unpickled"
)


@contextlib.contextmanager
def received(descriptors: Sequence[Descriptor]) -> Iterator[None]:
    """Provide received descriptors for unpickling inside the block."""
    token = _received.set(descriptors)
    try:
        yield
    finally:
        _received.reset(token)


def received_descriptor(position: int) -> Descriptor:
    """Return the received descriptor at a position.

    The descriptors arrived with the object being unpickled.
    """
    return _received.get()[position]
