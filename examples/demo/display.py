"""Terminal output: plain lines, and a live line if standard output is a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

__all__ = ["Display", "Live"]

LABEL_WIDTH = 10
BAR_WIDTH = 24
LIVE_INTERVAL = 0.1  # s between two updates of the live line


class Live(Protocol):
    """Shows progress."""

    def update(self, done: int, text: str) -> None:
        """Show how many of the total are done, followed by a text."""


class Display:
    """Writes to standard output: with a live line and colours on a terminal, in plain lines elsewhere.

    Args:
        console: where to write; by default standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)

    def title(self, name: str, what: str) -> None:
        """Print the first line."""
        self._print(Text.assemble("\n", (name, "bold cyan"), "  ", what, "\n"))

    def fact(self, label: str, text: str) -> None:
        """Print a line with a label."""
        self._print(Text.assemble("  ", (label.ljust(LABEL_WIDTH), "dim"), text))

    def heading(self, text: str) -> None:
        """Print a heading."""
        self._print(Text.assemble("\n  ", (text, "dim")))

    def line(self, text: str) -> None:
        """Print a line of results."""
        self._print(Text("  " + text))

    def remark(self, text: str) -> None:
        """Print an explanation of results."""
        self._print(Text.assemble("  ", (text, "dim")))

    def closing(self, text: str, *, good: bool = True) -> None:
        """Print the last line."""
        self._print(Text.assemble("\n", (text, "green" if good else "bold red"), "\n"))

    @contextlib.contextmanager
    def live(self, label: str, total: int, unit: str) -> Iterator[Live]:
        """Show progress on a terminal during the block; a log has the results alone.

        Args:
            label: name of the activity.
            total: number of units to complete.
            unit: name of the unit.
        """
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(BAR_WIDTH, complete_style="cyan", finished_style="cyan"),
            TextColumn(
                "{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}  {task.fields[text]}"
            ),
        )
        # Drawn on updates: a thread that redraws would compete with the training loop.
        # Not by `is_terminal`, which FORCE_COLOR makes True for a file too.
        with Progress(
            *columns,
            console=self._console,
            transient=True,
            auto_refresh=False,
            disable=not self._console.file.isatty(),
        ) as progress:
            task = progress.add_task(label, total=total, unit=unit, text="")
            progress.refresh()
            yield _Line(progress, task)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is text, the others are numbers, the last row is emphasised."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for number, column in enumerate(columns):
            table.add_column(
                column, justify="left" if number == 0 else "right", no_wrap=True
            )
        for row in rows:
            table.add_row(*row, style="bold green" if row is rows[-1] else None)
        self._console.print(
            Padding(table, (0, 0, 0, 2)), crop=False, overflow="ignore", no_wrap=True
        )

    def _print(self, text: Text) -> None:
        # A terminal wraps long lines itself, and a log should not be wrapped.
        self._console.print(text, soft_wrap=True)


class _Line:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._drawn = 0.0

    def update(self, done: int, text: str) -> None:
        self._progress.update(self._task, completed=done, text=text)
        now = time.monotonic()
        if now - self._drawn >= LIVE_INTERVAL:
            self._drawn = now
            self._progress.refresh()
