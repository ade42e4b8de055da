"""Rate of batches, and the share of the time that the training loop waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import headrace as hr

__all__ = ["Flow", "FlowMeter"]


@dataclass(frozen=True, slots=True)
class Flow:
    """Counts of a loader since a `FlowMeter` was started.

    Attributes:
        batches: batches delivered.
        samples: samples in them.
        seconds: elapsed time, training included.
        wait_seconds: time spent waiting for a batch.
    """

    batches: int
    samples: int
    seconds: float
    wait_seconds: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """The share of the time spent waiting for data, from 0 to 1."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0


class FlowMeter:
    """Measures a loader from its construction on.

    Args:
        loader: the loader to measure.
    """

    def __init__(self, loader: hr.DataLoader[Any]) -> None:
        self._loader = loader
        self._before = loader.stats()
        self._began = time.perf_counter()

    def read(self) -> Flow:
        """The counts since construction."""
        now = self._loader.stats()
        return Flow(
            batches=now.batches - self._before.batches,
            samples=now.samples - self._before.samples,
            seconds=time.perf_counter() - self._began,
            wait_seconds=now.wait_seconds - self._before.wait_seconds,
        )
