"""Plan order after a stage that completes batches in any order."""

from __future__ import annotations

from collections.abc import Iterator

from headrace._core.batches import HostBatch


class Reorder:
    """A buffer of batches that wait for earlier ones; bounded by the number of outstanding plans."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._held: dict[int, HostBatch] = {}

    def put(self, host: HostBatch) -> Iterator[HostBatch]:
        """Add a batch; yields the batches that are next in order."""
        self._held[host.plan.number] = host
        while (ready := self._held.pop(self._next, None)) is not None:
            self._next += 1
            yield ready
