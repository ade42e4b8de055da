"""Slabs: recycled shared memory in which bytes cross from one process to another.

A slab is a `memfd`: memory with a descriptor and no name, so nothing is left in /dev/shm and its size limit does not
apply. It is preallocated, so a shortage is an error here and not a SIGBUS in the other process. The writing process
owns it (`Allocator`) and sends its descriptor once, over a Unix socket; the reading process maps it (`Mapper`), and
reports that it is free again when its last view has been collected. If the reader keeps everything, more slabs are
allocated, up to a limit; then bytes are sent over the socket, which is slower.

Without memfd (macOS, Windows) there are no slabs, and all bytes are sent over the socket.
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

ALIGNMENT = 64  # bytes; buffers begin at multiples of it: a cache line, which vectorised code of torch and NumPy needs
# A worker uses a slab for each batch of its share of the prefetched ones, and one or two for the consumer's batches:
# fewer than ten. More means that the consumer keeps batches; further ones are copied, which takes no more memory.
SLABS = 32
# Allocations after which an unused slab returns its memory. With 64, the consumer's memory does not grow over 5,000
# batches of 4 MB; if memory is never returned, it grows by 6 to 9 %. A new slab costs what a few reuses save.
IDLE = 64
# Below this, a region is cheaper to send over the socket than to manage.
SMALLEST = 32 * 1024
# Sent with the descriptor of a slab: its number, its size, the number it replaces. With other descriptors: the number
# of the first, 0, how many.
_ANNOUNCEMENT = struct.Struct("<IQI")
_MAX_DESCRIPTORS = 250  # descriptors in one message; the kernel's limit is 253
_INT = struct.Struct("i")


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Slab:
    """Shared memory that this process may write to.

    Attributes:
        number: its name for both ends; from 1.
        size: in bytes.
        memory: a writable view of it.
        address: its first byte in this process.
        last_use: the number of the last allocation that returned it.
    """

    __slots__ = ("_mapped", "address", "last_use", "memory", "number", "size")

    def __init__(self, number: int, mapped: Mapped) -> None:
        self._mapped = mapped
        self.last_use = 0
        self.number = number
        self.size = mapped.array.nbytes
        self.address = mapped.address
        self.memory = mapped.array.data

    def punch_hole(self) -> None:
        """Return the memory to the kernel, at both ends; it must not be written to afterwards."""
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
        self._free: dict[int, Slab] = {}  # the first freed first
        self._punched: list[int] = []
        self._last = 0
        self._allocations = 0
        self._forwarded: weakref.WeakKeyDictionary[Mapping, int] = weakref.WeakKeyDictionary()
        self._kept: dict[int, list[memoryview]] = {}
        self._gone: list[int] = []  # forwarded and no longer mapped here; not yet reported to the mapper

    def allocate(self, size: int) -> Slab | None:
        """A slab of at least `size` bytes to write to; None if there is none: `size` bytes go over the socket."""
        if size < SMALLEST:
            return None
        # Of those of one size, the one freed last: it may still be in a CPU cache, and the others stay idle.
        fitting = [slab for slab in reversed(self._free.values()) if slab.size >= size]
        slab = min(fitting, key=lambda slab: slab.size) if fitting else self._another(size)
        if slab is not None:
            self._free.pop(slab.number, None)
            self._allocations += 1
            slab.last_use = self._allocations
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
        if longest is not None and self._allocations - longest.last_use > IDLE:
            longest.punch_hole()
            del self._free[longest.number]
            self._punched.append(longest.number)

    def free(self, numbers: Iterable[int]) -> None:
        """Free slabs: the mapper's views of them have been collected, or they were not sent."""
        for number in numbers:
            self._kept.pop(number, None)
            if number in self._slabs:
                self._free[number] = self._slabs[number]

    @property
    def has_forwarded(self) -> bool:
        """Whether forwarded slabs may still be in use."""
        return bool(self._kept)

    def release(self) -> None:
        """Drop all forwarded buffers: the other end no longer uses them."""
        self._kept.clear()

    def forward(self, buffers: list[memoryview]) -> tuple[int, list[int]] | None:
        """Forward received memory to a third process without a copy: one mapped slab that holds all of `buffers`.

        The buffers are kept alive, and so the slab in use, until it is freed here.

        Returns:
            The slab's number for the mapper, and the offset of each buffer in it; None if there is no such slab.
        """
        mapping: Mapping | None = None
        offsets: list[int] = []
        for buffer in buffers:
            place = _mapping_of(buffer) if buffer.nbytes else (mapping, 0)
            if place is None or (mapping is not None and place[0] is not mapping):
                return None  # at the first buffer that is elsewhere, as those of fetched samples are
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
            except OSError:  # no descriptors, or the mapper's process has ended: the bytes are copied
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
        except OSError:  # no memory, no descriptors, no mappings: the socket is used
            return None
        slab = self._slabs[number] = Slab(number, mapped)
        return slab

    def _announce(self, number: int, size: int, replaces: int, descriptor: int) -> None:
        socket.send_fds(self._descriptors, [_ANNOUNCEMENT.pack(number, size, replaces)], [descriptor])

    def send_descriptors(self, descriptors: Sequence[Descriptor]) -> int:
        """Send descriptors that are none of a slab, in few messages; returns the number of the first.

        Raises:
            OSError: the mapper's process has ended, or too many descriptors are in transit.
        """
        first = self._last + 1
        self._last += len(descriptors)
        for sent in range(0, len(descriptors), _MAX_DESCRIPTORS):
            some = descriptors[sent : sent + _MAX_DESCRIPTORS]
            message = _ANNOUNCEMENT.pack(first + sent, 0, len(some))
            socket.send_fds(self._descriptors, [message], [descriptor.number for descriptor in some])
        return first


