"""Transforms with random numbers that depend only on the sample's position."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np
import torch

T = TypeVar("T")
U = TypeVar("U")

_WORD = (1 << 64) - 1


@dataclass(slots=True)
class CurrentSample:
    """The sample of the running user function.

    The object is mutable and changes with each sample.

    Attributes:
        key: number of 128 bits, equal for all samples of an epoch or of a pass over a stream.
        position: position of the sample in the epoch or pass; None if unknown.
        of_batch: whether a batch is being collated. The sample is then the first of the batch.
        calls: number of calls of randomized functions for the sample so far.
    """

    key: int
    position: int | None = None
    of_batch: bool = False
    calls: int = 0


current_sample: ContextVar[CurrentSample | None] = ContextVar(
    "headrace_sample", default=None
)
"""The current sample; None outside of a loader."""


@overload
def randomized(fn: Callable[[T, np.random.Generator], U]) -> Randomized[T, U]: ...
@overload
# A method.
def randomized(fn: Callable[[Any, T, np.random.Generator], U]) -> Randomized[T, U]: ...
def randomized(fn: Callable[..., U]) -> Randomized[Any, U]:
    """Make a transform with reproducible random numbers.

    The function is ``fn(sample, rng)``, with a NumPy `Generator` (Philox). The random numbers
    follow from the loader's `seed`, the epoch, and the position of the sample among the samples of
    all ranks. The numbers do not depend on worker, batch, batch size, placement, rank, or the point
    of resuming.

    Use the result as `transform`, in `dataset.map` and `filter`, in a `Compose`, or as
    `collate_fn`. A `collate_fn` gets the batch, and numbers for the position of the first sample. A
    second randomized function of the same sample draws other numbers.

    Without a loader, and within the ``__getitem__`` of a torch dataset, the function draws from
    torch's generator, as torch's transforms do. A call ``(sample, rng)`` uses the given generator.
    A call within ``aget`` is an error, because fetches overlap.

    Args:
        fn: a function of the sample and the generator; may be a lambda or a method. No other
            function uses the generator until `fn` returns.

    Returns:
        A transform.

    Raises:
        TypeError: `fn` is not callable.

    Example:
        >>> import headrace as hr
        >>> @hr.randomized
        ... def jitter(value, rng):
        ...     return value + rng.random()
        >>> small = hr.DataLoader(list(range(6)), batch_size=2, transform=jitter, seed=0)
        >>> large = hr.DataLoader(list(range(6)), batch_size=3, transform=jitter, seed=0)
        >>> [x for batch in small for x in batch] == [x for batch in large for x in batch]
        True
    """
    return Randomized(fn)


class Randomized(Generic[T, U]):
    """A transform made by `headrace.randomized`."""

    def __init__(self, fn: Callable[..., U]) -> None:
        if not callable(fn):
            raise TypeError(
                f"randomized needs a function of a sample and a generator, but got {fn!r}"
            )
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn

    def __call__(self, sample: T, rng: np.random.Generator | None = None) -> U:
        """Call the function with the current sample's generator, or with `rng`."""
        if rng is not None:
            return self.fn(sample, rng)
        rng = _generator()
        try:
            return self.fn(sample, rng)
        finally:
            _idle.append(rng)

    def __get__(self, instance: object, owner: type | None = None) -> Randomized[T, U]:
        """Bind the function to an instance, as a method."""
        if instance is None:
            return self
        return Randomized(types.MethodType(self.fn, instance))

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle by name if possible.

        A decorator gives the transform the name of the function. For the main program, the pickler
        decides: pickle takes the name of the function, and cloudpickle the value.
        """
        name: str = getattr(self, "__qualname__", "")
        found: object = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            if self.__module__ not in ("__main__", "__mp_main__"):
                return name
            self.fn.__qualname__ = f"{name}.fn"  # where pickle finds the function
        return Randomized, (self.fn,), vars(self)

    def __repr__(self) -> str:
        return f"headrace.randomized({getattr(self, '__qualname__', self.fn)})"


# Making a generator takes 15 µs, setting another position 1 µs.
_idle: list[np.random.Generator] = []


def _generator() -> np.random.Generator:
    """Return a generator set to the current sample."""
    current = current_sample.get()
    if current is None:
        key, counter = (
            int(torch.empty((), dtype=torch.int64, device="cpu").random_()),
            (0, 0, 0, 0),
        )
    elif current.position is None:
        raise RuntimeError(
            "a randomized function was called while samples are fetched, where it is not known "
            "for which one (fetches overlap): pass it as the loader's transform=, or to .map() "
            "of the dataset that the loader is given"
        )
    else:
        # Philox counts up in the first word. So two samples, or two calls for a sample, never get
        # the same numbers.
        key, counter = (
            current.key,
            (0, current.calls, current.position, int(current.of_batch)),
        )
        current.calls += 1
    try:
        rng = _idle.pop()
    except IndexError:
        rng = np.random.Generator(np.random.Philox(key=0))
    cast(Any, rng.bit_generator).state = {
        "bit_generator": "Philox",
        "state": {"counter": counter, "key": (key & _WORD, key >> 64)},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return rng
