"""Slabs: recycled shared memory in which bytes cross from one process to another.

A slab is a `memfd`: memory with a descriptor and no name, so nothing is ever left in /dev/shm and its size limit does
not apply. It is preallocated, so a shortage is an error here and not a SIGBUS there. The process that writes owns it
(`Allocator`); its descriptor is sent once, over a Unix socket; the process that reads maps it (`Mapper`), and says that
it is free again when the last view of it has died. A reader that keeps everything makes the allocator grow, up to a
bound, behind which bytes take the slower way over the socket.

Where there is no memfd (macOS, Windows), a allocator lends nothing, and all bytes take that way.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from headrace._core.descriptors import Reserve, shortage
from headrace._core.transport.descriptors import Descriptor
from headrace._core.transport.mapped import Mapped

with contextlib.suppress(ImportError):  # Windows, where there are no slabs
    import resource

ALIGNMENT = 64  # a cache line, and what torch and numpy ask for vectorised access
# A worker has a slab for each batch of its share of the look-ahead, and one or two in the consumer's hands: fewer than
# ten. More means that the consumer keeps its batches; from here on they are copied, which costs it no more memory.
SLABS = 32
# A slab that was not needed in so many loans gives its memory back. With 64, the consumer's memory does not grow over
# 5,000 batches of 4 MB; never giving back, by 6 to 9 %. Making another costs what some few loans save.
IDLE = 64
# Below this, a region is cheaper to send over the socket than to manage.
SMALLEST = 32 * 1024
# With its descriptor, a slab: its number, its size, the number it replaces. With descriptors that are none of a slab:
# the first one's number, 0, how many.
_ANNOUNCEMENT = struct.Struct("<IQI")
_TOGETHER = 250  # descriptors in one message; the kernel's limit is 253
_INT = struct.Struct("i")


def aligned(size: int) -> int:
    """`size` rounded up, so that what follows is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Slab:
    """Shared memory that this process may write to.

    Attributes:
        number: its name between allocator and mapper; from 1.
        size: in bytes.
        memory: a writable view of it.
        address: where it begins in this process.
        loan: which of its allocator's loans was the last of it.
    """

    __slots__ = ("_mapped", "address", "loan", "memory", "number", "size")

    def __init__(self, number: int, mapped: Mapped) -> None:
        self._mapped = mapped
        self.loan = 0
        self.number = number
        self.size = mapped.array.nbytes
        self.address = mapped.address
        self.memory = mapped.array.data

    def punch_hole(self) -> None:
        """Give the memory back to the kernel, at both ends; it may not be written to any more."""
        self._mapped.discard()


