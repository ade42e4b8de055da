"""Reports on loaders: the waits, the limit, and a change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from headrace._base.text import digits, seconds, share
from headrace.telemetry.counters import BatchRecord
from headrace.telemetry.diagnosis import Diagnosis, Setup, diagnose
from headrace.telemetry.figures import Figures, figures_of


@dataclass(frozen=True, repr=False)
class Report(Figures, Diagnosis):
    """A report on the last iteration of a loader.

    The report says how the loader spent the time, and what limits the loader. The other attributes
    are described by `Figures`.

    Attributes:
        limit: the limit of the loader. ``"consumer"`` if the loop hardly waits, ``"few-batches"``
            if the limit is unknown. Otherwise ``"latency"``, ``"throttling"``, ``"source"``,
            ``"event-loop"``, ``"cores"``, ``"blocked-loop"``, ``"workers"``, ``"order"``,
            ``"transport"``, ``"copy"``, ``"start-up"``, ``"memory-budget"`` or ``"look-ahead"``.
        evidence: the numbers behind `limit`.
        advice: the change to make. Empty if no change is needed.
        predicted: share of the time, from 0 to 1, that the loop would wait after the change, under
            the assumption named in the text. None if unknown.
        change: the change as arguments of the loader, such as ``{"concurrency": 128}``. Empty if
            the change is made elsewhere.
    """

    def __repr__(self) -> str:
        return f"<Report: {self.summary}; print it>"

    @property
    def summary(self) -> str:
        """The waiting share, the limit, and the change."""
        change = ", ".join(f"{name}={value!r}" for name, value in self.change.items())
        tried = f", try {change}" if change else ""
        return f"waiting {share(self.wait_share)}, limit: {self.limit}{tried}"

    def __str__(self) -> str:
        facts = (f"{name:<22}{value}" for name, value in self._facts().items())
        return "\n".join([self.headline, "", *facts]).rstrip()

    @property
    def headline(self) -> str:
        """First line: the wait, the limit and the change."""
        if not self.batches:
            return "No batch was delivered after the first."
        limit, assumed = _LIMITS[self.limit]
        said = f"{share(self.wait_share)} of the time your loop waits for data. "
        said += f"{limit}: {self.evidence}."
        if self.advice:
            said += f" Change: {self.advice}."
        if self.predicted is not None and self.advice:
            said += f" Predicted wait after it, {assumed}: {share(self.predicted)}."
        return said

    def _facts(self) -> dict[str, str]:
        facts = {"first batch after": seconds(self.start_up)} if self.start_up else {}
        parts = [
            f"{step} {share(each / self.waited)}"
            for step, each in self.waits.items()
            if each > 0.01 * self.waited
        ]
        if parts:
            facts["waits for"] = ", ".join(parts)
        if self.seconds:
            speed = (
                f"{digits(self.samples / self.seconds)} samples/s, "
                f"{digits(self.batches / self.seconds)} batches/s"
            )
            if self.nbytes:
                speed += f", {self.nbytes / self.seconds / 1e6:.3g} MB/s"
            facts["rate"] = speed
        if self.concurrency:
            facts["fetches in flight"] = f"{self.in_flight:.0f} of {self.concurrency}"
        if self.fetch_seconds:
            pairs = zip(("p50", "p90", "p99"), self.fetch_seconds, strict=True)
            facts["a fetch takes"] = ", ".join(
                f"{name} {seconds(each)}" for name, each in pairs
            )
        if self.workers_busy >= 0.05:
            facts["batches in work"] = (
                f"{self.workers_busy:.1f}, on {self.workers_cpu:.1f} cores"
            )
        if self.engine_cpu:
            facts["event loop busy"] = share(self.engine_cpu)
        if self.blocked >= 0.01:
            facts["event loop blocked"] = share(self.blocked)
        requests = dataclasses.asdict(self.requests).items()
        return facts | {
            name.replace("_", " "): f"{count:,}" for name, count in requests if count
        }


_IN_FLIGHT = "if more fetches at once take no longer each"
# Text of the limit, and assumption of the prediction.
_LIMITS = {
    "consumer": ("The loader is not the limit", ""),
    "latency": ("Fetching is the limit", _IN_FLIGHT),
    "throttling": (
        "The store's rate limit is the limit",
        "if the store answers as many requests as now",
    ),
    "source": (
        "The source, or the link to it, is the limit",
        "if it gives as much as now",
    ),
    "event-loop": ("The event loop is the limit", "if nothing else becomes slower"),
    "cores": ("The limit is cores that other processes or threads take", ""),
    "blocked-loop": ("A blocking call on the event loop is the limit", ""),
    "workers": (
        "Transforms and collation are the limit",
        "if each worker has a core of its own",
    ),
    "order": ("The order of batches is the limit", "if the others take as long as now"),
    "transport": ("Sending batches is the limit", "if that takes no time"),
    "copy": ("Delivery inside next() is the limit", "if that takes no time"),
    "few-batches": ("Too few batches to say what limits it", ""),
    "start-up": ("The start is the limit", "if the next epochs are like this one"),
    "memory-budget": ("The memory budget is the limit", _IN_FLIGHT),
    "look-ahead": ("The look-ahead is the limit", "if no other step takes longer"),
}


def make_report(records: Sequence[BatchRecord], setup: Setup) -> Report:
    """Make the report on an iteration.

    `records` are the batches in the order of delivery.
    """
    figures = figures_of(records) if records else Figures()
    return Report(**vars(figures), **vars(diagnose(figures, setup)))
