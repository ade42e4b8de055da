"""How fast batches come, and how much of the time the training loop waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from headrace.loader import DataLoader

__all__ = ["Flow", "FlowMeter"]


@dataclass(frozen=True, slots=True)
class Flow:
    """What a loader delivered since a `FlowMeter` was started.

    Attributes:
        batches: batches delivered.
        samples: samples in them.
        seconds: the time it took, training included.
        wait_seconds: the part of it that was spent waiting for a batch.
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
    """Measures a loader from now on.

    Args:
        loader: the loader to measure.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._before = loader.stats()
        self._began = time.perf_counter()

    def read(self) -> Flow:
        """What was delivered since the meter was made."""
        now = self._loader.stats()
        return Flow(
            batches=now.batches - self._before.batches,
            samples=now.samples - self._before.samples,
            seconds=time.perf_counter() - self._began,
            wait_seconds=now.wait_seconds - self._before.wait_seconds,
        )
