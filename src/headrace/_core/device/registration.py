"""Page-locked slabs: registered once, unregistered before they are unmapped."""

from __future__ import annotations

import os
import threading
import warnings
import weakref

from headrace._core.device.streams import Streams
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
        if mapping in self._registered:
            return True
        with self._lock:
            if self.refused or not streams.registers or mapping in self._registered:
                return mapping in self._registered
            try:
                streams.register(mapping.address, mapping.size)
            except RuntimeError as error:
                self.refused = True
                reason = error
            else:
                # A view of a slab keeps its Slab alive, so the memory is unused when this runs; and it runs
                # before the Slab is unmapped.
                release = _Release(streams, mapping.address)
                weakref.finalize(mapping, release).atexit = False
                self._registered.add(mapping)
                return True
        warnings.warn(
            f"shared memory could not be page-locked ({reason}). Each batch is copied once more, into a pinned buffer, "
            "by the thread that calls next(). Raise the limit of locked memory (ulimit -l) to avoid it.",
            stacklevel=2,
        )
        return False


class _Release:
    def __init__(self, streams: Streams, address: int) -> None:
        self._streams = streams
        self._address = address
        self._process = os.getpid()

    def __call__(self) -> None:
        if os.getpid() == self._process:  # a forked child has the object, and not the registration
            self._streams.unregister(self._address)


REGISTRY = Registry()