class Mapping:
    """Another process's slab, mapped here.

    Attributes:
        descriptor: of the memory, owned, if it may be forwarded to a third process; else None.
        size: in bytes.
        array: the memory.
        address: its first byte in this process.
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


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()  # of all borrowers, for an allocator that forwards one
_forwards = False
_reserve: Reserve | None = None  # one for the process, for its life


def enable_forwarding() -> None:
    """Keep the descriptors of received slabs from now on, in a process that forwards them to a third."""
    global _forwards
    _forwards = True


def _reserved() -> Reserve:
    global _reserve
    if _reserve is None:
        _reserve = Reserve(1)
    return _reserve


def mapping_at(address: int, size: int) -> Mapping | None:
    """The received slab that holds all of `size` bytes at `address` of this process; None if none does."""
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
        self._received: dict[int, Descriptor] = {}  # that are none of a slab, and not yet taken
        self._returned: deque[int] = deque()
        self._in_use: set[int] = set()
        self._closed = False
        _reserved()

    def view(self, number: int, size: int) -> memoryview:
        """The first `size` bytes of a slab, writable; it is free again when every view derived from this is collected.

        Raises:
            OSError: it cannot be mapped; it is free again, and another call may succeed.
        """
        try:
            while number not in self._mappings:
                self._receive()
        except OSError:
            self._returned.append(number)
            raise
        # torch.frombuffer, numpy and slices of the memoryview all keep this array alive.
        mapping = self._mappings[number]
        exporter = np.frombuffer(mapping.array, dtype=np.uint8, count=size)
        self._in_use.add(number)
        # Holds the Mapping: its finalizers (a page-locked slab is unlocked then) must not run before this one.
        weakref.finalize(exporter, self._on_view_collected, number, mapping).atexit = False
        return exporter.data

    def _on_view_collected(self, number: int, mapping: Mapping) -> None:  # on the thread that collects the last view
        self._in_use.discard(number)
        self._returned.append(number)
        if self._closed and not self._in_use:
            self._descriptors.close()

    def close(self) -> None:
        """Receive nothing more. The socket closes, and so reports, when the last view has been collected."""
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
        """The descriptors sent by `Allocator.send_descriptors`."""
        numbers = range(first, first + count)
        while any(number not in self._received for number in numbers):
            self._receive()
        return [self._received.pop(number) for number in numbers]

    def _receive(self) -> None:
        with _reserved().given_up():
            number, size, replaced, numbers = self._peek()
            try:
                mapping = Mapping(numbers[0], size) if size else None
                # Remove the message only now: it cannot be received a second time.
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
        """The next announcement and copies of its descriptors; leaves the message, so that it can be read again."""
        # The allocator sends a descriptor before the frame that refers to it, so this does not block.
        space = socket.CMSG_LEN(_MAX_DESCRIPTORS * _INT.size)
        message, carried, flags, _ = self._descriptors.recvmsg(_ANNOUNCEMENT.size, space, socket.MSG_PEEK)
        numbers = [number for _, _, data in carried for (number,) in _INT.iter_unpack(data)]
        if flags & socket.MSG_CTRUNC:
            for number in numbers:
                os.close(number)
            raise shortage("map the shared memory of a batch")
        if not message:
            raise EOFError("the process that allocated the slab has ended")
        return *_ANNOUNCEMENT.unpack(message), numbers


def _may_keep(descriptor: int) -> bool:
    """Whether enough descriptors above this one, the lowest free, are left for sockets to stores and for processes."""
    return descriptor < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _size_class(size: int) -> int:
    """`size` rounded up to an eighth of a power of two, so that batches of nearly equal size share slabs."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
