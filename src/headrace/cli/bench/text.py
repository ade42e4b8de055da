"""The results of a benchmark as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from headrace._core.terminal import columns, is_colored
from headrace.cli.bench.needs import conclusion, engine_rate
from headrace.cli.bench.results import Results
from headrace.cli.bench.trials import Percentiles, Trial
from headrace.telemetry.formatting import seconds as duration
from headrace.telemetry.formatting import share as percent

__all__ = ["size", "throughput", "write_text"]

BOLD, GREEN, PLAIN = "\033[1m", "\033[32m", "\033[0m"
BAR = 16  # columns of the longest bar
FEW = 100  # different reads below which caches of the store may answer
LABEL = 8  # columns before a paragraph


def write_text(results: Results, stream: TextIO) -> None:
    """Print results; wrapped to the width of a terminal, and whole lines elsewhere."""
    width = max(50, columns(stream) - 1) if stream.isatty() else None
    colored = is_colored(stream)
    text = "".join(part.shown(width, colored=colored) for part in _parts(results))
    stream.write(_encodable(text, stream.encoding or "utf-8"))
    stream.flush()


def _encodable(text: str, encoding: str) -> str:
    """The text with `#` for bars and `?` for what else the stream cannot show, such as a console of Windows."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("█", "#").encode(encoding, "replace").decode(encoding)
    return text


class _Paragraph:
    def __init__(self, text: str, label: str = "", *, bold: bool = False) -> None:
        self._label, self._text, self._bold = label, text, bold

    def shown(self, width: int | None, *, colored: bool) -> str:
        label = f"{self._label:<{LABEL}}" if self._label else ""
        lines = [f"{label}{self._text}"]
        if width is not None:
            lines = textwrap.wrap(
                lines[0], width, subsequent_indent=" " * len(label), break_long_words=False, break_on_hyphens=False
            )
        text = "\n".join(lines)
        if colored and self._bold:
            text = f"{BOLD}{text}{PLAIN}"
        return f"{text}\n"


