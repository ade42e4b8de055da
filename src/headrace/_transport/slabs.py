"""Slabs: recycled shared memory for bytes sent between processes.

A slab is a `memfd`: memory with a descriptor and without a name. So no file is left in /dev/shm,
and the size limit of /dev/shm does not apply. Slabs are preallocated: a shortage is an error in
this process, and not a SIGBUS in the other process.

The writing process owns the slab (`Allocator`), and sends the descriptor once, over a Unix socket.
The reading process maps the slab (`Mapper`). When the last view has been collected, the reading
process reports the slab as free. If the reader keeps all views, more slabs are allocated, up to a
limit. Beyond the limit, bytes are sent over the slower socket.

Without memfd (macOS), and between machines, there are no slabs: all bytes are sent over the socket.
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

from headrace._base.descriptors import Descriptor, shortage

# In bytes. Buffers begin at multiples of a cache line, as vectorised code of torch and NumPy needs.
ALIGNMENT = 64
# Maximum number of slabs. A worker uses a slab for each prefetched batch of the worker, and up to 2
# slabs for the batches of the consumer: fewer than ten. With more slabs in use, the consumer keeps
# batches. Further batches are copied, which takes no more memory.
SLABS = 32
# In bytes. A smaller region is cheaper to send over the socket than to manage.
SMALLEST = 32 * 1024
# In bytes. A smaller buffer of a tensor stays in the pickle, where the bytes are copied a few
# times. A separate buffer takes 8 µs on the way from a worker to the consumer
# (benchmarks/many_tensors.py).
SMALL = 4 * 1024
# Share of a region. A view keeps the memory of the whole region alive. A smaller view is copied, so
# that a program with the view does not keep the region.
SMALL_PART = 1 / 8
# Sent with the descriptor of a slab: number, size, and number of the replaced slab. Sent with other
# descriptors: number of the first descriptor, 0, and number of descriptors.
_ANNOUNCEMENT = struct.Struct("<IQI")
_MAX_DESCRIPTORS = 250  # descriptors in a message; the kernel's limit is 253
_INT = struct.Struct("i")

_libc: Any = ctypes.CDLL(None, use_errno=True) if hasattr(os, "memfd_create") else None
_FAILED = ctypes.c_void_p(-1).value
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def aligned(size: int) -> int:
    """Return `size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def address_of(buffer: memoryview) -> int:
    """Return the address of a buffer's first byte in this process."""
    address: int = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    return address


class Slab:
    """A slab mapped in this process, readable and writable.

    The mapping ends when this object and the last view have been collected. Unlike `mmap.mmap`
    before Python 3.13, a slab keeps no descriptor open.

    Raises:
        OSError: The slab cannot be mapped.
    """

    __slots__ = ("__weakref__", "address", "descriptor", "memory", "number", "size")

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(error := ctypes.get_errno(), os.strerror(error))
        memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(memory, _libc.munmap, address, size).atexit = False
        self.memory = np.frombuffer(cast(Any, memory), dtype=np.uint8).data
        self.address: int = address
        self.number = number  # the slab's number at both ends, from 1
        self.size = size
        # Set if this received slab may be forwarded to a third process. The slab owns the
        # descriptor.
        self.descriptor: int | None = None


class Allocator:
    """The slabs written by this end of a channel.

    Also slabs of a third process, forwarded by this end.
    """

    def __init__(self, descriptors: socket.socket) -> None:
        self._descriptors = descriptors
        # Descriptors cannot travel to another machine.
        self._shares_memory = _libc is not None and descriptors.family == socket.AF_UNIX
        self._slabs: dict[int, Slab] = {}
        self._free: dict[int, Slab] = {}  # in the order of release
        self._last = 0
        self._forwarded: weakref.WeakKeyDictionary[Slab, int] = (
            weakref.WeakKeyDictionary()
        )
        # Forwarded buffers, possibly still in use by the other end.
        self.kept: dict[int, list[memoryview]] = {}
        # Forwarded slabs, no longer mapped here, and not yet reported to the mapper.
        self._gone: list[int] = []

    def allocate(self, size: int) -> Slab | None:
        """Return a slab for writing at least `size` bytes, or None.

        If the result is None, the bytes go over the socket.
        """
        if size < SMALLEST or not self._shares_memory:
            return None
        # Among slabs of the same size, take the slab freed last: it may still be in a CPU cache.
        fitting = [slab for slab in reversed(self._free.values()) if slab.size >= size]
        slab = (
            min(fitting, key=lambda slab: slab.size) if fitting else self._another(size)
        )
        if slab is not None:
            self._free.pop(slab.number, None)
        return slab

    def _another(self, size: int) -> Slab | None:
        replaced = 0
        if self._free:
            # A slab that is too small. So there are no more slabs than are in use at a time.
            replaced = next(iter(self._free))
            del self._free[replaced]
        elif len(self._slabs) >= SLABS:
            return None
        self._slabs.pop(replaced, None)
        # Rounded up to an eighth of a power of two, so that batches of nearly
        # equal size share slabs.
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
        except OSError:  # no memory, descriptors or mappings: use the socket
            return None
        self._slabs[slab.number] = slab
        return slab

    def _announce(self, size: int, third: int, *descriptors: int) -> int:
        """Send descriptors, and return the mapper's number of the first.

        For `size` and `third` see `_ANNOUNCEMENT`.
        """
        number = self._last + 1
        self._last += len(descriptors)
        announcement = _ANNOUNCEMENT.pack(number, size, third)
        socket.send_fds(self._descriptors, [announcement], descriptors)
        return number

    def free(self, numbers: Iterable[int]) -> None:
        """Free slabs that are no longer in use.

        The mapper's views have been collected, or the slabs were not sent.
        """
        for number in numbers:
            self.kept.pop(number, None)
            if number in self._slabs:
                self._free[number] = self._slabs[number]

    def forward(self, buffers: list[memoryview]) -> tuple[int, list[int], int] | None:
        """Forward received memory to a third process without a copy.

        Possible if a single mapped slab holds all of `buffers`. The buffers are kept alive, and so
        the slab stays in use until `free`.

        Returns:
            The slab's number for the mapper, the offset of each buffer in the slab, and the end of
            the last buffer. None if the memory cannot be forwarded.
        """
        slab: Slab | None = None
        offsets, end = [], 0
        for buffer in buffers if self._shares_memory else ():
            offset = 0
            if buffer.nbytes:
                address = address_of(buffer)
                holder = slab_at(address, buffer.nbytes)
                if holder is None or (slab is not None and holder is not slab):
                    # At the first buffer outside of slabs, such as the buffer of a fetched sample.
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
                # no descriptors, or the mapper's process has ended: copy the bytes
                return None
            self._forwarded[slab] = number
            weakref.finalize(slab, self._gone.append, number).atexit = False
        self.kept[number] = buffers
        return number, offsets, end

    def send_descriptors(self, descriptors: Sequence[Descriptor]) -> int:
        """Send descriptors other than slabs, in few messages.

        Returns:
            The number of the first descriptor.
        """
        first = self._last + 1
        for sent in range(0, len(descriptors), _MAX_DESCRIPTORS):
            some = descriptors[sent : sent + _MAX_DESCRIPTORS]
            self._announce(0, len(some), *(descriptor.number for descriptor in some))
        return first


# The slabs of all mappers, for an allocator that forwards slabs.
_received: weakref.WeakSet[Slab] = weakref.WeakSet()
_forwards = False


def enable_forwarding() -> None:
    """Keep the descriptors of received slabs from now on.

    For a process that forwards slabs to a third process.
    """
    global _forwards
    _forwards = True


def slab_at(address: int, size: int) -> Slab | None:
    """Return the received slab with all of `size` bytes at `address`.

    None if no slab holds the bytes. `address` is an address in this process.
    """
    for slab in list(_received):
        if 0 <= address - slab.address <= slab.size - size:
            return slab
    return None


class Mapper:
    """The slabs written by the other end of a channel, mapped here."""

    def __init__(self, descriptors: socket.socket) -> None:
        self._descriptors = descriptors
        self._slabs: dict[int, Slab] = {}
        self._others: dict[int, Descriptor] = {}  # other descriptors, not yet taken
        self._returned: deque[int] = deque()
        self._in_use: set[int] = set()
        self._closed = False

    def view(self, number: int, size: int) -> memoryview:
        """Return a writable view of `size` bytes of a slab.

        The view begins at the start of the slab. The slab is free again when every view derived
        from the result has been collected.

        Raises:
            OSError: The slab cannot be mapped. The slab is then free. Another call may succeed.
        """
        try:
            while number not in self._slabs:
                self._receive()
        except OSError:
            self._returned.append(number)
            raise
        # torch.frombuffer, numpy and slices of the memoryview all keep this array alive. The array
        # is made from a memoryview: from an array of an array, `np.ndarray(..., buffer)` would keep
        # only the inner array alive.
        slab = self._slabs[number]
        exporter = np.frombuffer(slab.memory, dtype=np.uint8, count=size)
        self._in_use.add(number)
        # The finalizer holds the slab, because the finalizers of the slab must run later. (A
        # finalizer unlocks a page-locked slab.)
        weakref.finalize(exporter, self._on_view_collected, number, slab).atexit = False
        return exporter.data

    # Runs on the thread that collects the last view.
    def _on_view_collected(self, number: int, slab: Slab) -> None:
        self._in_use.discard(number)
        self._returned.append(number)
        if self._closed and not self._in_use:
            self._descriptors.close()

    def close(self) -> None:
        """Receive no more slabs.

        The socket closes when the last view has been collected, and the allocator sees the end.
        """
        self._closed = True
        if not self._in_use:
            self._descriptors.close()
        else:  # a view held until the exit of the program reports nothing
            weakref.finalize(self, self._descriptors.close)

    def returned(self) -> list[int]:
        """Return the slabs freed since the last call, for the allocator."""
        return [self._returned.popleft() for _ in range(len(self._returned))]

    def take_descriptors(self, first: int, count: int) -> list[Descriptor]:
        """Return the descriptors sent by `Allocator.send_descriptors`."""
        numbers = range(first, first + count)
        while any(number not in self._others for number in numbers):
            self._receive()
        return [self._others.pop(number) for number in numbers]

    def _receive(self) -> None:
        # The allocator sends a descriptor before the frame that refers to the slab, so this
        # call does not block. The message stays in the socket until the end of this function.
        # After a shortage, another call reads the message again.
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
        except BaseException:  # Ctrl-C too: nothing else owns the descriptors yet
            for each in numbers:
                os.close(each)
            raise
        if slab is None:
            self._others.update(enumerate(map(Descriptor, numbers), number))
            return
        # Keep the descriptor for forwarding, if enough descriptors are left for sockets to
        # stores and for processes.
        if _forwards and numbers[0] < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            slab.descriptor = numbers[0]
            weakref.finalize(slab, os.close, numbers[0]).atexit = False
        else:
            os.close(numbers[0])
        _received.add(slab)
        self._slabs.pop(replaced, None)
        self._slabs[number] = slab


class Arena:
    """The slab in which a worker makes an answer.

    An answer in the slab needs no copy for sending.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._expected = 0
        self._slab: Slab | None = None
        self.used = 0  # bytes

    def begin(self) -> None:
        """Allocate a slab with the size of the last answer."""
        self.abandon()
        self._slab = self._allocator.allocate(self._expected)

    def empty(self, size: int) -> memoryview | None:
        """Return uninitialised memory in the slab, or None.

        None if `size` bytes do not fit, or if `size` is so small that the bytes stay in the pickle.
        """
        start, end = self.used, self.used + size
        if size <= SMALL or self._slab is None or end > self._slab.size:
            return None
        self.used = aligned(end)
        return self._slab.memory[start:end]

    def offset_of(self, buffer: memoryview) -> int | None:
        """Return the offset of a buffer in the slab, or None if outside."""
        if self._slab is None or not buffer.nbytes:
            return None
        offset = address_of(buffer) - self._slab.address
        return offset if 0 <= offset < self.used else None

    def finish(self, size: int) -> Slab | None:
        """Take out the slab, for sending `size` bytes.

        Return None if there is no slab, or if the bytes do not fit.
        """
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
