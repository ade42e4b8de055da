"""File descriptors: the error if none is free, a reserve for receiving them, and those sent in a pickled object."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})


def shortage(purpose: str, number: int = errno.EMFILE) -> OSError:
    """The error for a descriptor that could not be opened; `purpose` completes "no descriptor is left to …"."""
    if number == errno.ENFILE:
        return OSError(
            number, f"no file descriptor of this machine is left to {purpose}; see fs.file-max"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OSError(
        number,
        f"no file descriptor is left to {purpose}: the limit is {limit} open files. "
        f"Raise it (`ulimit -n 4096`, or resource.setrlimit), or use fewer workers",
    )


@contextlib.contextmanager
def explained(purpose: str) -> Iterator[None]:
    """Raise the `shortage` in place of the bare error of a call that finds no descriptor."""
    try:
        yield
    except OSError as error:
        if (
            error.errno not in _SHORTAGES or error.filename is not None
        ):  # errors with a file name come from other code
            raise
        raise shortage(purpose, error.errno) from error


def check_free(count: int) -> None:
    """Raise OSError unless `count` descriptors can be opened; for native code that cannot handle a shortage."""
    reserve = Reserve(count)
    reserve.close()
    if reserve.error is not None:
        raise reserve.error


class Reserve:
    """So many descriptors, closed before others are received: receiving then works while none is free."""

    def __init__(self, count: int) -> None:
        self.error: OSError | None = None  # if fewer could be opened
        self._count = count
        self._held: list[int] = []
        self._lock = threading.Lock()
        self._fill()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Free the descriptors inside the block; as many as possible are taken again after it."""
        with self._lock:
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
    """An open file descriptor, which this owns: closed with the last reference to this object.

    In an object that is sent over a channel it arrives as the receiver's own descriptor of the same
    file.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False

    @classmethod
    def duplicate(cls, number: int) -> Descriptor:
        """A new descriptor of the same file as `number`, whose owner keeps it."""
        return cls(os.dup(number))

    def detach(self) -> int:
        """A number that the caller closes; reducers of `multiprocessing` call it in the receiver."""
        return os.dup(self.number)

    def same_file_as(self, other: Descriptor) -> bool:
        return os.path.samestat(os.fstat(self.number), os.fstat(other.number))


_received: ContextVar[Sequence[Descriptor]] = ContextVar(
    "descriptors of the object that is being unpickled"
)


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
