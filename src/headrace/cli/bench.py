"""`headrace bench URL`: the rate that a store gives this machine by the number of fetches in flight."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import RandomSampler

from headrace._core.cgroup import CgroupLimits, available_memory
from headrace._core.look_ahead import MOST_CONCURRENCY, most_concurrency
from headrace._core.store.redaction import redact_url
from headrace._core.store.store import Store
from headrace._core.streams.blocking import background_loop
from headrace._core.text import rate as number
from headrace._core.text import seconds as duration
from headrace._core.text import share
from headrace.datasets.objects import ObjectDataset
from headrace.errors import EmptyListingError, HeadraceError, MissingExtraError
from headrace.loader import DataLoader
from headrace.options import MEMORY_BUDGET

__all__ = ["Trial", "choose", "run", "sweep"]

FIRST = 4  # fetches in flight of the first trial
GAIN = 1.1  # of the rate by a doubling; below it twice, the end of growth is found
CLEAR = 0.75  # of the growth of the fetches in flight: that of the rate from which four times as many are next
THROTTLED = 0.1  # share of throttled requests from which no more are tried, unless the rate has grown
STEP = 2**0.25  # between the settings that are tried around the best one
CLOSE = 0.97  # of the highest rate, which is the best setting's if it is the smallest
TRIALS = 8  # of a setting, at most
BATCH, BATCH_BYTES = 64, 64 << 20  # objects of a batch, and the bytes at which fewer suffice
BATCHES = 8  # of a trial, at least
LONGEST = 4.0  # times the seconds of a trial that a slow store is given
LOOP_BUSY = 0.85  # CPU seconds a second of the event loop's thread, from which it is the limit


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement, of a loader that runs steadily."""

    concurrency: int  # fetches in flight
    rate: float  # objects a second
    bandwidth: float = 0.0  # bytes a second
    fetch_seconds: tuple[float, ...] = ()  # the 50th, 90th and 99th percentile of a fetch's duration
    throttled: float = 0.0  # share of the requests that the store refused, or did not answer in time
    event_loop: float = 0.0  # CPU seconds a second of the event loop's thread


def run(arguments: argparse.Namespace, began: float) -> bool:
    """Measure, and print the results; those so far when it is interrupted."""
    _Bench(arguments, began).run()
    return True


