"""The arena: a slab in which a worker makes its answer, so that it need not be copied there when it is sent."""

from __future__ import annotations

from headrace._core.transport.allocator import SMALL, Allocator, Slab, aligned
from headrace._core.transport.mapped import address_of


class Arena:
    """The slab in which an answer is being made."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._expected = 0
        self.slab: Slab | None = None
        self.used = 0

    def begin(self) -> None:
        """Allocate a slab of the size of the last answer."""
        self.abandon()
        self.slab = self._allocator.allocate(self._expected)

    def empty(self, size: int) -> memoryview | None:
        """Uninitialised memory in the slab; None if it does not fit, or is so small that it will be packed."""
        start, end = self.used, self.used + size
        if size <= SMALL or self.slab is None or end > self.slab.size:
            return None
        self.used = aligned(end)
        return self.slab.memory[start:end]

    def offset_of(self, buffer: memoryview) -> int | None:
        """The offset of a buffer in the slab; None if it is elsewhere."""
        if self.slab is None or not buffer.nbytes:
            return None
        offset = address_of(buffer) - self.slab.address
        return offset if 0 <= offset < self.used else None

    def finish(self, size: int) -> Slab | None:
        """Take the slab out, to be sent with `size` bytes; None if they do not fit, or nothing was allocated in it."""
        self._expected = size
        slab = self.slab
        if slab is None or size > slab.size:
            return None
        self.slab, self.used = None, 0
        return slab

    def abandon(self) -> None:
        """Free an unsent slab."""
        if self.slab is not None:
            self._allocator.free([self.slab.number])
        self.slab, self.used = None, 0
