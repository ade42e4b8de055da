"""Slabs at the end that reads them: mapped once, and returned to the other end when their last view is collected."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections import deque

import numpy as np

from headrace._core.descriptors import Reserve, shortage
from headrace._core.transport.descriptors import Descriptor
from headrace._core.transport.mapped import Mapped, address_of

with contextlib.suppress(ImportError):  # Windows, where there are no slabs
    import resource

# Sent with the descriptor of a slab: its number, its size, the number it replaces. With other descriptors: the number
# of the first, 0, how many.
ANNOUNCEMENT = struct.Struct("<IQI")
MAX_DESCRIPTORS = 250  # descriptors in one message; the kernel's limit is 253
_INT = struct.Struct("i")


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


def mapping_of(buffer: memoryview) -> tuple[Mapping, int] | None:
    address = address_of(buffer)
    mapping = mapping_at(address, buffer.nbytes)
    return None if mapping is None else (mapping, address - mapping.address)


class Mapper:
    """The slabs that the other end of a channel writes, mapped here."""

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
        # torch.frombuffer, numpy and slices of the memoryview all keep this array alive. It is made of a memoryview: if
        # an array is a view of another, `np.ndarray(..., buffer)` keeps only the latter alive.
        mapping = self._mappings[number]
        exporter = np.frombuffer(mapping.array.data, dtype=np.uint8, count=size)
        self._in_use.add(number)
        # Holds the Mapping: its finalizers (a page-locked slab is unlocked then) must not run before this one.
        weakref.finalize(exporter, self._on_view_collected, number, mapping).atexit = False
        return exporter.data

    def _on_view_collected(self, number: int, mapping: Mapping) -> None:  # on the thread that collects the last view
        self._in_use.discard(number)
        self._returned.append(number)
        if self._closed and not self._in_use:
            self._descriptors.close()

    @property
    def in_use(self) -> int:
        """The number of slabs with views that have not been collected."""
        return len(self._in_use)

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
                self._descriptors.recv(ANNOUNCEMENT.size)
            except BaseException:  # Ctrl-C too: nothing else owns these descriptors yet
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
        space = socket.CMSG_LEN(MAX_DESCRIPTORS * _INT.size)
        message, carried, flags, _ = self._descriptors.recvmsg(ANNOUNCEMENT.size, space, socket.MSG_PEEK)
        numbers = [number for _, _, data in carried for (number,) in _INT.iter_unpack(data)]
        if flags & socket.MSG_CTRUNC:
            for number in numbers:
                os.close(number)
            raise shortage("map the shared memory of a batch")
        if not message:
            raise EOFError("the process that allocated the slab has ended")
        return *ANNOUNCEMENT.unpack(message), numbers


def _may_keep(descriptor: int) -> bool:
    """Whether enough descriptors above this one, the lowest free, are left for sockets to stores and for processes."""
    return descriptor < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
