"""Restores plan order behind a stage that finishes batches as they come."""

from __future__ import annotations

from collections.abc import Iterator

from headrace._core.batches import HostBatch


class Reorder:
    """Holds batches back until all before them have passed; holds no more than there are plans outstanding."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, HostBatch] = {}

    def put(self, host: HostBatch) -> Iterator[HostBatch]:
        """Take a batch in; gives the batches whose turn has come."""
        self._held[host.plan.number] = host
        while (ready := self._held.pop(self._next, None)) is not None:
            self._next += 1
            yield ready
