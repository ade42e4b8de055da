"""Whatever placement still lives when the interpreter exits is closed then, before the zygote is."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

# Imported for their exit hooks: hooks run in the reverse order of their registration, so ours comes first.


class Closable(Protocol):
    """A placement."""

    def close(self) -> None:
        """End it; any number of times."""


_living: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(placement: Closable) -> None:
    """Have `placement` closed at exit, if it still lives."""
    _living.add(placement)


def _close_all() -> None:
    for placement in list(_living):
        placement.close()


atexit.register(_close_all)
