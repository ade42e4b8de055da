"""Copies to a device between handoff and delivery.

The next batches are copied while the current batch is used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headrace._device.copy import Copier, DeviceBatch
from headrace._records.batches import HostBatch
from headrace._records.failure import Failure, Stage


@dataclass(eq=False)
class DeviceStage:
    """Copies batches of a session to a device.

    Up to `depth` batches are copied before being taken. The stage owns the session and the copier.
    """

    session: Any
    copier: Copier
    depth: int
    unpickled: Callable[[HostBatch], object]
    _copying: deque[HostBatch] = field(default_factory=deque)
    # A loader may be closed by another thread than its consumer.
    _lock: Any = field(default_factory=threading.RLock)
    _closed: bool = False

    def __post_init__(self) -> None:
        self.send = self.session.send
        self.waits = self.session.waits
        self.must_wait = self.session.must_wait
        self.take_status = self.session.take_status

    @property
    def ended(self) -> bool:
        return bool(self.session.ended)

    @property
    def error(self) -> Any:
        return self.session.error

    @property
    def is_current(self) -> bool:
        return bool(self.session.is_current)

    def ready(self) -> int:
        return len(self._copying) + int(self.session.ready())

    def certain(self) -> int:
        for number, host in enumerate(self._copying):
            if host.empty:
                return number
        return len(self._copying) + int(self.session.certain())

    def take(self) -> HostBatch | None:
        """Enqueue copies of arrived batches, and return the oldest batch.

        The batch stays here until `release`. At most `depth` copied batches remain. Returns None if
        no batch has arrived, or the stage is closed.

        Raises:
            CudaGraphError: a CUDA graph is being captured. No batch is taken.
        """
        with self._lock:
            if self._closed:
                return None
            self.copier.streams.check()
            # One batch more than the depth, because the oldest batch leaves.
            while len(self._copying) <= self.depth:
                host = self.session.take()
                if host is None:
                    break
                # After Ctrl-C here, the session still has the batch: the copy is enqueued again.
                self._copying.append(self._start_copy(host))
                self.session.release()
            if not self._copying:
                # If the device has failed, the next batch raises the error.
                with suppress(RuntimeError):
                    self.copier.reap()
                return None
            try:
                self.copier.reap()
            except Exception as error:  # the device has failed
                self._copying[0] = self._copying[0].replaced_by(error, Stage.COPY)
            return self._copying[0]

    def release(self) -> None:
        """Remove the batch that `take` has returned."""
        with suppress(IndexError):  # another thread has closed the stage
            self._copying.popleft()

    def _start_copy(self, host: HostBatch) -> HostBatch:
        if host.empty:
            return host
        stage = Stage.CLAIM
        try:
            data = self.unpickled(host)
            stage = Stage.COPY
            return host._replace(data=self.copier.begin(data))
        except Exception as error:  # raised when the batch is delivered
            return host.replaced_by(error, stage)

    def claim(self, batch: DeviceBatch, number: int) -> object:
        """Return the data of a batch from `take`, safe on the consumer's stream."""
        try:
            with self._lock:
                return self.copier.claim(batch)
        except Exception as error:
            raise Failure.caught(
                error, Stage.COPY, number
            ).exception() from error.__cause__

    def close(self) -> None:
        """End the session without waiting; wait for enqueued copies."""
        try:
            self.session.close()
        finally:
            with self._lock:
                self._closed = True
                self._copying.clear()
                self.copier.close()
