"""Slabs: recycled shared memory in which bytes cross from one process to another.

A slab is a `memfd`: memory with a descriptor and no name, so nothing is left in /dev/shm and its
size limit does not apply. It is preallocated, so a shortage is an error here and not a SIGBUS in
the other process. The writing process owns it (`Allocator`) and sends its descriptor once, over a
Unix socket; the reading process maps it (`Mapper`), and reports that it is free again when its last
view has been collected. If the reader keeps everything, more slabs are allocated, up to a limit;
then bytes are sent over the socket, which is slower.

Without memfd (macOS) there are no slabs, and all bytes are sent over the socket.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from headrace._core.descriptors import Descriptor, Reserve, shortage

# bytes; buffers begin at multiples of it: a cache line, which vectorised code of torch and NumPy
# needs
ALIGNMENT = 64
# A worker uses a slab for each batch of its share of the prefetched ones, and one or two for the
# consumer's batches: fewer than ten. More means that the consumer keeps batches; further ones are
# copied, which takes no more memory.
SLABS = 32
# Allocations after which an unused slab returns its memory. With 64, the consumer's memory does not
# grow over 5,000 batches of 4 MB; if memory is never returned, it grows by 6 to 9 %. A new slab
# costs what a few reuses save.
IDLE = 64
# Below this, a region is cheaper to send over the socket than to manage.
SMALLEST = 32 * 1024
# Up to this, the buffer of a tensor of a batch stays in the pickle, where its bytes are copied a
# few times. A buffer of its own takes 8 µs on the way from a worker to the consumer
# (benchmarks/many_tensors.py).
SMALL = 4 * 1024
# A view keeps the memory of its whole region. One of less than this part of its region is copied,
# so that a program that keeps the view does not keep the region.
SMALL_PART = 1 / 8
# Sent with the descriptor of a slab: its number, its size, the number it replaces. With other
# descriptors: the number of the first, 0, how many.
_ANNOUNCEMENT = struct.Struct("<IQI")
_MAX_DESCRIPTORS = 250  # descriptors in one message; the kernel's limit is 253
_INT = struct.Struct("i")

_libc: Any = ctypes.CDLL(None, use_errno=True) if hasattr(os, "memfd_create") else None
_FAILED = ctypes.c_void_p(-1).value
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def address_of(buffer: memoryview) -> int:
    """The first byte of a buffer in this process."""
    address: int = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    return address


class Slab:
    """A slab mapped here, readable and writable, until this and the last view of it are collected.

    It keeps no descriptor open, unlike `mmap.mmap` before Python 3.13. Raises OSError if it cannot
    be mapped.
    """

    __slots__ = ("__weakref__", "address", "descriptor", "last_use", "memory", "number", "size")

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(error := ctypes.get_errno(), os.strerror(error))
        memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(memory, _libc.munmap, address, size).atexit = False
        self.memory = np.frombuffer(cast(Any, memory), dtype=np.uint8).data
        self.address: int = address
        self.number = number  # its name for both ends; from 1
        self.size = size
        # owned, if a received slab may be forwarded to a third process
        self.descriptor: int | None = None
        self.last_use = 0  # the number of the last allocation that returned it

    def punch_hole(self) -> None:
        """Return the memory to the kernel; it reads as zeros in every process then."""
        if _libc.madvise(self.address, self.size, mmap.MADV_REMOVE):
            raise OSError(error := ctypes.get_errno(), os.strerror(error))


class Allocator:
    """The slabs that this end of a channel writes, and those of a third process that it forwards."""

    def __init__(self, descriptors: socket.socket) -> None:
        self._descriptors = descriptors
        self._slabs: dict[int, Slab] = {}
        self._free: dict[int, Slab] = {}  # the first freed first
        self._punched: list[int] = []
        self._last = 0
        self._allocations = 0
        self._forwarded: weakref.WeakKeyDictionary[Slab, int] = weakref.WeakKeyDictionary()
        # the forwarded buffers that may still be in use
        self.kept: dict[int, list[memoryview]] = {}
        # forwarded and no longer mapped here; not yet reported to the mapper
        self._gone: list[int] = []

    def allocate(self, size: int) -> Slab | None:
        """A slab of at least `size` bytes to write to; None if there is none: `size` bytes go over the socket."""
        if size < SMALLEST or _libc is None:
            return None
        # Of those of one size, the one freed last: it may still be in a CPU cache, and the others
        # stay idle.
        fitting = [slab for slab in reversed(self._free.values()) if slab.size >= size]
        slab = min(fitting, key=lambda slab: slab.size) if fitting else self._another(size)
        if slab is not None:
            self._free.pop(slab.number, None)
            self._allocations += 1
            slab.last_use = self._allocations
        longest = next(iter(self._free.values()), None)
        if longest is not None and self._allocations - longest.last_use > IDLE:
            longest.punch_hole()
            del self._free[longest.number]
            self._punched.append(longest.number)
        return slab

    def _another(self, size: int) -> Slab | None:
        replaced = 0
        if self._punched:
            replaced = self._punched.pop()
        elif len(self._slabs) >= SLABS:
            if not self._free:
                return None
            replaced = next(iter(self._free))  # too small
            del self._free[replaced]
        self._slabs.pop(replaced, None)
        # Rounded up to an eighth of a power of two, so that batches of nearly equal size share
        # slabs.
        step = max(4096, 1 << max(0, size.bit_length() - 4))
        size = -(-size // step) * step
        try:
            descriptor = os.memfd_create("headrace-slab", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, 0, size)
                slab = Slab(self._last + 1, descriptor, size)
                self._announce(size, replaced, descriptor)
            finally:
                os.close(descriptor)
        except OSError:  # no memory, no descriptors, no mappings: the socket is used
            return None
        self._slabs[slab.number] = slab
        return slab

    def _announce(self, size: int, third: int, *descriptors: int) -> int:
        """Send descriptors; returns the number that the mapper knows the first of them by."""
        number = self._last + 1
        self._last += len(descriptors)
        socket.send_fds(self._descriptors, [_ANNOUNCEMENT.pack(number, size, third)], descriptors)
        return number

    def free(self, numbers: Iterable[int]) -> None:
        """Free slabs: the mapper's views of them have been collected, or they were not sent."""
        for number in numbers:
            self.kept.pop(number, None)
            if number in self._slabs:
                self._free[number] = self._slabs[number]

    def forward(self, buffers: list[memoryview]) -> tuple[int, list[int], int] | None:
        """Forward received memory to a third process without a copy: one mapped slab that holds all of `buffers`.

        The buffers are kept alive, and so the slab in use, until it is freed here. Returns the
        slab's number for the mapper, the offset of each buffer in it, and where the last one ends.
        """
        slab: Slab | None = None
        offsets, end = [], 0
        for buffer in buffers:
            offset = 0
            if buffer.nbytes:
                address = address_of(buffer)
                holder = slab_at(address, buffer.nbytes)
                if holder is None or (slab is not None and holder is not slab):
                    # at the first buffer that is elsewhere, as those of fetched samples are
                    return None
                slab, offset = holder, address - holder.address
            offsets.append(offset)
            end = max(end, offset + buffer.nbytes)
        if slab is None or slab.descriptor is None:
            return None
        number = self._forwarded.get(slab)
        if number is None:
            try:
                number = self._announce(
                    slab.size, self._gone.pop() if self._gone else 0, slab.descriptor
                )
            except OSError:
                # no descriptors, or the mapper's process has ended: the bytes are copied
                return None
            self._forwarded[slab] = number
            weakref.finalize(slab, self._gone.append, number).atexit = False
        self.kept[number] = buffers
        return number, offsets, end

    def send_descriptors(self, descriptors: Sequence[Descriptor]) -> int:
        """Send descriptors that are none of a slab, in few messages; returns the number of the first."""
        first = self._last + 1
        for sent in range(0, len(descriptors), _MAX_DESCRIPTORS):
            some = descriptors[sent : sent + _MAX_DESCRIPTORS]
            self._announce(0, len(some), *(descriptor.number for descriptor in some))
        return first