class Allocator:
    """The slabs that this end of a channel writes.

    Args:
        descriptors: the Unix socket that takes descriptors to the mapper.
        limit: how many slabs there may be.
    """

    def __init__(self, descriptors: socket.socket, limit: int = SLABS) -> None:
        self._descriptors = descriptors
        self._limit = limit if hasattr(os, "memfd_create") else 0
        self._slabs: dict[int, Slab] = {}
        self._free: dict[int, Slab] = {}  # in the order in which they came back
        self._punched: list[int] = []
        self._last = 0
        self._loans = 0
        self._forwarded: weakref.WeakKeyDictionary[Mapping, int] = weakref.WeakKeyDictionary()
        self._kept: dict[int, list[memoryview]] = {}
        self._gone: list[int] = []  # what was passed on and is no longer mapped here; the mapper does not know yet

    def allocate(self, size: int) -> Slab | None:
        """A slab of at least `size` bytes to write to; None where there is none, and `size` has to take the socket."""
        if size < SMALLEST:
            return None
        # Of those of one size, the one that came back last: it may still be in a cache, and the rest stay untouched.
        fitting = [slab for slab in reversed(self._free.values()) if slab.size >= size]
        slab = min(fitting, key=lambda slab: slab.size) if fitting else self._another(size)
        if slab is not None:
            self._free.pop(slab.number, None)
            self._loans += 1
            slab.loan = self._loans
        self._punch_idle()
        return slab

    def _another(self, size: int) -> Slab | None:
        if self._punched:
            replaced = self._punched.pop()
        elif len(self._slabs) < self._limit:
            replaced = 0
        elif self._free:
            replaced = next(iter(self._free))  # too small
            del self._free[replaced]
        else:
            return None
        self._slabs.pop(replaced, None)
        return self._make(size, replaces=replaced)

    def _punch_idle(self) -> None:
        longest = next(iter(self._free.values()), None)
        if longest is not None and self._loans - longest.loan > IDLE:
            longest.punch_hole()
            del self._free[longest.number]
            self._punched.append(longest.number)

    def free(self, numbers: Iterable[int]) -> None:
        """The mapper's views of these slabs have died; or they were lent and not used."""
        for number in numbers:
            self._kept.pop(number, None)
            if number in self._slabs:
                self._free[number] = self._slabs[number]

    @property
    def has_forwarded(self) -> bool:
        """Whether somebody may still look at what was passed on."""
        return bool(self._kept)

    def release(self) -> None:
        """Nobody looks at what was passed on any more."""
        self._kept.clear()

    def forward(self, buffers: list[memoryview]) -> tuple[int, list[int]] | None:
        """Lend what is borrowed, without a copy: a slab that this process has mapped and that holds all of `buffers`.

        The buffers are kept alive, and so the slab in use, until it is given back here.

        Returns:
            The slab's number to the mapper, and where in it each buffer lies; None if there is no such slab.
        """
        mapping: Mapping | None = None
        offsets: list[int] = []
        for buffer in buffers:
            place = _mapping_of(buffer) if buffer.nbytes else (mapping, 0)
            if place is None or (mapping is not None and place[0] is not mapping):
                return None  # at the first that lies elsewhere: fetched samples all do
            mapping, offset = place
            offsets.append(offset)
        if mapping is None or mapping.descriptor is None:
            return None
        number = self._forwarded.get(mapping)
        if number is None:
            number = self._last = self._last + 1
            try:
                replaces = self._gone.pop() if self._gone else 0
                self._announce(number, mapping.size, replaces, mapping.descriptor)
            except OSError:  # no descriptors, or the mapper has gone: the bytes are copied
                return None
            self._forwarded[mapping] = number
            weakref.finalize(mapping, self._gone.append, number).atexit = False
        self._kept[number] = buffers
        return number, offsets

    def _make(self, size: int, *, replaces: int) -> Slab | None:
        number = self._last = self._last + 1
        size = _size_class(size)
        try:
            descriptor = os.memfd_create("headrace-slab", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, 0, size)
                mapped = Mapped(descriptor, size)
                self._announce(number, size, replaces, descriptor)
            finally:
                os.close(descriptor)
        except OSError:  # no memory, no descriptors, no mappings: the socket serves
            return None
        slab = self._slabs[number] = Slab(number, mapped)
        return slab

    def _announce(self, number: int, size: int, replaces: int, descriptor: int) -> None:
        socket.send_fds(self._descriptors, [_ANNOUNCEMENT.pack(number, size, replaces)], [descriptor])

    def send_descriptors(self, descriptors: Sequence[Descriptor]) -> int:
        """Send descriptors that are none of a slab, in few messages; returns the number of the first.

        Raises:
            OSError: the mapper has gone, or too many descriptors are on their way.
        """
        first = self._last + 1
        self._last += len(descriptors)
        for sent in range(0, len(descriptors), _TOGETHER):
            some = descriptors[sent : sent + _TOGETHER]
            message = _ANNOUNCEMENT.pack(first + sent, 0, len(some))
            socket.send_fds(self._descriptors, [message], [descriptor.number for descriptor in some])
        return first


class Mapping:
    """Another process's slab, mapped here.

    Attributes:
        descriptor: of the memory, owned, where it may be passed on to a third process; else None.
        size: in bytes.
        array: the memory.
        address: where it begins in this process.
    """

    __slots__ = ("__weakref__", "address", "array", "descriptor", "size")

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor: int | None = None
        mapped = Mapped(descriptor, size)
        self.array = mapped.array
        self.size = size
        self.address = mapped.address
        _mappings.add(self)

    def keep(self, descriptor: int) -> None:
        """Own the descriptor from now on."""
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()  # of all borrowers, for a allocator that passes one on
_forwards = False
_reserve: Reserve | None = None  # one for the process, for its life


def enable_forwarding() -> None:
    """Keep the descriptors of borrowed slabs from now on, in a process that forwards them to a third."""
    global _forwards
    _forwards = True


def _reserved() -> Reserve:
    global _reserve
    if _reserve is None:
        _reserve = Reserve(1)
    return _reserve