class _Table:
    """Columns, aligned to the right or to the left; bars in the last one have half of the length where they must."""

    def __init__(self, rows: Sequence[Sequence[str]], *, left: frozenset[int] = frozenset(), mark: int = -1) -> None:
        self._rows, self._left, self._mark = rows, left, mark

    def shown(self, width: int | None, *, colored: bool) -> str:
        rows = self._rows
        widths = _widths(rows)
        if width is not None and sum(widths) + 2 * len(widths) - 2 > width:
            rows = [(*row[:-1], row[-1].replace("██", "█")) for row in rows]
            widths = _widths(rows)
        lines = []
        for number, row in enumerate(rows):
            cells = (
                cell.ljust(space) if column in self._left else cell.rjust(space)
                for column, (cell, space) in enumerate(zip(row, widths, strict=False))
            )
            line = "  ".join(cells).rstrip()
            lines.append(f"{GREEN}{line}{PLAIN}" if colored and number == self._mark else line)
        return "".join(f"{line}\n" for line in lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


class _Verbatim:
    def __init__(self, text: str) -> None:
        self._text = text

    def shown(self, width: int | None, *, colored: bool) -> str:
        return textwrap.indent(f"{self._text}\n", "  ")


_Part = _Paragraph | _Table | _Verbatim
_SPACE = _Verbatim("")


def _parts(results: Results) -> Iterator[_Part]:
    yield _Paragraph(_heading(results))
    yield from map(_Paragraph, _remarks(results))
    yield _SPACE
    yield _latencies(results)
    yield _SPACE
    yield _settings(results)
    yield _SPACE
    yield from _conclusions(results)
    if results.constructor():
        yield _SPACE
        yield _Verbatim(results.constructor())
    if results.needs() and results.loaded is not None:
        yield _SPACE
        yield from _host(results)


def _heading(results: Results) -> str:
    listing = results.listing
    assert listing is not None
    number = len(listing.dataset)
    count = f"{number:,} object{'s' * (number > 1)}"
    if not listing.complete:
        count = f"the first {count}"
    reads = f" of {size(listing.mean_size)} on average"
    if listing.in_parts:
        large = "" if listing.in_parts == number else f"{listing.in_parts:,} of them "
        reads = f", {large}above 16 MiB, read in ranges of 8 MiB"
    return f"{results.url}: {count}{reads}; listed in {duration(listing.seconds)}"


def _remarks(results: Results) -> Iterator[str]:
    listing, search = results.listing, results.search
    assert listing is not None
    if listing.empty:
        yield f"{listing.empty:,} empty objects are left out."
    if len(listing.ranges) < FEW:
        yield f"Only {len(listing.ranges)} different reads: caches of the store may make it look faster than it is."
    if results.loaded is None:
        yield "Interrupted: these are the results so far."
    elif search is not None and not search.complete:
        yield "The time did not suffice for the whole search: a larger --seconds gives a better result."
    failed = next((trial for trial in search.trials if trial.failed), None) if search is not None else None
    if failed is not None:
        yield f"With {failed.concurrency:,} in flight: {failed.failed}"


def _latencies(results: Results) -> _Table:
    trials = [trial for trial in (results.unloaded, results.loaded) if trial is not None]
    if len(trials) == 2 and trials[0].concurrency == trials[1].concurrency:
        del trials[1]
    found = [("first byte", trial, trial.first) for trial in trials]
    found += [(f"whole {results.unit.removesuffix('s')}", trial, trial.whole) for trial in trials]
    rows = [("latency", "in flight", "p50", "p90", "p99")]
    rows += [(name, f"{trial.concurrency:,}", *_three(values)) for name, trial, values in found if values is not None]
    return _Table(rows, left=frozenset({0}))


def _three(values: Percentiles) -> tuple[str, str, str]:
    low, middle, high = map(duration, values)
    return low, middle, high


def _settings(results: Results) -> _Table:
    rows = results.rows()
    best = results.best
    assert best is not None
    top = max(trial.rate for trial in rows)
    lines: list[tuple[str, ...]] = [("in flight", f"{results.unit}/s", "MB/s", "p50", "p99", "throttled", "trials", "")]
    for trial in rows:
        bar = "█" * round(BAR * trial.rate / top) if top else ""
        count = results.search.count(trial.concurrency) if results.search is not None else 1
        lines.append((*_row(trial), str(count), bar + (" best" if trial is best else "")))
    if not any(trial.throttled for trial in rows):
        lines = [(*line[:5], *line[6:]) for line in lines]
    return _Table(lines, left=frozenset({len(lines[0]) - 1}), mark=1 + rows.index(best))


def _row(trial: Trial) -> tuple[str, ...]:
    p50, _, p99 = _three(trial.whole) if trial.whole else ("", "", "")
    rates = f"{trial.concurrency:,}", f"{trial.rate:,.0f}", _number(trial.bandwidth / 1e6)
    return *rates, p50, p99, percent(trial.throttled_share)


def _conclusions(results: Results) -> Iterator[_Part]:
    best, bound, search = results.best, results.bound(), results.search
    assert best is not None
    assert bound is not None
    assert search is not None
    trials = len(search.of(best.concurrency))
    low, high = search.range(best.concurrency)
    spread = f" ({trials} trials: {low:,.0f} to {high:,.0f})" if trials > 1 else " (one trial)"
    yield _Paragraph(
        f"{best.concurrency:,} in flight: {best.rate:,.0f} {results.unit}/s, {throughput(best.bandwidth)}{spread}",
        "best",
        bold=True,
    )
    yield _Paragraph(f"{_BOUNDS[bound.name]}: {bound.evidence}", "limit")
    yield _Paragraph(bound.advice, "remedy")
    if (rate := engine_rate(best)) is not None:
        yield _Paragraph(
            f"only one was tried. Its event loop computed {duration(best.loop / best.rate)} for each: at most "
            f"{float(f'{rate:.2g}'):,.0f} {results.unit}/s of an engine",
            "engines",
        )


_BOUNDS = {
    "throttling": "the store's rate limit",
    "in-flight": "latency",
    "cpu": "the CPU of this machine",
    "bandwidth": "bandwidth",
    "requests": "requests",
    "unknown": "not known",
}


def _host(results: Results) -> Iterator[_Part]:
    yours = results.samples_per_gpu is not None
    plural = "s" * (results.gpus > 1)
    who = f"A host with {results.gpus} GPU{plural}"
    if not yours:
        who += " (H100, MLPerf Storage)"
    yield _Paragraph(f"{who} needs, in {results.unit} as these:")
    rows = [("", "GB/s", "this store gave", "in flight", "cores", "engines")]
    rows += [
        (
            need.demand.name,
            _number(need.demand.nbytes / 1e9),
            _share(need.share),
            f"{need.in_flight:,}",
            f"{need.cores:,.1f}",
            f"{need.engines:,}",
        )
        for need in results.needs()
    ]
    yield _Table(rows, left=frozenset({0}))
    bound = results.bound()
    if bound is not None and any(need.share < 1 for need in results.needs()):
        yield _Paragraph(conclusion(bound))


def _share(share: float) -> str:
    if share < 0.01:
        return "< 1 %"
    return percent(share) if share < 10 else f"{share:,.0f} times"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} GB"


def throughput(rate: float) -> str:
    """Bytes a second in decimal units."""
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{_number(rate / 1e6)} MB/s"
