"""Composed datasets: sources to fetch on the event loop, functions for workers.

A composition (`map`, `concat`, torch's `Subset`, …) knows the sources, and can be rebuilt over
other sources. `plan` moves the functions of `map` from the parts to the outside. Only fetching
remains on the loop.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

from headrace._base.text import dataset_repr

Functions = tuple[Callable[[Any], object], ...]
"""Functions to apply to a sample, the first function first."""


class Composition:
    """A dataset made of other datasets, the sources."""

    sources: Sequence[Any]

    def over(
        self, sources: Sequence[object], functions: Sequence[Functions]
    ) -> tuple[object, Functions]:
        """Return this composition over other sources, and the remaining functions.

        Args:
            sources: the new sources.
            functions: for each source, the functions to apply to samples of the source.

        Returns:
            The composition, and the functions to apply to samples of the composition.
        """
        raise NotImplementedError  # each kind of composition is rebuilt in another way


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
    """A composition that concatenates or mixes sources.

    Each sample comes from a single source.
    """

    numbered = False
    """True if samples are pairs: the number of the source, and the sample.

    `PartFunctions` needs the number, because the functions differ between sources.
    """

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
    """Split a dataset into a source without functions, and functions.

    Returns:
        The source and the functions of `map`. A dataset without functions is the source itself.
    """
    if not isinstance(dataset, Composition):
        return dataset, ()
    planned = [plan(source) for source in dataset.sources]
    return dataset.over(
        [source for source, _ in planned], [functions for _, functions in planned]
    )


def gives_tables(dataset: object) -> bool:
    """Return whether samples are rows of an Arrow table.

    A batch of rows is then a table.
    """
    if isinstance(dataset, Composition):
        return all(map(gives_tables, dataset.sources))
    return bool(getattr(dataset, "gives_tables", False))


def apply_functions(functions: Functions, sample: object) -> Any:
    for function in functions:
        sample = function(sample)
    return sample


class PartFunctions:
    """Applies each source's functions to numbered samples.

    A numbered sample is a pair: the number of the source, and the sample.
    """

    def __init__(self, functions: Sequence[Functions]) -> None:
        self._functions = functions

    def __call__(self, numbered: tuple[int, object]) -> object:
        part, sample = numbered
        return apply_functions(self._functions[part], sample)


class RowFunctions(PartFunctions):
    def __call__(self, samples: Sequence[object]) -> object:
        return tuple(map(apply_functions, self._functions, samples))
