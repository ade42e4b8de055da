"""A ring of pinned buffers, for batches that are not in page-locked memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from headrace._core.device.streams import Event, Streams


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
