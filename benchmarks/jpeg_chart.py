"""The chart of `epoch_of_jpegs.py`, as SVG for light and dark pages, from the JSON of its results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["draw"]

THEMES = {
    "light": {
        "text": "#1f2328",
        "muted": "#59636e",
        "bar": "#afb8c1",
        "ours": "#0969da",
        "line": "#d1d9e0",
    },
    "dark": {
        "text": "#f0f6fc",
        "muted": "#9198a1",
        "bar": "#656c76",
        "ours": "#4493f8",
        "line": "#3d444d",
    },
}
WIDTH, LEFT, RIGHT, ROW, BAR = 760, 262, 84, 26, 14  # pixels
OURS = "headrace"
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Write ``epoch-of-jpegs-light.svg`` and ``epoch-of-jpegs-dark.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme, colors in THEMES.items():
        chart = "\n".join(svg(results, colors)) + "\n"
        (folder / f"epoch-of-jpegs-{theme}.svg").write_text(chart, encoding="utf-8")


def svg(results: Mapping[str, Any], colors: Mapping[str, str]) -> Iterator[str]:
    """The lines of the picture."""
    rates = {
        name: [run["rate"] for run in runs]
        for name, runs in results["runs"].items()
        if runs
    }
    limit = results["limit"]
    given, its = results["conditions"], rates.pop(limit)
    rounds = min(map(len, (its, *rates.values())))
    scale = (WIDTH - LEFT - RIGHT) / max(map(max, (its, *rates.values())))
    shown = {name: shown_as(name, results["best"][name]) for name in rates}
    on_shards = {
        name: reads not in ("", "photos") for name, reads in results["reads"].items()
    }
    rows: list[tuple[str, str, list[float], str]] = []
    for words, sharded in (("one object for each image", False), ("shards", True)):
        members = sorted(rates, key=lambda name: -statistics.median(rates[name]))
        rows.append((words, "group", [], ""))
        rows += [
            (shown[name], "ours" if name.startswith(OURS) else "bar", rates[name], "")
            for name in members
            if on_shards[name] == sharded
        ]
        absent = [name for name in results["absent"] if on_shards[name] == sharded]
        rows += [
            (name, "absent", [], f"not run: {results['absent'][name]}"[:76])
            for name in absent
        ]
    top = 82
    height = top + ROW * len(rows) + 26
    title = f"An epoch of {given['images']:,} JPEGs of {given['bytes_of_an_image'] / 1000:.0f} KB, in images/s"
    notes = [
        f"Median of {rounds} interleaved runs, line from min to max. {given['machine']['cores']} cores, which loaders"
        " and store share.",
        "2 workers decode and augment, where no other number is named.",
        *(
            [f"provisional: {results['provisional']}"]
            if results.get("provisional")
            else []
        ),
    ]
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" font-family="{FONT}" font-size="13">'
    )
    summary = "; ".join(
        f"{shown[name]} {statistics.median(values):,.0f}"
        for name, values in rates.items()
    )
    yield f"<title>{escape(title)}</title><desc>{escape(summary)}</desc>"
    yield text(0, 17, title, colors["text"], size=16, weight=600)
    for number, note in enumerate(notes):
        yield text(0, 36 + 15 * number, note, colors["muted"], size=11.5)
    for number, (name, kind, values, reason) in enumerate(rows):
        y = top + ROW * number
        middle = y + ROW / 2
        if kind == "group":
            yield text(0, middle + 5, name, colors["muted"], weight=600)
            continue
        yield text(
            LEFT - 10,
            middle + 4.5,
            name,
            colors["text"],
            anchor="end",
            weight=600 if kind == "ours" else 400,
        )
        if kind == "absent":
            yield text(LEFT, middle + 4.5, reason, colors["muted"], size=11)
            continue
        median, low, high = statistics.median(values), min(values), max(values)
        yield rectangle(LEFT, middle - BAR / 2, max(median * scale, 1), BAR, colors[kind])
        yield line(
            LEFT + low * scale, middle, LEFT + high * scale, middle, colors["text"], 1.5
        )
        at = LEFT + max(median, high) * scale + 6
        yield text(
            at,
            middle + 4.5,
            f"{median:,.0f}",
            colors["text"],
            weight=600 if kind == "ours" else 400,
        )
    bottom, at = top + ROW * len(rows) + 4, LEFT + statistics.median(its) * scale
    yield line(at, top, at, bottom, colors["muted"], 1.5, dashes="4 3")
    words = f"limit: decoding alone, from memory, {statistics.median(its):,.0f}"
    yield text(at, bottom + 15, words, colors["muted"], anchor="end", size=12)
    yield line(LEFT, top, LEFT, bottom, colors["line"], 1)
    yield "</svg>"


def shown_as(name: str, setting: Mapping[str, Any]) -> str:
    """A loader's name, with its workers where they are not two."""
    workers = f", {setting['num_workers']} workers" if "num_workers" in setting else ""
    threads = (
        f" × {setting['threads']} threads" if workers and "threads" in setting else ""
    )
    return f"{name.removesuffix(', best')}{workers}{threads}"


def text(
    x: float,
    y: float,
    words: str,
    color: str,
    *,
    anchor: str = "start",
    size: float = 13,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-size="{size}"'
        f' font-weight="{weight}">{escape(words)}</text>'
    )


def rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{color}"/>'


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    color: str,
    width: float,
    *,
    dashes: str = "none",
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"'
        f' stroke-dasharray="{dashes}"/>'
    )
