"""Displays of one line that changes: in a terminal, in a file or pipe, and in a notebook."""

from __future__ import annotations

import functools
import html
import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TextIO

from headrace._core.terminal import columns, is_colored

__all__ = [
    "Display",
    "Field",
    "NotebookDisplay",
    "PlainDisplay",
    "TerminalDisplay",
    "Tone",
    "choose_display",
    "fitting",
]

Tone = Literal["plain", "dim", "good", "fair", "bad"]

_CODES: dict[Tone, str] = {"plain": "", "dim": "2", "good": "32", "fair": "33", "bad": "31"}
_COLORS: dict[Tone, str] = {
    "plain": "",
    "dim": "opacity:.6",
    "good": "color:#2a8c4a",
    "fair": "color:#b07a00",
    "bad": "color:#d0362f",
}
_ERASE = "\r\x1b[2K"


class Field(NamedTuple):
    """A part of the line.

    Attributes:
        text: the text.
        rank: fields of higher rank are left out first where the line is too long.
        tone: how it is shown.
    """

    text: str
    rank: int = 0
    tone: Tone = "plain"


class Display(Protocol):
    """Shows a line.

    Attributes:
        interval: seconds between two lines.
    """

    interval: float

    def show(self, fields: Sequence[Field]) -> None:
        """Show the line in place of the one before."""

    def end(self, fields: Sequence[Field]) -> None:
        """Show the last line, and leave it there."""


def choose_display(file: TextIO | None) -> Display | None:
    """The display that fits a file, by default the notebook or standard error; None for a program without these."""
    if file is None:
        if _in_notebook():
            return NotebookDisplay()
        file = sys.stderr
        if file is None:
            return None
    terminal = file.isatty() and os.environ.get("TERM") != "dumb"
    return TerminalDisplay(file) if terminal else PlainDisplay(file)


def fitting(fields: Sequence[Field], width: int, gap: int) -> list[Field]:
    """The fields that fit into a width, with `gap` columns between them."""
    kept = list(fields)
    while len(kept) > 1 and sum(len(field.text) + gap for field in kept) - gap > width:
        kept.remove(max(reversed(kept), key=lambda field: field.rank))
    return kept


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class PlainDisplay:
    """One line after the other, of text only.

    Args:
        file: where they are written.
    """

    interval = 30.0

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def show(self, fields: Sequence[Field]) -> None:
        """Write a line."""
        self._file.write(_encodable(", ".join(field.text for field in fields), self._file) + "\n")
        self._file.flush()

    end = show


class TerminalDisplay:
    """The last row of a terminal. What the program prints meanwhile appears above it.

    Writes to standard output and standard error, of log handlers too, pass through a method of this while it is open.

    Args:
        file: the terminal.
    """

    interval = 0.5

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._color = is_colored(file)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._line = ""  # as it is on the terminal; empty if it is not there
        self._fields: Sequence[Field] = ()
        self._mid_row = False  # the program has written a part of a row
        self._open = True
        self._write = file.write
        self._hooks: list[tuple[Any, Any, Any]] = []
        for stream in {id(each): each for each in (file, sys.stdout, sys.stderr)}.values():
            if stream is not None and stream.isatty():
                self._hook(stream)

    def _hook(self, stream: TextIO) -> None:
        before = vars(stream).get("write") if hasattr(stream, "__dict__") else None
        hook = functools.partial(self._on_write, stream, stream.write)
        try:
            stream.write = hook  # type: ignore[method-assign]
        except AttributeError:  # a stream without attributes: what it writes may be in one row with the line
            return
        self._hooks.append((stream, hook, before))

    def _on_write(self, stream: TextIO, write: Callable[[str], int], text: str) -> int:
        if not self._open or os.getpid() != self._process or not text:
            return write(text)
        with self._lock:
            self._erase()
            written = write(text)
            self._mid_row = not text.endswith("\n")
            if not self._mid_row:
                stream.flush()
                self._draw()
        return written

    def show(self, fields: Sequence[Field]) -> None:
        """Draw the line, unless the program has just written a part of a row."""
        if not self._lock.acquire(blocking=False):  # it is writing
            return
        try:
            self._fields = fields
            if self._open and not self._mid_row:
                self._draw()
        finally:
            self._lock.release()

    def end(self, fields: Sequence[Field]) -> None:
        """Draw the line a last time, and go to the next row."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._open:
                return
            if self._mid_row:
                self._write("\n")
            self._fields = fields
            self._draw()
            self._write("\n")
            self._file.flush()
            self._open = False
        for stream, hook, before in self._hooks:
            if vars(stream).get("write") is not hook:  # another has been put before it, and calls it
                continue
            if before is None:
                del stream.write
            else:
                stream.write = before

    def _erase(self) -> None:
        if self._line:
            self._line = ""
            self._write(_ERASE)
            self._file.flush()

    def _draw(self) -> None:
        fields = fitting(self._fields, columns(self._file) - 1, gap=2)
        line = _encodable("  ".join(map(self._styled, fields)), self._file)
        if line and line != self._line:
            self._write((_ERASE if self._line else "") + line)
            self._file.flush()
            self._line = line

    def _styled(self, field: Field) -> str:
        code = _CODES[field.tone] if self._color else ""
        return f"\x1b[{code}m{field.text}\x1b[0m" if code else field.text


def _encodable(text: str, file: TextIO) -> str:
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


class NotebookDisplay:
    """A line in the output of a notebook's cell."""

    interval = 0.5

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, fields: Sequence[Field]) -> None:
        """Display the line, or change it."""
        shown = "&ensp;&ensp;".join(
            f'<span style="{_COLORS[field.tone]}">{html.escape(field.text)}</span>' for field in fields
        )
        style = "font-family:var(--jp-code-font-family,monospace);font-size:13px"
        bundle = {
            "text/plain": "  ".join(field.text for field in fields),
            "text/html": f'<div style="{style}">{shown}</div>',
        }
        if self._handle is None:
            ipython: Any = importlib.import_module("IPython.display")  # in a notebook it is there
            self._handle = ipython.display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    end = show
