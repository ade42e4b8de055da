"""A contestant: a loader, its settings, and the rate of one epoch, in which every object is checked.

`peers.py` has them all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from contents import check_order, check_set
from harness import is_installed
from store import Store

__all__ = ["BATCH", "Batches", "Epoch", "Family", "Setting", "rate"]

BATCH = 64

Batches = Iterable[Sequence[int]]
Epoch = Callable[[], Batches]
"""Starts an epoch; it may be called again, and keeps warm what the loader keeps between epochs."""


@dataclass(frozen=True)
class Setting:
    """Settings of a loader.

    Attributes:
        in_flight: concurrent GETs in all; 0 if the loader decides.
        workers: processes.
        variant: other settings, in words.
    """

    in_flight: int
    workers: int = 0
    variant: str = ""

    def __str__(self) -> str:
        parts = [f"{self.in_flight} in flight" if self.in_flight else "", self.variant]
        if self.workers:
            parts.insert(
                0, f"{self.workers} {'worker' if self.workers == 1 else 'workers'}"
            )
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Family:
    """A loader and the settings to try.

    Attributes:
        open: context manager that gives a function that starts an epoch of that many objects.
        settings: the first is used at equal concurrency if it has 64 in flight; the best is
            searched among all.
        package: required distribution, or "".
        in_order: whether samples are delivered in the requested order.
    """

    open: Callable[[Store, Setting, int], contextlib.AbstractContextManager[Epoch]]
    settings: Sequence[Setting]
    package: str = ""
    in_order: bool = True

    @property
    def is_there(self) -> bool:
        """Whether it is installed."""
        return not self.package or is_installed(self.package)


def rate(store: Store, family: Family, epoch: Epoch, count: int) -> float:
    """Objects a second of one epoch, from `iter()` to its last batch.

    Raises:
        RuntimeError: an object is missing, or was not read from the store; the run does not count.
    """
    gets = store.gets()
    began = time.perf_counter()
    batches = list(epoch())
    elapsed = time.perf_counter() - began
    (check_order if family.in_order else check_set)(batches, count)
    if (made := store.gets() - gets) < count:
        raise RuntimeError(
            f"{made} GETs were made for {count} objects, the rest was cached: this run does not count"
        )
    return count / elapsed