# of all mappers, for an allocator that forwards one
_received: weakref.WeakSet[Slab] = weakref.WeakSet()
_forwards = False
_reserve: Any = None  # one for the process, for its life


def _after_fork() -> None:
    """Leave the parent's reserve, whose lock another thread of the parent may hold."""
    global _reserve
    _reserve = None


os.register_at_fork(after_in_child=_after_fork)


def enable_forwarding() -> None:
    """Keep the descriptors of received slabs from now on, in a process that forwards them to a third."""
    global _forwards
    _forwards = True


def slab_at(address: int, size: int) -> Slab | None:
    """The received slab that holds all of `size` bytes at `address` of this process; None if none does."""
    for slab in list(_received):
        if 0 <= address - slab.address <= slab.size - size:
            return slab
    return None


class Mapper:
    """The slabs that the other end of a channel writes, mapped here."""

    def __init__(self, descriptors: socket.socket) -> None:
        global _reserve
        self._descriptors = descriptors
        self._slabs: dict[int, Slab] = {}
        self._others: dict[int, Descriptor] = {}  # that are none of a slab, and not yet taken
        self._returned: deque[int] = deque()
        self._in_use: set[int] = set()
        self._closed = False
        if _reserve is None:
            _reserve = Reserve(1)

    def view(self, number: int, size: int) -> memoryview:
        """The first `size` bytes of a slab, writable; it is free again when every view derived from this is collected.

        It is also free if it cannot be mapped, an OSError, and another call may succeed.
        """
        try:
            while number not in self._slabs:
                self._receive()
        except OSError:
            self._returned.append(number)
            raise
        # torch.frombuffer, numpy and slices of the memoryview all keep this array alive. It is made
        # of a memoryview: if an array is a view of another, `np.ndarray(..., buffer)` keeps only
        # the latter alive.
        slab = self._slabs[number]
        exporter = np.frombuffer(slab.memory, dtype=np.uint8, count=size)
        self._in_use.add(number)
        # Holds the Slab: its finalizers (a page-locked slab is unlocked then) must not run before
        # this one.
        weakref.finalize(exporter, self._on_view_collected, number, slab).atexit = False
        return exporter.data

    def _on_view_collected(
        self, number: int, slab: Slab
    ) -> None:  # on the thread that collects the last view
        self._in_use.discard(number)
        self._returned.append(number)
        if self._closed and not self._in_use:
            self._descriptors.close()

    def close(self) -> None:
        """Receive nothing more. The socket closes, and so reports, when the last view has been collected."""
        self._closed = True
        if not self._in_use:
            self._descriptors.close()
        else:  # a view that a program holds until it exits does not report
            weakref.finalize(self, self._descriptors.close)

    def returned(self) -> list[int]:
        """The numbers of the slabs that have become free since the last call, for the allocator."""
        return [self._returned.popleft() for _ in range(len(self._returned))]

    def take_descriptors(self, first: int, count: int) -> list[Descriptor]:
        """The descriptors sent by `Allocator.send_descriptors`."""
        numbers = range(first, first + count)
        while any(number not in self._others for number in numbers):
            self._receive()
        return [self._others.pop(number) for number in numbers]

    def _receive(self) -> None:
        with _reserve.given_up():
            # The allocator sends a descriptor before the frame that refers to it, so this does not
            # block. The message is left in the socket until it has been used, so that it can be
            # read again after a shortage.
            space = socket.CMSG_LEN(_MAX_DESCRIPTORS * _INT.size)
            message, carried, flags, _ = self._descriptors.recvmsg(
                _ANNOUNCEMENT.size, space, socket.MSG_PEEK
            )
            numbers = [each for _, _, data in carried for (each,) in _INT.iter_unpack(data)]
            try:
                if flags & socket.MSG_CTRUNC:
                    raise shortage("map the shared memory of a batch")
                if not message:
                    raise EOFError("the process that allocated the slab has ended")
                number, size, replaced = _ANNOUNCEMENT.unpack(message)
                slab = Slab(number, numbers[0], size) if size else None
                self._descriptors.recv(_ANNOUNCEMENT.size)
            except BaseException:  # Ctrl-C too: nothing else owns these descriptors yet
                for each in numbers:
                    os.close(each)
                raise
            if slab is None:
                self._others.update(enumerate(map(Descriptor, numbers), number))
                return
            # Forwarded only while enough descriptors are left for sockets to stores and for
            # processes.
            if _forwards and numbers[0] < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
                slab.descriptor = numbers[0]
                weakref.finalize(slab, os.close, numbers[0]).atexit = False
            else:
                os.close(numbers[0])
        _received.add(slab)
        self._slabs.pop(replaced, None)
        self._slabs[number] = slab


