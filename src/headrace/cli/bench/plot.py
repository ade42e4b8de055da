"""The plot of a benchmark: throughput and latency by the number of fetches in flight."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.cli.bench.results import Results
from headrace.cli.bench.text import size, throughput
from headrace.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "write_plot"]

BLUE, ORANGE, GREY = "#1f5fa8", "#d2691e", "#8a8a8a"
SHADES = ("#1f5fa8", "#6fa0d4", "#b3cdea")  # p50, p90, p99


def check_plot(file: Path) -> None:
    """Check before the measurement what would fail after it.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: the file is not one that a plot can be written to.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(what="--plot", package="matplotlib", extra="plot")
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {file}: the name has to end in .png, .svg or .pdf")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--plot {file}: there is no such folder")


def write_plot(results: Results, file: Path) -> None:
    """Write the plot; raises `OSError`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, best = results.rows(), results.best
    if best is None or results.listing is None:
        return
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    rates, latencies = figure.subplots(2, 1, sharex=True)
    _plot_rates(rates, results)
    _plot_latencies(latencies, results)
    latencies.set_xlabel("fetches in flight")
    latencies.set_xscale("log", base=2)
    settings = [trial.concurrency for trial in rows]
    ticks = [2**power for power in range(12) if settings[0] / 1.5 <= 2**power <= settings[-1] * 1.5]
    latencies.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    latencies.minorticks_off()
    url = results.url if len(results.url) <= 70 else f"…{results.url[-69:]}"
    figure.suptitle(
        f"{url}\n{len(results.listing.dataset):,} objects, reads of {size(results.listing.mean_size)}", fontsize=11
    )
    figure.savefig(file, dpi=130)


def _plot_rates(axes: Axes, results: Results) -> None:
    rows, best, search = results.rows(), results.best, results.search
    assert best is not None
    assert search is not None
    settings = [trial.concurrency for trial in rows]
    rates = [trial.rate for trial in rows]
    top = max(rates)
    if results.unloaded is not None and results.unloaded.whole is not None:
        latency = results.unloaded.whole[0]
        dense = np.geomspace(settings[0], settings[-1], 200)
        label = f"in flight ÷ {latency * 1000:.3g} ms"
        axes.plot(dense, dense / latency, "--", color=GREY, lw=1, label=label)
    everything = [trial for trial in search.trials if not trial.failed]
    axes.plot(
        [trial.concurrency for trial in everything],
        [trial.rate for trial in everything],
        ".",
        color=SHADES[1],
        ms=5,
        label="each trial",
    )
    axes.plot(settings, rates, "-o", color=BLUE, ms=4, label="median")
    low, high = search.range(best.concurrency)
    axes.errorbar(
        [best.concurrency],
        [best.rate],
        [[best.rate - low], [high - best.rate]],
        fmt="o",
        color=ORANGE,
        ms=8,
        capsize=4,
        zorder=5,
        label=f"best: {best.concurrency:,} in flight, {best.rate:,.0f}/s, {throughput(best.bandwidth)}",
    )
    axes.set_ylim(0, 1.25 * top)
    axes.set_ylabel(f"{results.unit}/s")
    scale = best.bandwidth / best.rate / 1e6
    to_megabytes, to_rate = functools.partial(np.multiply, scale), functools.partial(np.multiply, 1 / scale)
    megabytes = axes.secondary_yaxis("right", functions=(to_megabytes, to_rate))
    megabytes.set_ylabel("MB/s")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)


def _plot_latencies(axes: Axes, results: Results) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = [trial for trial in results.rows() if trial.whole is not None]
    best = results.best
    assert best is not None
    settings = [trial.concurrency for trial in rows]
    for number, name, shade in reversed([*zip(range(3), ("p50", "p90", "p99"), SHADES, strict=True)]):
        values = [1000 * trial.whole[number] for trial in rows if trial.whole is not None]
        axes.plot(settings, values, "-o", color=shade, ms=4, label=name)
    axes.axvline(best.concurrency, color=ORANGE, lw=1)
    axes.set_yscale("log")
    axes.set_ylabel(f"ms for a whole {results.unit.removesuffix('s')}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="upper left", fontsize=9)
