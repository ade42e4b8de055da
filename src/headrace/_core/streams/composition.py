"""The algebra of composed datasets: sources to fetch from on the event loop, and functions to apply in the workers.

A composition (`map`, `concat`, torch's `Subset`, …) knows its sources and how to rebuild itself
over others. `plan` moves the functions of `map` from the parts to the outside, so that only
fetching is left on the loop.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

from headrace._core.text import dataset_repr

Functions = tuple[Callable[[Any], object], ...]
"""Functions that are applied to a sample, the first one first."""


class Composition:
    """A dataset that is made of other datasets, its sources."""

    sources: Sequence[Any]

    def over(
        self, sources: Sequence[object], functions: Sequence[Functions]
    ) -> tuple[object, Functions]:
        """This composition over other sources, and the functions that its samples still need, given those of theirs."""
        raise NotImplementedError  # each composition has its own


class MapComposition(Composition):
    dataset: Any
    fn: Callable[[Any], Any]

    @property
    def sources(self) -> Sequence[Any]:  # type: ignore[override]
        return (self.dataset,)

    def __len__(self) -> int:
        return len(self.dataset)

    def over(
        self, sources: Sequence[object], functions: Sequence[Functions]
    ) -> tuple[object, Functions]:
        return sources[0], (*functions[0], self.fn)


class ConcatComposition(Composition):
    """Samples each of which is one of a source."""

    numbered = False
    """Whether samples are pairs of a source's number and its sample, for `PartFunctions`, as functions differ."""

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(dataset_repr, self.sources))}])"

    def over(
        self, sources: Sequence[object], functions: Sequence[Functions]
    ) -> tuple[object, Functions]:
        common = len({tuple(map(id, each)) for each in functions}) == 1
        if common and not functions[0] and all(map(operator.is_, sources, self.sources)):
            return self, ()
        other = copy.copy(self)
        other.sources, other.numbered = tuple(sources), not common
        return other, functions[0] if common else (PartFunctions(functions),)


def plan(dataset: object) -> tuple[Any, Functions]:
    """The source of a dataset, which runs no function of `map`, and these functions; the dataset itself without any."""
    if not isinstance(dataset, Composition):
        return dataset, ()
    planned = [plan(source) for source in dataset.sources]
    return dataset.over([source for source, _ in planned], [functions for _, functions in planned])


def gives_tables(dataset: object) -> bool:
    """Whether a sample of a dataset is a row of an Arrow table, so that a batch is one table."""
    if isinstance(dataset, Composition):
        return all(map(gives_tables, dataset.sources))
    return bool(getattr(dataset, "gives_tables", False))


def apply_functions(functions: Functions, sample: object) -> Any:
    for function in functions:
        sample = function(sample)
    return sample


class PartFunctions:
    """Applies the functions of one source to a pair of the source's number and a sample of it."""

    def __init__(self, functions: Sequence[Functions]) -> None:
        self._functions = functions

    def __call__(self, numbered: tuple[int, object]) -> object:
        part, sample = numbered
        return apply_functions(self._functions[part], sample)


class RowFunctions(PartFunctions):
    def __call__(self, samples: Sequence[object]) -> object:
        return tuple(map(apply_functions, self._functions, samples))
