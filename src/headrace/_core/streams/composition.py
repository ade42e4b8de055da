"""The algebra of composed datasets: sources to fetch from on the event loop, and functions to apply in the workers.

A composition (`map`, `take`, `concat`, torch's `Subset`, …) knows its parts and how to rebuild itself over other parts.
`plan` moves the functions of `map` from the parts to the outside, so that only fetching is left on the loop.
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from headrace._core.streams.kinds import propagate_epoch

Functions = tuple[Callable[[Any], object], ...]
"""Functions that are applied to a sample, the first one first."""


class Composition(ABC):
    """A dataset that is made of other datasets."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[object]: ...

    @abstractmethod
    def over(self, sources: Sequence[object], functions: Sequence[Functions]) -> tuple[object, Functions]:
        """This composition over other parts, whose functions are applied afterwards.

        Args:
            sources: a source for each part.
            functions: for each part, the functions that its samples still need.

        Returns:
            A dataset, and the functions that each of its samples still needs.
        """

    def set_epoch(self, epoch: int) -> None:
        for part in self.parts:
            propagate_epoch(part, epoch)


class MapComposition(Composition):
    """A function applied to each sample of a dataset."""

    dataset: Any
    fn: Callable[[object], Any]

    @property
    def parts(self) -> Sequence[object]:
        return (self.dataset,)

    def over(self, sources: Sequence[object], functions: Sequence[Functions]) -> tuple[object, Functions]:
        return sources[0], (*functions[0], self.fn)


class ConcatComposition(Composition):
    """One dataset, or several one after the other.

    Attributes:
        sources: the parts.
        numbered: whether a sample is a pair of its part's number and the part's sample, for `PartFunctions`. They are
            if the parts have different functions.
    """

    sources: Sequence[Any]
    numbered = False

    @property
    def parts(self) -> Sequence[object]:
        return self.sources

    def over(self, sources: Sequence[object], functions: Sequence[Functions]) -> tuple[object, Functions]:
        first, *others = functions
        common = all(len(other) == len(first) and all(map(operator.is_, first, other)) for other in others)
        if common and not first and all(map(operator.is_, sources, self.sources)):
            return self, ()
        other = copy.copy(self)
        other.sources = tuple(sources)
        other.numbered = not common
        return other, first if common else (PartFunctions(functions),)


def plan(dataset: object) -> tuple[Any, Functions]:
    """The source of a dataset, whose `aget` or `__aiter__` runs no function of `map`, and these functions.

    The source is `dataset` itself if there is nothing to move outside.
    """
    if not isinstance(dataset, Composition):
        return dataset, ()
    planned = [plan(part) for part in dataset.parts]
    return dataset.over([source for source, _ in planned], [functions for _, functions in planned])


def apply_functions(functions: Functions, sample: object) -> Any:
    for function in functions:
        sample = function(sample)
    return sample


class PartFunctions:
    """Applies the functions of one part to a pair of the part's number and a sample of it."""

    def __init__(self, functions: Sequence[Functions]) -> None:
        self._functions = functions

    def __call__(self, numbered: tuple[int, object]) -> object:
        part, sample = numbered
        return apply_functions(self._functions[part], sample)


class StackFunctions:
    """Makes a dict or a tuple, as torch's `StackDataset`, of one sample of each part, with each part's functions."""

    def __init__(self, names: list[str] | None, functions: Sequence[Functions]) -> None:
        self._names = names
        self._functions = functions

    def __call__(self, samples: Sequence[object]) -> object:
        row = tuple(map(apply_functions, self._functions, samples))
        return row if self._names is None else dict(zip(self._names, row, strict=True))