class _Bench:
    """A sweep over the objects under a URL."""

    def __init__(self, arguments: argparse.Namespace, began: float) -> None:
        plot: Path | None = arguments.plot
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise MissingExtraError(what="--plot", package="matplotlib", extra="plot")
        if plot is not None and (plot.suffix.lower() not in (".png", ".svg", ".pdf") or not plot.parent.is_dir()):
            raise ValueError(f"--plot {plot}: give a file .png, .svg or .pdf in an existing folder")
        self._arguments, self._plot, self._until = arguments, plot, began + arguments.seconds
        self._store = Store(arguments.url, options=arguments.store_options)
        _ = self._store.backend()  # opens it, which requests nothing
        self._trials: list[Trial] = []
        self._complete = False

    def run(self) -> None:
        _say("listing")
        table = background_loop().run(_list(self._store, self._arguments.objects))
        if not table["key"]:
            raise EmptyListingError("no object that is not empty was listed", url=redact_url(self._store.url))
        self._dataset = ObjectDataset.from_table(self._store, table, size="size", etag="etag")
        self._mean = statistics.fmean(table["size"])
        self._batch_size = max(1, min(BATCH, int(BATCH_BYTES / self._mean)))
        memory = min(available_memory(), CgroupLimits.here().memory_left)
        most = self._arguments.max_concurrency or most_concurrency()
        chosen = self._arguments.max_concurrency or most == MOST_CONCURRENCY
        bound = "--max-concurrency" if chosen else "ulimit -n (descriptors)"
        limits = {bound: most, "memory": memory / 4 / self._mean}
        self._bound = min(limits, key=limits.__getitem__)
        self._most = max(1, int(limits[self._bound]))
        try:
            for trial in sweep(self._measure, self._most, lambda: self._until - time.perf_counter()):
                self._trials.append(trial)
                _say(f"{trial.concurrency:,} in flight: {number(trial.rate)} objects/s")
            self._complete = True
        except HeadraceError as error:
            if not self._trials:
                raise
            _say(f"stopped: {error}\n")  # more in flight than the store serves; the trials before it count
        finally:
            _say("")
            if self._trials:
                self._print()

    def _budget(self, concurrency: int) -> int:
        """The loader's `memory_budget` that so many fetches in flight need; the default if that suffices."""
        needed = 1.5 * (concurrency + 6 * self._batch_size) * self._mean
        return MEMORY_BUDGET if needed <= MEMORY_BUDGET else math.ceil(needed / 2**30) << 30

    def _measure(self, concurrency: int, seconds: float) -> Trial:
        """Load until twice as many objects as are in flight have come, and then measure."""
        clock, began = time.perf_counter, time.perf_counter()
        # So many batches in a trial's time, and of a slow store too.
        expected = max((trial.rate for trial in self._trials), default=FIRST / seconds)
        batch_size = max(1, min(self._batch_size, int(expected * seconds / BATCHES)))
        loader: DataLoader[int] = DataLoader(
            self._dataset,
            batch_size=batch_size,
            sampler=RandomSampler(self._dataset, replacement=True, num_samples=1 << 40),
            collate_fn=lambda samples: sum(len(sample.data) for sample in samples),
            concurrency=concurrency,
            memory_budget=self._budget(concurrency),
            timeout=max(LONGEST * seconds, self._until - began),
        )
        least = max(3 * concurrency, BATCHES * batch_size)
        start = count = total = 0.0
        with loader:
            for nbytes in loader:
                now, count, total = clock(), count + batch_size, total + nbytes
                if not start:
                    if count >= 2 * concurrency or now - began > LONGEST * seconds:
                        start, count, total = now, 0, 0
                elif (now - start >= seconds and count >= least) or now - start > LONGEST * seconds:
                    break
            report = loader.report()
        requests = report.requests
        return Trial(
            concurrency,
            count / (now - start),
            total / (now - start),
            report.fetch_seconds,
            (requests.throttled + requests.timed_out) / max(1, requests.requests),
            report.engine_cpu,
        )

    def _print(self) -> None:
        best, ordered = choose(self._trials), sorted(self._trials, key=lambda trial: trial.rate)
        settings = sorted({trial.concurrency for trial in ordered})
        groups = {each: [trial for trial in ordered if trial.concurrency == each] for each in settings}
        rows = []
        for group in groups.values():
            rate = statistics.median(trial.rate for trial in group)
            bandwidth = statistics.median(trial.bandwidth for trial in group)
            middle = group[len(group) // 2]
            rows.append(dataclasses.replace(middle, rate=rate, bandwidth=bandwidth))
        found = next(row for row in rows if row.concurrency == best)
        limit = _limit(found, self._trials, self._bound if settings[-1] == self._most else "the end (--seconds)")
        slowest, fastest = groups[best][0].rate, groups[best][-1].rate
        if self._arguments.json:
            result: dict[str, Any] = {
                "url": redact_url(self._store.url),
                "complete": self._complete,
                "objects": len(self._dataset),
                "mean_bytes": self._mean,
                "best": {**dataclasses.asdict(found), "lowest_rate": slowest, "highest_rate": fastest},
                "limit": limit,
                "settings": [dataclasses.asdict(row) for row in rows],
                "trials": [dataclasses.asdict(trial) for trial in self._trials],
                "constructor": self._constructor(best),
            }
            print(json.dumps(result, indent=2, ensure_ascii=False))
        else:
            head = ("in flight", "objects/s", "MB/s", "p50", "p99", "throttled", "trials")
            print(f"{redact_url(self._store.url)}: {len(self._dataset):,} objects of {_size(self._mean)} on average\n")
            table = [head, *(_cells(row, len(groups[row.concurrency])) for row in rows)]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for cells in table:
                mark = "  best" if cells[0] == f"{best:,}" else ""
                print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + mark)
            print(f"\nbest   {best:,} in flight: {number(found.rate)} objects/s, {_size(found.bandwidth)}/s")
            print(f"       ({len(groups[best])} trials: {number(slowest)} to {number(fastest)})")
            print(f"limit  {limit}\n\n{self._constructor(best)}")
        if self._plot is not None:
            _write_plot(self._plot, redact_url(self._store.url), self._trials, rows, found)

    def _constructor(self, concurrency: int) -> str:
        """The program that loads with a setting; values of the store's options may be secrets, and are left out."""
        url = json.dumps(redact_url(self._store.url), ensure_ascii=False)
        if self._arguments.store_options:
            options = ", ".join(f"{json.dumps(name)}: ..." for name in self._arguments.store_options)
            url = f"hr.Store({url}, options={{{options}}})"
        budget = self._budget(concurrency)
        more = "" if budget == MEMORY_BUDGET else f", memory_budget={budget >> 30} << 30"
        return (
            f"dataset = hr.ObjectDataset({url})\n"
            f"loader = hr.DataLoader(dataset, batch_size={self._batch_size}, shuffle=True, "
            f"concurrency={concurrency}{more})"
        )


async def _list(store: Store, most: int) -> dict[str, list[Any]]:
    """Keys, sizes and entity tags of the first objects that are not empty."""
    found: list[Any] = []
    pages = store.pages()
    try:
        async for page in pages:
            found += [entry for entry in page if entry["size"] > 0][: most - len(found)]
            if len(found) == most:
                break
    finally:
        await pages.aclose()
    return {"key": [e["path"] for e in found], "size": [e["size"] for e in found], "etag": [e["e_tag"] for e in found]}


