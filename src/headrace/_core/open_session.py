"""A session as the consumer sees it: plans in, batches out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from headrace._core.batches import BatchPlan, HostBatch
from headrace.errors import ForkedError


def check_not_forked(made_in: int) -> None:
    """Raise `ForkedError` in a fork of the process that opened a session; its engine is that process's."""
    if made_in != os.getpid():
        raise ForkedError("an iterator of headrace", made_in=made_in, used_in=os.getpid())


class BatchQueue(Protocol):
    """Where the batches of one epoch arrive."""

    @property
    def ended(self) -> bool:
        """Whether no more batches will arrive."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended the session; None after a normal end."""

    def take_status(self) -> str | None:
        """The engine's answer to `request_status`, if it has arrived."""

    def take(self) -> HostBatch | None:
        """The next batch if there is one; does not block."""

    def ready(self) -> int:
        """The number of batches that have arrived."""

    def certain(self) -> int:
        """The number of batches that have arrived, and that `next()` will return, or raise an error for."""

    def wait(self, timeout: float | None) -> bool:
        """Block until a batch arrives or the session ends; False after `timeout` seconds."""

    async def wait_async(self, timeout: float | None) -> bool:
        """As `wait`, on the caller's event loop."""


class OpenSession(Protocol):
    """A running session, as a placement returns it."""

    @property
    def handoff(self) -> BatchQueue:
        """Where the batches arrive."""

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the engine's own thread, where waiting would deadlock."""

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        """Send plans to the engine."""

    def on_consumed(self, number: int) -> None:
        """Note that all batches up to this number have been taken, where no plan shows it."""

    def request_status(self, number: int) -> None:
        """Request the progress of a batch; the answer ends a wait, and is taken from `handoff`."""

    def trace(self, on: bool) -> None:
        """Measure single fetches from now on, or no longer."""

    def close(self) -> None:
        """End the session without waiting; idempotent."""


class SessionWrapper:
    """A session that changes the batches of another: it is that session, and the queue of its batches, to the consumer.

    Subclasses define `take`, and extend `close` and `ready` where they hold batches.

    Args:
        session: the other session; this owns it.
    """

    def __init__(self, session: OpenSession) -> None:
        self._session = session
        self._queue = session.handoff
        self.admit = session.admit
        self.on_consumed = session.on_consumed
        self.request_status = session.request_status
        self.trace = session.trace
        self.take_status = self._queue.take_status
        self.wait = self._queue.wait
        self.wait_async = self._queue.wait_async

    @property
    def handoff(self) -> BatchQueue:
        return self

    @property
    def is_current(self) -> bool:
        return self._session.is_current

    @property
    def ended(self) -> bool:
        return self._queue.ended

    @property
    def error(self) -> BaseException | None:
        return self._queue.error

    def ready(self) -> int:
        return self._queue.ready()

    def certain(self) -> int:
        return self._queue.certain()

    def take(self) -> HostBatch | None:
        return self._queue.take()

    def close(self) -> None:
        self._session.close()
