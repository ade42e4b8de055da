"""Page-locked host memory: slabs locked in place, and pinned copies."""

from __future__ import annotations

import os
import threading
import warnings
import weakref

from headrace._device.streams import Streams
from headrace._records.failure import Failure, Stage
from headrace._torchcompat.private import pin_memory
from headrace._transport.slabs import Slab


class Registry:
    """The page-locked slabs of a process.

    A process has a single registry, because several loaders may use the same slab.
    """

    def __init__(self) -> None:
        self._registered: weakref.WeakSet[Slab] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.refused = False

    def register(self, slab: Slab, streams: Streams) -> bool:
        """Page-lock a slab if possible; return whether the slab is page-locked.

        After a refusal no other slab is tried: the limits of a process do not grow later.
        """
        with self._lock:
            if self.refused or not streams.registers or slab in self._registered:
                return slab in self._registered
            try:
                streams.register(slab.address, slab.size)
            except RuntimeError as error:
                self.refused = True
                reason = error
            else:
                # Runs before the Slab is unmapped. A view of a slab keeps the Slab alive, so the
                # memory is unused then.
                unlock = weakref.finalize(slab, _release, streams, slab.address, os.getpid())
                unlock.atexit = False
                self._registered.add(slab)
                return True
        warnings.warn(
            f"shared memory could not be page-locked ({reason}). Each batch is copied once more, "
            "into a pinned buffer, by the thread that calls next(). Raise the limit of locked "
            "memory (ulimit -l) to avoid it.",
            stacklevel=2,
        )
        return False


def _release(streams: Streams, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the object, but no registration
        streams.unregister(address)


REGISTRY = Registry()


def pin(batch: object, number: int) -> object:
    """Copy batch `number` to pinned memory in the consumer's thread.

    torch's loader does the same. The memory comes from torch's allocator. A slab could be
    page-locked in place, but a `non_blocking` copy may still read a batch after the user has
    dropped the batch. torch's allocator knows of the copy and keeps the memory until the end of the
    copy. A slab would be reused.
    """
    try:
        return pin_memory(batch)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise Failure.caught(error, Stage.PIN, number).exception() from error.__cause__
