"""The stage between handoff and claim: copies of the next batches are under way while the last one is used."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headrace._core.batches import BatchPlan, Failure, HostBatch, Stage
from headrace._core.device.copy import Copier, DeviceBatch
from headrace._core.open_session import OpenSession


class DeviceStage:
    """A session whose batches are on their way to a device when they are taken.

    To its consumer it is the session, and the handoff: nothing else knows that there is a device.

    Args:
        session: where the batches come from; owned from here on.
        copier: owned from here on.
        depth: for how many batches copies may be under way before they are taken.
        opened: a batch's data, unpacked in the consumer's thread.
    """

    def __init__(self, session: OpenSession, copier: Copier, depth: int, opened: Callable[[HostBatch], Any]) -> None:
        self._session = session
        self._handoff = session.handoff
        self._copier = copier
        self._depth = depth
        self._opened = opened
        self._begun: deque[HostBatch] = deque()
        self._next: HostBatch | None = None
        self._turn = threading.RLock()  # a loader may be closed by another thread than its consumer
        self._closed = False

    @property
    def handoff(self) -> DeviceStage:
        """Where the batches arrive: here."""
        return self

    @property
    def is_current(self) -> bool:
        """Whether waiting here would be waiting for oneself."""
        return self._session.is_current

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the engine."""
        return self._handoff.ended

    @property
    def error(self) -> BaseException | None:
        """What ended the engine."""
        return self._handoff.error

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        """Send plans ahead."""
        self._session.admit(plans)

    def request_status(self, number: int) -> None:
        """Ask how far a batch is."""
        self._session.request_status(number)

    def take_status(self) -> str | None:
        """The answer, if it is there."""
        return self._handoff.take_status()

    def ready(self) -> int:
        """How many batches lie ready, begun or not."""
        return len(self._begun) + self._handoff.ready()

    def wait(self, timeout: float | None) -> bool:
        """Block until there is one."""
        return self._handoff.wait(timeout)

    async def wait_async(self, timeout: float | None) -> bool:
        """As `wait`, on the caller's event loop."""
        return await self._handoff.wait_async(timeout)

    def take(self) -> HostBatch | None:
        """The oldest batch; before it is given, the copies of those that lie ready are begun, up to the depth.

        Raises:
            CudaGraphError: a CUDA graph is being captured. Nothing was taken, and nothing is lost.
        """
        with self._turn:
            if self._closed:
                return None
            self._copier.check()
            # One more than the depth: the oldest leaves.
            while len(self._begun) <= self._depth:
                if self._next is None:
                    self._next = self._handoff.take()
                if self._next is None:
                    break
                # A Ctrl-C in here leaves the batch where it is: its copy is begun again.
                self._begun.append(self._on_its_way(self._next))
                self._next = None
            if not self._begun:
                with suppress(RuntimeError):  # a device that has failed is the error of the batch that comes next
                    self._copier.reap()
                return None
            try:
                self._copier.reap()
            except Exception as error:  # the device has failed
                self._begun[0] = _failed(self._begun[0], error, stage=Stage.COPY)
            return self._begun.popleft()

    def _on_its_way(self, host: HostBatch) -> HostBatch:
        if host.empty:
            return host
        stage = Stage.CLAIM
        try:
            data = self._opened(host)
            stage = Stage.COPY
            return replace(host, data=self._copier.begin(data))
        except Exception as error:  # raised at this batch's turn
            return _failed(host, error, stage=stage)

    def claim(self, batch: DeviceBatch, number: int) -> Any:
        """What `take` gave, for the consumer's stream."""
        try:
            with self._turn:
                return self._copier.claim(batch)
        except Exception as error:
            raise Failure.caught(error, stage=Stage.COPY, batch=number).exception() from error.__cause__

    def close(self) -> None:
        """End the session, without waiting for it; the copies under way are waited for."""
        try:
            self._session.close()
        finally:
            with self._turn:
                self._closed = True
                self._begun.clear()
                self._next = None
                self._copier.close()


def _failed(host: HostBatch, error: Exception, *, stage: Stage) -> HostBatch:
    return HostBatch.failed(host.plan, error, stage=stage).with_failures_of(host)