def mapping_at(address: int, size: int) -> Mapping | None:
    """The borrowed slab that holds all of `size` bytes at `address` of this process; None if none does."""
    for mapping in list(_mappings):
        if 0 <= address - mapping.address <= mapping.size - size:
            return mapping
    return None


def _mapping_of(buffer: memoryview) -> tuple[Mapping, int] | None:
    address: int = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    mapping = mapping_at(address, buffer.nbytes)
    return None if mapping is None else (mapping, address - mapping.address)


class Mapper:
    """The slabs that the other end of a channel writes, mapped here.

    Args:
        descriptors: the Unix socket that brings their descriptors.
    """

    def __init__(self, descriptors: socket.socket) -> None:
        self._descriptors = descriptors
        self._mappings: dict[int, Mapping] = {}
        self._received: dict[int, Descriptor] = {}  # that are none of a slab, and were not taken yet
        self._returned: deque[int] = deque()
        self._in_use: set[int] = set()
        self._closed = False
        _reserved()

    def view(self, number: int, size: int) -> memoryview:
        """The first `size` bytes of a slab, writable; it is free again when every view derived from this is dead.

        Raises:
            OSError: it cannot be mapped; it is free again, and another call may succeed.
        """
        try:
            while number not in self._mappings:
                self._receive()
        except OSError:
            self._returned.append(number)
            raise
        # What torch.frombuffer, numpy and slices of the memoryview all keep alive is this array.
        mapping = self._mappings[number]
        exporter = np.frombuffer(mapping.array, dtype=np.uint8, count=size)
        self._in_use.add(number)
        # With the Mapping: whoever waits for its end (a page-locked slab is released then) must not see it too early.
        weakref.finalize(exporter, self._give_back, number, mapping).atexit = False
        return exporter.data

    def _give_back(self, number: int, mapping: Mapping) -> None:  # on whatever thread the last view dies
        self._in_use.discard(number)
        self._returned.append(number)
        if self._closed and not self._in_use:
            self._descriptors.close()

    def close(self) -> None:
        """Take nothing more. The allocator learns that the views are dead by the end of the descriptors' socket."""
        self._closed = True
        if not self._in_use:
            self._descriptors.close()

    def returned(self) -> list[int]:
        """The numbers of the slabs that have become free since the last call, for the allocator."""
        numbers = []
        while self._returned:
            numbers.append(self._returned.popleft())
        return numbers

    def take_descriptors(self, first: int, count: int) -> list[Descriptor]:
        """The descriptors that `Allocator.send_descriptors` has sent."""
        numbers = range(first, first + count)
        while any(number not in self._received for number in numbers):
            self._receive()
        return [self._received.pop(number) for number in numbers]

    def _receive(self) -> None:
        with _reserved().given_up():
            number, size, replaced, numbers = self._peek()
            try:
                mapping = Mapping(numbers[0], size) if size else None
                # The message may go. Before, it could not be sent again.
                self._descriptors.recv(_ANNOUNCEMENT.size)
            except BaseException:
                for each in numbers:
                    os.close(each)
                raise
            if mapping is None:
                self._received.update(enumerate(map(Descriptor, numbers), number))
                return
            if _forwards and _may_keep(numbers[0]):
                mapping.keep(numbers[0])
            else:
                os.close(numbers[0])
        self._mappings.pop(replaced, None)
        self._mappings[number] = mapping

    def _peek(self) -> tuple[int, int, int, list[int]]:
        """The next announcement and copies of its descriptors: the message stays, so that it can be read again."""
        # The allocator sends a descriptor before the frame that speaks of it, so this does not wait.
        space = socket.CMSG_LEN(_TOGETHER * _INT.size)
        message, carried, flags, _ = self._descriptors.recvmsg(_ANNOUNCEMENT.size, space, socket.MSG_PEEK)
        numbers = [number for _, _, data in carried for (number,) in _INT.iter_unpack(data)]
        if flags & socket.MSG_CTRUNC:
            for number in numbers:
                os.close(number)
            raise shortage("map the shared memory of a batch")
        if not message:
            raise EOFError("the allocator of a slab has gone")
        return *_ANNOUNCEMENT.unpack(message), numbers


def _may_keep(descriptor: int) -> bool:
    """Whether enough descriptors above this one, the lowest free, are left for sockets to stores and for processes."""
    return descriptor < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _size_class(size: int) -> int:
    """`size` rounded up to an eighth of a power of two, so that batches of nearly equal size share slabs."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
