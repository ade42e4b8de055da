"""One line on standard error, on a terminal only, that says what a benchmark is doing."""

from __future__ import annotations

import sys
import time

from headrace._core.terminal import columns

__all__ = ["Progress"]

_CLEAR = "\r\033[K"


class Progress:
    """A line that is rewritten; nothing where standard error is not a terminal.

    Args:
        seconds: that the benchmark takes, at most.

    Attributes:
        began: the time at which it began, by `time.perf_counter`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.began = time.perf_counter()
        self._shown = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Rewrite the line."""
        if self._shown:
            passed = time.perf_counter() - self.began
            line = f"headrace bench: {passed:.0f} of at most {self._seconds:.0f} s: {text}"
            sys.stderr.write(f"{_CLEAR}{line[: columns(sys.stderr) - 1]}")
            sys.stderr.flush()

    def close(self) -> None:
        """Erase the line."""
        if self._shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
