"""Page-locked host memory: slabs locked in place, and batches copied to pinned memory."""

from __future__ import annotations

import os
import threading
import warnings
import weakref

from headrace._core.device.streams import Streams
from headrace._core.failure import Failure, Stage
from headrace._core.torchcompat.private import pin_memory
from headrace._core.transport.slabs import Slab


class Registry:
    """The page-locked slabs. One for a process: several loaders may use the same slab."""

    def __init__(self) -> None:
        self._registered: weakref.WeakSet[Slab] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.refused = False

    def register(self, mapping: Slab, streams: Streams) -> bool:
        """Whether `mapping` is page-locked; registers it if possible.

        After the first refusal no other is tried: limits of a process do not grow while it runs.
        """
        with self._lock:
            if self.refused or not streams.registers or mapping in self._registered:
                return mapping in self._registered
            try:
                streams.register(mapping.address, mapping.size)
            except RuntimeError as error:
                self.refused = True
                reason = error
            else:
                # A view of a slab keeps its Slab alive, so the memory is unused when this runs; and
                # it runs before the Slab is unmapped.
                weakref.finalize(
                    mapping, _release, streams, mapping.address, os.getpid()
                ).atexit = False
                self._registered.add(mapping)
                return True
        warnings.warn(
            f"shared memory could not be page-locked ({reason}). Each batch is copied once more, into a pinned buffer, "
            "by the thread that calls next(). Raise the limit of locked memory (ulimit -l) to avoid it.",
            stacklevel=2,
        )
        return False


def _release(streams: Streams, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the object, and not the registration
        streams.unregister(address)


REGISTRY = Registry()


def pin(batch: object, number: int) -> object:
    """Copy the batch of this number to pinned memory, as torch's loader does, in the consumer's thread.

    The memory is of torch's own allocator, never the slab of the batch, although a slab can be
    page-locked in place: a `non_blocking` copy may still read a batch that the user has dropped.
    torch's allocator knows of the copy and keeps the memory until then; a slab would be reused.
    """
    try:
        return pin_memory(batch)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise Failure.caught(error, Stage.PIN, number).exception() from error.__cause__
