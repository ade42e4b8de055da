"""Iterators over the draws of a sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class SamplerOf(Iterable[Any]):
    """An iterator that a BatchSampler takes for a sampler."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


class WatchedDraws(Iterator[object]):
    """Calls functions before and after the first draw."""

    def __init__(self, draws: Iterator[object], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._draws = draws
        self._before, self._after = before, after
        self._begun = False

    def __next__(self) -> object:
        if self._begun:
            return next(self._draws)
        self._begun = True
        self._before()
        drawn = next(self._draws)
        self._after()
        return drawn