class Arena:
    """The slab in which a worker makes its answer, so that it need not be copied there when it is sent."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._expected = 0
        self._slab: Slab | None = None
        self.used = 0  # bytes

    def begin(self) -> None:
        """Allocate a slab of the size of the last answer."""
        self.abandon()
        self._slab = self._allocator.allocate(self._expected)

    def empty(self, size: int) -> memoryview | None:
        """Uninitialised memory in the slab; None if it does not fit, or is so small that it stays in the pickle."""
        start, end = self.used, self.used + size
        if size <= SMALL or self._slab is None or end > self._slab.size:
            return None
        self.used = aligned(end)
        return self._slab.memory[start:end]

    def offset_of(self, buffer: memoryview) -> int | None:
        """The offset of a buffer in the slab; None if it is elsewhere."""
        if self._slab is None or not buffer.nbytes:
            return None
        offset = address_of(buffer) - self._slab.address
        return offset if 0 <= offset < self.used else None

    def finish(self, size: int) -> Slab | None:
        """Take the slab out, to be sent with `size` bytes; None if they do not fit, or nothing was allocated in it."""
        self._expected = size
        slab = self._slab
        if slab is None or size > slab.size:
            return None
        self._slab, self.used = None, 0
        return slab

    def abandon(self) -> None:
        if self._slab is not None:
            self._allocator.free([self._slab.number])
        self._slab, self.used = None, 0
