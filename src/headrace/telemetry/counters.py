"""What a loader counts while it runs, and the frozen copy that `stats()` gives out."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, field

from headrace.batches import Failure, HostBatch, RequestCounts

__all__ = ["Counters", "LoaderStats"]


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """A loader's counts since it was made, over all its epochs.

    Attributes:
        epochs: iterations begun.
        batches: batches delivered.
        samples: samples delivered.
        skipped_samples: samples left out by ``on_error="skip"``.
        skipped: the record of each failure behind them: stage, index, key and error.
        wait_seconds: how long the consumer waited in `next()` or `anext()` for a batch that was not ready.
        elapsed_seconds: from the first `iter()` to the last batch delivered.
        placement: where the engine runs, and why.
        requests: what headrace's own datasets sent to stores for them, and how often a fetch was begun again.
    """

    epochs: int
    batches: int
    samples: int
    skipped_samples: int
    skipped: tuple[Failure, ...]
    wait_seconds: float
    elapsed_seconds: float
    placement: str
    requests: RequestCounts = field(default_factory=RequestCounts)

    @property
    def wait_share(self) -> float:
        """The part of the elapsed time that the consumer spent waiting for data, from 0 to 1."""
        return self.wait_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0


@dataclass(slots=True)
class Counters:
    """The counts of one loader, written on the consumer's thread by whichever iterator delivers."""

    placement: str = "not started"
    epochs: int = 0
    batches: int = 0
    samples: int = 0
    skipped_samples: int = 0
    skipped: list[Failure] = field(default_factory=list)
    wait_seconds: float = 0.0
    requests: RequestCounts = field(default_factory=RequestCounts)
    _counted: RequestCounts | None = None
    _began: float | None = None
    _last: float = 0.0

    def begin(self) -> None:
        """An iteration begins."""
        self.epochs += 1
        if self._began is None:
            self._began = self._last = time.perf_counter()

    def delivered(self, host: HostBatch) -> None:
        """A batch goes to the consumer."""
        self.batches += 1
        self._add(host)
        self.samples += host.size
        self._last = time.perf_counter()

    def skip(self, host: HostBatch) -> None:
        """A batch comes without some of its samples, or not at all."""
        self.skipped_samples += len(host.plan.indices) - host.size
        self.skipped.extend(host.failures)
        self._add(host)

    def _add(self, host: HostBatch) -> None:
        """Add what its way here took, once, though a batch may be skipped in part and delivered."""
        more = host.requests
        if more is not None and more is not self._counted:
            self._counted = more
            self.requests = RequestCounts(*map(sum, zip(astuple(self.requests), astuple(more), strict=True)))

    def snapshot(self) -> LoaderStats:
        """A frozen copy."""
        return LoaderStats(
            epochs=self.epochs,
            batches=self.batches,
            samples=self.samples,
            skipped_samples=self.skipped_samples,
            skipped=tuple(self.skipped),
            wait_seconds=self.wait_seconds,
            elapsed_seconds=self._last - self._began if self._began is not None else 0.0,
            placement=self.placement,
            requests=self.requests,
        )
