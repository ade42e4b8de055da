"""What the consumer's half of an epoch sees of the engine's half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace._core.batches import BatchPlan, HostBatch


class BatchQueue(Protocol):
    """Where the batches of one epoch arrive."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""

    @property
    def error(self) -> BaseException | None:
        """Why it ended, if not as it should."""

    def take_status(self) -> str | None:
        """The engine's answer to `request_status`, if it has arrived."""

    def take(self) -> HostBatch | None:
        """The next batch if one is there."""

    def ready(self) -> int:
        """How many batches are there."""

    def wait(self, timeout: float | None) -> bool:
        """Block until a batch is there or nothing more will come; False after `timeout` seconds without either."""

    async def wait_async(self, timeout: float | None) -> bool:
        """As `wait`, on whatever event loop the caller is."""


class OpenSession(Protocol):
    """A session that runs somewhere: what a placement gives the consumer."""

    @property
    def handoff(self) -> BatchQueue:
        """Where the batches arrive."""

    @property
    def is_current(self) -> bool:
        """Whether waiting here would be waiting for oneself."""

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        """Send plans ahead."""

    def request_status(self, number: int) -> None:
        """Ask the engine how far a batch is; the answer ends a wait, and is taken from `handoff`."""

    def close(self) -> None:
        """End it, without waiting; any number of times."""
