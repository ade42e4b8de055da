"""Copies to a device between handoff and delivery: the next batches are copied while the current one is used."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headrace._core.batches import HostBatch
from headrace._core.device.copy import Copier, DeviceBatch
from headrace._core.failure import Failure, Stage


@dataclass(eq=False)
class DeviceStage:
    """Copies batches of a session to a device, up to `depth` of them before they are taken; owns session and copier.

    In all else it is its session.
    """

    session: Any
    copier: Copier
    depth: int
    unpickled: Callable[[HostBatch], object]
    _copying: deque[HostBatch] = field(default_factory=deque)
    _next: HostBatch | None = None
    # A loader may be closed by another thread than its consumer.
    _lock: Any = field(default_factory=threading.RLock)
    _closed: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def ready(self) -> int:
        found: int = len(self._copying) + self.session.ready()
        return found

    def certain(self) -> int:
        begun = (*self._copying, *(() if self._next is None else (self._next,)))
        for number, host in enumerate(begun):
            if host.empty:
                return number
        found: int = len(begun) + self.session.certain()
        return found

    def take(self) -> HostBatch | None:
        """Enqueue the copies of the batches that have arrived, up to the depth, and return the oldest batch.

        `CudaGraphError` while a CUDA graph is being captured: no batch is taken then.
        """
        with self._lock:
            if self._closed:
                return None
            self.copier.streams.check()
            # One more than the depth: the oldest leaves.
            while len(self._copying) <= self.depth:
                if self._next is None:
                    self._next = self.session.take()
                if self._next is None:
                    break
                # After Ctrl-C here the batch is still in `_next`: its copy is enqueued again.
                self._copying.append(self._start_copy(self._next))
                self._next = None
            if not self._copying:
                with suppress(
                    RuntimeError
                ):  # a device that has failed is the error of the batch that comes next
                    self.copier.reap()
                return None
            try:
                self.copier.reap()
            except Exception as error:  # the device has failed
                self._copying[0] = self._copying[0].replaced_by(error, Stage.COPY)
            return self._copying.popleft()

    def _start_copy(self, host: HostBatch) -> HostBatch:
        if host.empty:
            return host
        stage = Stage.CLAIM
        try:
            data = self.unpickled(host)
            stage = Stage.COPY
            return host._replace(data=self.copier.begin(data))
        except Exception as error:  # raised at this batch's turn
            return host.replaced_by(error, stage)

    def claim(self, batch: DeviceBatch, number: int) -> object:
        """The data of a batch from `take`, safe to use on the consumer's stream."""
        try:
            with self._lock:
                return self.copier.claim(batch)
        except Exception as error:
            raise Failure.caught(error, Stage.COPY, number).exception() from error.__cause__

    def close(self) -> None:
        """End the session without waiting for it; wait for enqueued copies."""
        try:
            self.session.close()
        finally:
            with self._lock:
                self._closed = True
                self._copying.clear()
                self._next = None
                self.copier.close()
