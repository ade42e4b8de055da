"""What a benchmark has found, so far or in all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace._core.store.client import AT_ONCE
from headrace._core.store.redaction import redact_url, secrets_in
from headrace.cli.bench.limits import Bound, Ceiling, bound_of
from headrace.cli.bench.needs import Need, demands, engine_rate, needs_of
from headrace.cli.bench.reads import Listing
from headrace.cli.bench.search import Search
from headrace.cli.bench.trials import PERCENTILES, Percentiles, Trial, Trials
from headrace.options import MEMORY_BUDGET

__all__ = ["Results", "hide_secrets", "median_trial"]

HIDDEN = "…"


@dataclass(slots=True)
class Results:
    """What a benchmark has found; filled while it runs.

    Attributes:
        url: of the store, without secrets.
        options: of the store; may hold secrets.
        gpus: of a host that is to be fed.
        samples_per_gpu: samples that one takes in a second; None for the demand of MLPerf Storage.
        cores: cores that this process may use.
        listing: what was read.
        trials: what makes trials.
        ceiling: the highest number of fetches in flight that could be tried.
        unloaded: a trial of few fetches in flight, with times to the first byte.
        search: the search.
        loaded: a trial of the best setting, with times to the first byte.
        halves: a trial of it that reads half of each.
    """

    url: str
    options: Mapping[str, object]
    gpus: int
    samples_per_gpu: float | None
    cores: float
    listing: Listing | None = None
    trials: Trials | None = None
    ceiling: Ceiling = field(default_factory=lambda: Ceiling(1, ""))
    unloaded: Trial | None = None
    search: Search | None = None
    loaded: Trial | None = None
    halves: Trial | None = None

    @property
    def unit(self) -> str:
        """What is counted: objects, or reads where large objects are read in parts."""
        return "reads" if self.listing is not None and self.listing.in_parts else "objects"

    def rows(self) -> list[Trial]:
        """For each setting the trial of median rate, by the number of fetches in flight."""
        search = self.search
        if search is None:
            return []
        settings = {trial.concurrency for trial in search.trials if not trial.failed}
        return [median_trial(search, setting) for setting in sorted(settings)]

    @property
    def best(self) -> Trial | None:
        """The trial of the best setting that has the median rate; None before the first trial."""
        setting = None if self.search is None else self.search.best
        return None if self.search is None or setting is None else median_trial(self.search, setting)

    def bound(self) -> Bound | None:
        """What bounds the rate; None before the first trial."""
        best = self.best
        if best is None or self.search is None:
            return None
        return bound_of(best, self.search.trials, self.halves, self.ceiling, self.cores)

    def needs(self) -> list[Need]:
        """What a host needs."""
        best, unloaded = self.best, self.unloaded
        if best is None or unloaded is None:
            return []
        size = best.nbytes / best.reads
        return [needs_of(demand, best, unloaded) for demand in demands(self.gpus, self.samples_per_gpu, size)]

    def constructor(self) -> str:
        """The program that loads with the best setting."""
        best, listing, trials = self.best, self.listing, self.trials
        if best is None or listing is None or trials is None:
            return ""
        parts = listing.parts_at_once
        concurrency = max(1, round(best.concurrency / parts))
        url, store = _literal(redact_url(self.url)), ""
        if self.options:
            lines = [
                f"        {_literal(name)}: {_literal(value)}," for name, value in hide_secrets(self.options).items()
            ]
            store = "\n".join(["store = hr.Store(", f"    {url},", "    options={", *lines, "    },", ")\n"])
            url = "store"
        budget = trials.memory_budget(best.concurrency)
        more = "" if budget == MEMORY_BUDGET else f", memory_budget={budget >> 30} << 30"
        note = f"  # each fetch has up to {AT_ONCE} requests in flight" if parts > 1 else ""
        return (
            f"{store}dataset = hr.ObjectDataset({url})\n"
            f"loader = hr.DataLoader(dataset, batch_size={trials.batch_size}, shuffle=True, "
            f"concurrency={concurrency}{more}){note}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All as plain values, for programs."""
        best, bound, listing, search = self.best, self.bound(), self.listing, self.search
        low, high = (None, None) if search is None or best is None else search.range(best.concurrency)
        return {
            "url": self.url,
            "complete": search is not None and search.complete and self.loaded is not None,
            "cores": self.cores,
            "listing": listing
            and {
                "objects": len(listing.dataset),
                "complete": listing.complete,
                "empty": listing.empty,
                "seconds": listing.seconds,
                "mean_read_bytes": listing.mean_size,
                "read_in_parts": listing.in_parts,
            },
            "best": best and {**_plain(best), "lowest_rate": low, "highest_rate": high},
            "latency": [_plain(trial) for trial in (self.unloaded, self.loaded) if trial is not None],
            "settings": [_plain(trial) for trial in self.rows()],
            "trials": [] if search is None else [_plain(trial) for trial in search.trials],
            "limit": bound and dataclasses.asdict(bound),
            "engine_rate": best and engine_rate(best),
            "needs": [dataclasses.asdict(need) for need in self.needs()],
            "constructor": self.constructor() or None,
        }


def median_trial(search: Search, setting: int) -> Trial:
    """The trial of a setting whose rate is the median, or next below it."""
    trials = search.of(setting) or [
        trial for trial in search.trials if trial.concurrency == setting and not trial.failed
    ]
    ordered = sorted(trials, key=lambda trial: trial.rate)
    return ordered[(len(ordered) - 1) // 2]


def hide_secrets(options: Mapping[str, object]) -> dict[str, object]:
    """The options with `…` for values that are credentials."""
    secrets = secrets_in(options)

    def hidden(value: object) -> object:
        if isinstance(value, Mapping):
            return {name: hidden(inner) for name, inner in value.items()}
        return HIDDEN if value in secrets else value

    return {name: hidden(value) for name, value in options.items()}


def _literal(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _plain(trial: Trial) -> dict[str, Any]:
    values = dataclasses.asdict(trial)
    for name in ("whole", "first"):
        values[f"{name}_seconds"] = _named(values.pop(name))
    return {**values, "rate": trial.rate, "bytes_per_second": trial.bandwidth}


def _named(values: Percentiles | None) -> dict[str, float] | None:
    return values and {f"p{part * 100:.0f}": value for part, value in zip(PERCENTILES, values, strict=True)}
