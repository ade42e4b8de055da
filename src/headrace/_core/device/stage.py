"""Copies to a device between handoff and delivery: the next batches are copied while the current one is used."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headrace._core.batches import HostBatch
from headrace._core.device.copy import Copier, DeviceBatch
from headrace._core.failure import Failure, Stage


class DeviceStage:
    """Copies batches of a session to a device, up to `depth` of them before they are taken; owns session and copier.

    In all else it is its session.
    """

    def __init__(self, session: Any, copier: Copier, depth: int, unpickled: Callable[[HostBatch], object]) -> None:
        self._session = session
        self._copier = copier
        self._depth = depth
        self._unpickled = unpickled
        self._copying: deque[HostBatch] = deque()
        self._next: HostBatch | None = None
        self._lock = threading.RLock()  # a loader may be closed by another thread than its consumer
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def ready(self) -> int:
        found: int = len(self._copying) + self._session.ready()
        return found

    def certain(self) -> int:
        begun = (*self._copying, *(() if self._next is None else (self._next,)))
        for number, host in enumerate(begun):
            if host.empty:
                return number
        found: int = len(begun) + self._session.certain()
        return found

    def take(self) -> HostBatch | None:
        """Enqueue the copies of the batches that have arrived, up to the depth, and return the oldest batch.

        `CudaGraphError` while a CUDA graph is being captured: no batch is taken then.
        """
        with self._lock:
            if self._closed:
                return None
            self._copier.check()
            # One more than the depth: the oldest leaves.
            while len(self._copying) <= self._depth:
                if self._next is None:
                    self._next = self._session.take()
                if self._next is None:
                    break
                # After Ctrl-C here the batch is still in `_next`: its copy is enqueued again.
                self._copying.append(self._start_copy(self._next))
                self._next = None
            if not self._copying:
                with suppress(RuntimeError):  # a device that has failed is the error of the batch that comes next
                    self._copier.reap()
                return None
            try:
                self._copier.reap()
            except Exception as error:  # the device has failed
                self._copying[0] = self._copying[0].replaced_by(error, Stage.COPY)
            return self._copying.popleft()

    def _start_copy(self, host: HostBatch) -> HostBatch:
        if host.empty:
            return host
        stage = Stage.CLAIM
        try:
            data = self._unpickled(host)
            stage = Stage.COPY
            return host._replace(data=self._copier.begin(data))
        except Exception as error:  # raised at this batch's turn
            return host.replaced_by(error, stage)

    def claim(self, batch: DeviceBatch, number: int) -> object:
        """The data of a batch from `take`, safe to use on the consumer's stream."""
        try:
            with self._lock:
                return self._copier.claim(batch)
        except Exception as error:
            raise Failure.caught(error, Stage.COPY, number).exception() from error.__cause__

    def close(self) -> None:
        """End the session without waiting for it; wait for enqueued copies."""
        try:
            self._session.close()
        finally:
            with self._lock:
                self._closed = True
                self._copying.clear()
                self._next = None
                self._copier.close()
