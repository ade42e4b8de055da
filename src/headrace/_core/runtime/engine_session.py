"""The session of one of several engines, as the consumer's end of all of them sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.eventloop.waiting import Readable


class EngineSession(Protocol):
    """The session of one of several engines."""

    @property
    def started(self) -> bool:
        """Whether the engine takes plans: it runs, or will within a moment."""

    @property
    def ended(self) -> bool:
        """Whether no more batches will arrive."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended it."""

    @property
    def sources(self) -> Sequence[Readable]:
        """Descriptors that are readable when there is something to take; the second, if any, is of the process."""

    @property
    def process_ended(self) -> bool:
        """Whether the engine's process has ended; then the session ends when the batches that arrived are taken."""

    @property
    def how_process_ended(self) -> str:
        """How the engine's process has ended, in words."""

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        """Send plans."""

    def on_consumed(self, number: int) -> None:
        """Note that all batches up to this number have been taken."""

    def take(self) -> HostBatch | None:
        """The next batch if there is one; does not block."""

    def request_status(self, number: int) -> None:
        """Ask for the progress of a batch."""

    def take_status(self) -> str | None:
        """The answer, if it has arrived."""

    def trace(self, on: bool) -> None:
        """Measure single fetches from now on, or no longer."""

    def abandon(self) -> None:
        """Drop the batches, and expect no more."""

    def wake(self) -> None:
        """Make waiters return."""

    def close(self) -> None:
        """End it, without waiting."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many engines an epoch begins with, where they may take long to start.

    Attributes:
        least: engines that have to run.
        seconds: for which fewer may run, before the epoch ends with an error.
        shortage: says what the others wait for.
    """

    least: int
    seconds: float
    shortage: Callable[[], str]
