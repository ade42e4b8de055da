"""The batches that remain of an order, where later ones were delivered out of turn before the resume point."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from headrace._core.consumer.loader_state import LoaderState
from headrace._core.consumer.planning import Scattered


def delivered_ranges(resumed: LoaderState, *, over: int) -> list[range]:
    """The samples of this rank that were delivered out of order, ascending, less `over`."""
    return sorted((range(b[1] - over, b[1] - over + b[2]) for b in resumed.delivered), key=lambda part: part.start)


def scattered(
    indices: Iterator[Any], first: int, holes: Sequence[range], *, batch_size: int | None, drop_last: bool
) -> Iterator[Scattered]:
    """Batches of the indices that are not in `holes`; `first` is the number of the first index."""
    done = deque(holes)

    def rest() -> Iterator[tuple[int, Any]]:
        for number, index in enumerate(indices, first):
            while done and number >= done[0].stop:
                done.popleft()
            if not done or number not in done[0]:
                yield number, index

    left = rest()
    size = 1 if batch_size is None else batch_size
    while batch := list(itertools.islice(left, size)):
        if drop_last and len(batch) < size:
            return
        numbers, drawn = zip(*batch, strict=True)
        yield Scattered(drawn, numbers)


def without_delivered(batches: Iterator[Any], number: int, samples: int, done: dict[int, int]) -> Iterator[Scattered]:
    """The batches that were not delivered, each with the numbers of its samples."""
    for batch in batches:
        indices = tuple(batch)
        if number not in done:
            yield Scattered(indices, tuple(range(samples, samples + len(indices))))
        number += 1
        samples += len(indices)
