"""Progress of a constructor's work on standard error, as one line that is rewritten on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Self

QUIET = 2.0  # seconds; shorter work shows no progress
TERMINAL_INTERVAL, LOG_INTERVAL = 0.2, 10.0  # seconds between two lines


class Progress:
    """A progress line; a context manager.

    Args:
        doing: the work, e.g. ``"indexing shards"``.
        total: number of items.
        show: whether to show it after the first seconds; None to show it if standard error is a terminal.
    """

    def __init__(self, doing: str, total: int, show: bool | None) -> None:
        self._doing = doing
        self._total = total
        self._terminal = _is_terminal()
        self._show = self._terminal if show is None else show
        self._done = 0
        self._bytes = 0
        self._next = time.monotonic() + QUIET
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown and self._terminal:
            self._write("\n")

    def add(self, *, done: int = 0, size: int = 0) -> None:
        """Record `done` finished items and `size` bytes read."""
        self._done += done
        self._bytes += size
        now = time.monotonic()
        if not self._show or now < self._next:
            return
        self._next = now + (TERMINAL_INTERVAL if self._terminal else LOG_INTERVAL)
        self._shown = True
        line = f"{self._doing}: {self._done} of {self._total}, {self._bytes / 1e6:,.0f} MB read"
        self._write(f"\r{line}" if self._terminal else f"{line}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed or absent
            sys.stderr.write(text)
            sys.stderr.flush()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
