"""The text of `headrace top`: the lines for one job, from the JSON that it sends."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.telemetry.formatting import duration, rate, seconds, share

__all__ = ["LONG_WAIT", "Line", "overview", "view"]

LONG_WAIT = 1.0  # seconds in next() that are worth a color
STAGES = ("stage", "works", "waits", "blocked", "time of a batch")


class Line(NamedTuple):
    """A line of output.

    Attributes:
        text: without control characters.
        style: ``"bold"``, ``"yellow"`` or ``""``.
    """

    text: str
    style: str = ""


def view(snapshot: Mapping[str, Any], command: str, width: int | None) -> list[Line]:
    """All that is known of one job.

    Args:
        snapshot: what the job sent.
        command: its command line.
        width: columns at which lines are wrapped; None for not at all.
    """
    lines = [Line(_headline(snapshot, command), "bold")]
    loaders = snapshot.get("loaders", [])
    if not loaders:
        lines.append(Line("  no loader: all are closed"))
    for loader in loaders:
        lines += _loader(loader)
    return [wrapped for line in lines for wrapped in _wrapped(line, width)]


def overview(jobs: Sequence[tuple[int, str, Mapping[str, Any] | None]], width: int | None) -> list[Line]:
    """One line for each loader of several jobs.

    Args:
        jobs: process id, command line, and what the job sent, if it answered.
        width: columns to which lines are cut; None for not at all.
    """
    rows = [("PID", "loader", "waits", "samples/s", "limit", "state", "command")]
    for pid, command, snapshot in jobs:
        loaders = snapshot.get("loaders", []) if snapshot is not None else []
        for loader in loaders:
            report = loader.get("report") or {}
            limit = str(report.get("limit", ""))
            name = str(loader.get("dataset", "?"))
            row = (str(pid), name, _waits(report), _samples(report), limit, _short_state(loader), command)
            rows.append(row)
        if not loaders:
            answer = "does not answer" if snapshot is None else "no loader"
            rows.append((str(pid), "", "", "", "", answer, command))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines: list[Line] = []
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=False)]
        for column in (0, 2, 3):
            cells[column] = row[column].rjust(widths[column])
        text = _plain("  ".join([*cells, row[-1]])).rstrip()
        lines.append(Line(text if width is None else text[: width - 1], "" if lines else "bold"))
    return lines


def _headline(snapshot: Mapping[str, Any], command: str) -> str:
    rank = next((each for each in snapshot.get("loaders", []) if each.get("world_size", 1) > 1), None)
    of_rank = f", rank {rank['rank']} of {rank['world_size']}" if rank is not None else ""
    version = f"headrace {snapshot.get('headrace', '?')}"
    return _plain(f"process {snapshot.get('pid', '?')}{of_rank}, {version}: {command}".removesuffix(": "))


def _loader(loader: Mapping[str, Any]) -> Iterator[Line]:
    if "error" in loader:
        yield Line(f"  a loader could not be shown: {_plain(str(loader['error']))}", "yellow")
        return
    options = [f"{name}={loader[name]!r}" for name in ("batch_size", "num_workers", "concurrency") if name in loader]
    setup = f"{loader.get('placement', '?')}, {', '.join(options)}"
    yield Line(
        _plain(f"  loader {loader.get('loader')}: {loader.get('dataset')} ({setup}), epoch {loader.get('epoch')}")
    )
    yield Line(f"    {_state(loader)}", "yellow" if _is_waiting(loader) else "")
    counts = f"{loader.get('batches', 0):,} batches, {loader.get('samples', 0):,} samples"
    if loader.get("skipped_samples"):
        counts += f", {loader['skipped_samples']:,} samples skipped"
    waited = f"waiting {share(loader.get('wait_share', 0.0))} of {duration(loader.get('elapsed_seconds', 0.0))}"
    yield Line(f"    {counts}, {waited}")
    report = loader.get("report")
    if not report or not report.get("batches"):
        return
    yield Line("")
    recent = f"the last {report['batches'] + 1:,} batches, {seconds(report['seconds'])}"
    facts = f"{_samples(report)} samples/s"
    if report.get("nbytes"):
        facts += f", {report['nbytes'] / report['seconds'] / 1e6:.3g} MB/s"
    if report.get("concurrency"):
        facts += f", {report['in_flight']:.0f} of {report['concurrency']} fetches in flight"
    yield Line(f"    {recent}: {facts}")
    yield Line(f"    {_plain(str(loader.get('summary', '')))}")
    yield from (Line(f"    {text}") for text in _table(report.get("stages", ())))


def _table(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [STAGES]
    for stage in stages:
        shares = (share(stage[name]) for name in ("worked", "waited", "blocked"))
        rows.append((_plain(str(stage["name"])), *shares, seconds(stage["seconds"])))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(STAGES))]
    return [
        "  ".join(
            cell.rjust(size) if number else cell.ljust(size) for number, (cell, size) in enumerate(cells)
        ).rstrip()
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def _is_waiting(loader: Mapping[str, Any]) -> bool:
    return loader.get("state") in ("next", "ranks") and loader.get("state_seconds", 0.0) >= LONG_WAIT


def _state(loader: Mapping[str, Any]) -> str:
    """What the consumer does now, and for how long."""
    state, lasted, batch = loader.get("state"), loader.get("state_seconds", 0.0), loader.get("batch")
    if state == "over":
        return "no iteration runs"
    where = f", at {loader['line']}" if loader.get("line") else ""
    status = loader.get("batch_status") or ("" if batch is None else f"batch {batch} is next")
    after = f": {status}" if status else ""
    if lasted < LONG_WAIT:
        return _plain(f"runs{after}")
    if state == "ranks":
        return _plain(f"waits for the other ranks (coordinated=True) for {duration(lasted)}{where}")
    if state == "next":
        return _plain(f"waits in next() for {duration(lasted)}{where}{after}")
    return _plain(f"in the loop's own code for {duration(lasted)}{where}{after}")


def _short_state(loader: Mapping[str, Any]) -> str:
    if "error" in loader:
        return "could not be shown"
    lasted = loader.get("state_seconds", 0.0)
    if loader.get("state") == "over":
        return "no iteration runs"
    if lasted < LONG_WAIT:
        return "runs"
    return {"next": "waits", "ranks": "waits for ranks"}.get(loader.get("state", ""), "in its step") + (
        f" for {duration(lasted)}"
    )


def _waits(report: Mapping[str, Any]) -> str:
    return share(report["wait_share"]) if report.get("batches") else ""


def _samples(report: Mapping[str, Any]) -> str:
    return rate(report["samples"] / report["seconds"]) if report.get("seconds") else ""


def _wrapped(line: Line, width: int | None) -> Iterator[Line]:
    if width is None or len(line.text) < width:
        yield line
        return
    indent = " " * (len(line.text) - len(line.text.lstrip()) + 2)
    for text in textwrap.wrap(
        line.text, max(width - 1, 40), subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True
    ):
        yield Line(text, line.style)


def _plain(text: str) -> str:
    """Without characters that a terminal would obey: names of files and datasets are the job's."""
    return "".join(each if each.isprintable() else "?" for each in text)
