"""Page-locked host memory: slabs locked in place, pinned buffers for copies, and batches that are pinned."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace._core.device.containers import replaced
from headrace._core.device.streams import Event, Streams
from headrace._core.failure import Failure, Stage
from headrace._core.text import users_stacklevel
from headrace._core.torchcompat.private import pin_memory as pin_batch
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


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory that a batch is packed into.

    Attributes:
        memory: bytes, pinned if possible.
        event: recorded after the last copy out of it; None if there is none.
    """

    memory: torch.Tensor
    event: Event | None = None


class Ring:
    """Buffers that are used in turn, each again only after the copy out of it has ended."""

    def __init__(self, streams: Streams, size: int) -> None:
        self._streams = streams
        self._size = size
        self._buffers: list[Buffer] = []  # the longest unused in front
        self._refused = False

    def next(self, size: int) -> Buffer:
        """A buffer of at least `size` bytes that no copy reads; blocks if all are in use."""
        idle = [buffer for buffer in self._buffers if buffer.event is None or buffer.event.query()]
        chosen = next((buffer for buffer in idle if buffer.memory.numel() >= size), None)
        if chosen is None and len(self._buffers) >= self._size:
            chosen = idle[0] if idle else self._buffers[0]
        if chosen is None:
            chosen = Buffer(self._make(size))
        else:
            self._buffers.remove(chosen)
            if chosen.event is not None:
                chosen.event.synchronize()
                chosen.event = None
            if chosen.memory.numel() < size:
                chosen = Buffer(self._make(size))
        self._buffers.append(chosen)
        return chosen

    def drain(self) -> None:
        """Block until no copy reads any of them."""
        for buffer in self._buffers:
            if buffer.event is not None:
                buffer.event.synchronize()

    def _make(self, size: int) -> torch.Tensor:
        if not self._refused:
            try:
                return self._streams.pinned(size)
            except RuntimeError as error:
                self._refused = True
                reason = str(error).splitlines()[0]
            warnings.warn(
                f"no pinned memory could be allocated ({reason}). Copies go through pageable memory: slower, and the "
                "thread that calls next() waits for each.",
                stacklevel=2,
            )
        return torch.empty(size, dtype=torch.uint8)


class Pinning:
    """Copies each batch to pinned memory, as torch's loader does, in the consumer's thread.

    The memory is of torch's own allocator, never the slab of the batch, although a slab can be page-locked in place: a
    `non_blocking` copy may still read a batch that the user has dropped. torch's allocator knows of the copy and keeps
    the memory until then; a slab would be reused.
    """

    def __init__(self, pinned: Callable[[int], torch.Tensor]) -> None:
        self._pinned = pinned
        self._refused = False

    def __call__(self, batch: object, number: int) -> object:
        """The batch of this number, pinned; unchanged, after one warning, if there is no more pinned memory."""
        if self._refused:
            return batch
        try:
            return pin_batch(batch)  # type: ignore[no-untyped-call]
        except Exception as error:
            reason = self._refusal(batch) if isinstance(error, RuntimeError) else None
            if reason is None:  # of the user's own pin_memory(), or of the device
                raise Failure.caught(error, stage=Stage.PIN, batch=number).exception() from error.__cause__
        self._refused = True
        warnings.warn(
            f"no pinned memory could be allocated ({reason}). The rest of this epoch is in pageable memory: copies to "
            "a device are slower, and the thread that starts one waits for it, non_blocking or not.",
            stacklevel=users_stacklevel(),
        )
        return batch

    def _refusal(self, batch: object) -> str | None:
        """Why memory for the largest tensor of `batch` cannot be pinned; None if it can."""
        largest = 0

        def look(leaf: object) -> object:
            nonlocal largest
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
                largest = max(largest, leaf.numel() * leaf.itemsize)
            return leaf

        replaced(batch, look)
        try:
            self._pinned(largest)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None


def pinned(size: int) -> torch.Tensor:
    """`size` bytes of torch's pinned memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
