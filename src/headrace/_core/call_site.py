"""The line of the program that called headrace, for warnings."""

from __future__ import annotations

import sys


def users_stacklevel() -> int:
    """The `stacklevel` with which the calling function's `warnings.warn` names the first line outside of headrace."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "headrace":
        level, frame = level + 1, frame.f_back
    return level