def sweep(measure: Callable[[int, float], Trial], most: int, seconds_left: Callable[[], float]) -> Iterator[Trial]:
    """Double the fetches in flight until the rate no longer grows, then repeat settings around the best one in turn."""
    total = seconds_left()
    seconds = min(1.0, total / 40)  # of a trial
    trials: list[Trial] = []
    setting, stalled, top, factor = min(FIRST, most), 0, 0.0, 4
    while seconds_left() > (total / 2 if stalled else total / 5):
        trials.append(trial := measure(setting, seconds))
        yield trial
        grew, factor = trial.rate >= GAIN * top, 4 if trial.rate >= CLEAR * factor * top else 2
        stalled, top = 0 if grew else stalled + 1, max(top, trial.rate)
        if stalled == 2 or setting == most or (trial.throttled > THROTTLED and not grew):
            break
        setting = min(most, factor * setting)
    while seconds_left() > 2 * seconds:
        best = choose(trials)
        around = {best} | {round(STEP ** (round(math.log(best, STEP)) + step)) for step in range(-3, 4)}
        counts = {each: sum(t.concurrency == each for t in trials) for each in around if 1 <= each <= most}
        setting = min(counts, key=lambda each: (counts[each], abs(math.log(each / best))))
        if counts[setting] >= TRIALS:
            return
        trials.append(trial := measure(setting, seconds))
        yield trial


def choose(trials: Sequence[Trial]) -> int:
    """The smallest setting whose median rate is close to the highest; that of a single trial may be a lucky one."""
    rates: dict[int, list[float]] = defaultdict(list)
    for trial in trials:
        rates[trial.concurrency].append(trial.rate)
    medians = {each: statistics.median(found) / (GAIN if len(found) == 1 else 1) for each, found in rates.items()}
    return min(setting for setting, rate in medians.items() if rate >= CLOSE * max(medians.values()))


def _limit(best: Trial, trials: Sequence[Trial], bound: str) -> str:
    """What bounds the rate, and what would raise it; `bound` is what bounds the fetches in flight."""
    throttled = max(trial.throttled for trial in trials if trial.concurrency >= best.concurrency)
    if throttled > 0.02:
        return f"throttling: the store refuses up to {share(throttled)} of the requests. Fewer, larger objects help"
    if best.event_loop > LOOP_BUSY:
        return f"the event loop, busy {share(best.event_loop)} of the time: engines=2, or larger objects (shards)"
    lower = max((t.rate for t in trials if t.concurrency <= best.concurrency / 1.9), default=0.0)
    if best.concurrency > max(t.concurrency for t in trials) / 1.5 and best.rate > 1.2 * lower:
        return f"latency: the rate still grew, and {bound} allowed no more in flight"
    return "the store or the network: more in flight only wait longer"


def _cells(trial: Trial, count: int) -> tuple[str, ...]:
    p50, _, p99 = trial.fetch_seconds or (0.0, 0.0, 0.0)
    rates = f"{trial.concurrency:,}", number(trial.rate), number(trial.bandwidth / 1e6)
    return *rates, duration(p50), duration(p99), share(trial.throttled), str(count)


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} GB"


def _say(text: str) -> None:
    """Rewrite the line on standard error that says what is done, where that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text and 'headrace bench: '}{text}", end="", file=sys.stderr, flush=True)


def _write_plot(file: Path, url: str, trials: Sequence[Trial], rows: Sequence[Trial], best: Trial) -> None:
    """Plot throughput and latency by fetches in flight."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    rates, latencies = figure.subplots(2, 1, sharex=True)
    settings = [row.concurrency for row in rows]
    rates.plot([trial.concurrency for trial in trials], [trial.rate for trial in trials], ".", label="each trial")
    rates.plot(settings, [row.rate for row in rows], "-o", ms=4, label="median")
    label = f"best: {best.concurrency:,} in flight, {number(best.rate)}/s, {_size(best.bandwidth)}/s"
    rates.plot([best.concurrency], [best.rate], "o", ms=8, label=label)
    rates.set_ylim(0)
    rates.set_ylabel("objects/s")
    for part, name in enumerate(("p50", "p90", "p99")):
        timed = [row for row in rows if row.fetch_seconds]
        values = [1000 * row.fetch_seconds[part] for row in timed]
        latencies.plot([row.concurrency for row in timed], values, "-o", ms=4, label=name)
    latencies.set_yscale("log")
    latencies.set_ylabel("ms for an object")
    latencies.set_xlabel("fetches in flight")
    latencies.set_xscale("log", base=2)
    for axes in (rates, latencies):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.suptitle(url if len(url) <= 70 else f"…{url[-69:]}", fontsize=11)
    figure.savefig(file, dpi=130)
