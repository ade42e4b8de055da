"""Slabs: recycled shared memory in which bytes cross from one process to another; here the end that writes them.

A slab is a `memfd`: memory with a descriptor and no name, so nothing is left in /dev/shm and its size limit does not
apply. It is preallocated, so a shortage is an error here and not a SIGBUS in the other process. The writing process
owns it (`Allocator`) and sends its descriptor once, over a Unix socket; the reading process maps it (`mapper.Mapper`),
and reports that it is free again when its last view has been collected. If the reader keeps everything, more slabs are
allocated, up to a limit; then bytes are sent over the socket, which is slower.

Without memfd (macOS, Windows) there are no slabs, and all bytes are sent over the socket.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable, Sequence

from headrace._core.transport.descriptors import Descriptor
from headrace._core.transport.mapped import Mapped
from headrace._core.transport.mapper import ANNOUNCEMENT, MAX_DESCRIPTORS, Mapping, mapping_of

ALIGNMENT = 64  # bytes; buffers begin at multiples of it: a cache line, which vectorised code of torch and NumPy needs
# A worker uses a slab for each batch of its share of the prefetched ones, and one or two for the consumer's batches:
# fewer than ten. More means that the consumer keeps batches; further ones are copied, which takes no more memory.
SLABS = 32
# Allocations after which an unused slab returns its memory. With 64, the consumer's memory does not grow over 5,000
# batches of 4 MB; if memory is never returned, it grows by 6 to 9 %. A new slab costs what a few reuses save.
IDLE = 64
# Below this, a region is cheaper to send over the socket than to manage.
SMALLEST = 32 * 1024
# Up to this, a tensor is packed together with other small ones, which copies its bytes twice: some 4 µs for as many,
# where a buffer of its own takes 8 µs on the way from a worker to the consumer (benchmarks/many_tensors.py).
SMALL = 16 * 1024


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
    """The slabs that this end of a channel writes."""

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
            place = mapping_of(buffer) if buffer.nbytes else (mapping, 0)
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
        socket.send_fds(self._descriptors, [ANNOUNCEMENT.pack(number, size, replaces)], [descriptor])

    def send_descriptors(self, descriptors: Sequence[Descriptor]) -> int:
        """Send descriptors that are none of a slab, in few messages; returns the number of the first.

        Raises:
            OSError: the mapper's process has ended, or too many descriptors are in transit.
        """
        first = self._last + 1
        self._last += len(descriptors)
        for sent in range(0, len(descriptors), MAX_DESCRIPTORS):
            some = descriptors[sent : sent + MAX_DESCRIPTORS]
            message = ANNOUNCEMENT.pack(first + sent, 0, len(some))
            socket.send_fds(self._descriptors, [message], [descriptor.number for descriptor in some])
        return first


def _size_class(size: int) -> int:
    """`size` rounded up to an eighth of a power of two, so that batches of nearly equal size share slabs."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
