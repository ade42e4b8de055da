"""Close the remaining placements when the interpreter exits, before the zygote."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

# Imported for their exit hooks: hooks run in the reverse order of their registration, so ours comes first.


class Closable(Protocol):
    def close(self) -> None:
        """End it; idempotent."""


_living: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(placement: Closable) -> None:
    """Close `placement` at exit, if it still exists."""
    _living.add(placement)


def _close_all() -> None:
    for placement in list(_living):
        placement.close()


atexit.register(_close_all)
