"""The terminal that a program prints to."""

from __future__ import annotations

import os
from typing import TextIO


def columns(stream: TextIO) -> int:
    """The width of a terminal: of ``COLUMNS``, else its own, else 80."""
    try:
        return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # not a terminal, or closed; COLUMNS is no number
        return 80


def is_colored(stream: TextIO) -> bool:
    """Whether colors may be printed: on a terminal, and not with ``NO_COLOR``."""
    return stream.isatty() and not os.environ.get("NO_COLOR")
