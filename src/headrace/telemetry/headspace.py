"""How much faster training could be with a perfect loader: steps on its batches, and on ones that are kept."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from headrace.telemetry.formatting import digits, rate, seconds, share
from headrace.telemetry.report import Report

__all__ = ["Headspace", "headspace"]

KEPT = 4  # batches that are used again and again: few, since they may be large
LITTLE = 1.05  # times as fast, below which it is noise


@dataclass(frozen=True, slots=True)
class Headspace:
    """What a perfect loader would gain.

    Attributes:
        batches: number of steps that were measured, of each kind.
        step_seconds: mean seconds of a step on a batch of the loader, the wait for it included.
        cached_seconds: mean seconds of a step on a batch that is kept.
        waited_seconds: mean seconds of the wait for a batch; part of `step_seconds`.
        report: the loader's report on these batches; None of a loader that is none of headrace's.
    """

    batches: int
    step_seconds: float
    cached_seconds: float
    waited_seconds: float
    report: Report | None

    @property
    def speedup(self) -> float:
        """How many times as fast training is at most, with a perfect loader."""
        return max(1.0, self.step_seconds / self.cached_seconds) if self.cached_seconds else 1.0

    @property
    def slowdown_seconds(self) -> float:
        """Mean seconds by which the step itself takes longer while the loader works."""
        return max(0.0, self.step_seconds - self.waited_seconds - self.cached_seconds)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "report"}
        report = None if self.report is None else self.report.to_dict()
        return {**own, "speedup": self.speedup, "slowdown_seconds": self.slowdown_seconds, "report": report}

    def __str__(self) -> str:
        said = (
            f"{rate(1 / self.step_seconds)} steps/s with the loader, {rate(1 / self.cached_seconds)} with batches that "
            f"are kept in memory ({self.batches} steps each). "
        )
        if self.speedup < LITTLE:
            return said + "The loader is not the limit: a perfect one would gain less than 5 %."
        said += f"Training could be {digits(self.speedup)} times as fast at most, with a perfect loader.\n"
        said += f"A step takes {seconds(self.step_seconds)} in place of {seconds(self.cached_seconds)}: "
        said += f"{seconds(self.waited_seconds)} are waiting for its batch"
        if self.slowdown_seconds > 0.2 * (self.step_seconds - self.cached_seconds):
            said += (
                f", and by {seconds(self.slowdown_seconds)} the step itself is slower: the loader, or another program, "
                f"uses its cores or its GIL"
            )
        said += "."
        if self.report is not None and self.report.limit != "consumer":
            said += f"\n{self.report.headline}"
        elif self.report is not None and self.report.batches:
            said += f"\nnext() takes {share(self.report.wait_share)} of the time."
        return said


def headspace(loader: Iterable[Any], step: Callable[[Any], object], batches: int = 50) -> Headspace:
    """Measure how much faster training could be at most, with a perfect loader.

    Runs `step` on batches of the loader, and then on four of them that are kept in memory, again and again. The first
    four steps warm up, and do not count. A loader with fewer batches begins further epochs.

    A headrace loader is copied, with an engine of its own, and the copy is closed at the end: epoch, position, counts
    and report of yours stay as they are, and so do torch's random generators, except those that `step` uses on an
    accelerator. Any other loader is iterated. `step` trains: model and optimizer are changed by it. So is a dataset
    or sampler that keeps a position of its own.

    Args:
        loader: the loader; a torch loader too.
        step: takes a batch: forward, backward, optimizer, and the copy to the device where the loop makes it. What it
            changes in a batch does not reach the next step.
        batches: number of steps to measure, of each kind.

    Returns:
        The result. ``print(result)`` says what a perfect loader would gain, and what limits this one.

    Raises:
        ValueError: `batches` is less than 1, or the loader has none.
        TypeError: `step` is a coroutine function.

    Example:
        >>> import headrace as hr, time
        >>> class Squares(hr.AsyncDataset):
        ...     def __len__(self): return 64
        ...     async def aget(self, index): return index * index
        >>> found = hr.headspace(hr.DataLoader(Squares(), 4), lambda batch: time.sleep(0.001), batches=20)
        >>> found.batches, found.speedup >= 1.0
        (20, True)
    """
    if batches < 1:
        raise ValueError(f"batches must be at least 1, but got {batches}")
    if inspect.iscoroutinefunction(step):
        raise TypeError(
            "step must not be a coroutine function: pass a function that runs it, for example with asyncio.Runner"
        )
    own = isinstance(loader, torch.utils.data.DataLoader) and callable(getattr(loader, "report", None))
    with _random_state_kept(loader):
        reader: Any = copy.copy(loader) if own else loader
        try:
            return _measure(reader, step, batches, own=own)
        finally:
            if own:
                reader.close()


def _measure(loader: Any, step: Callable[[Any], object], batches: int, *, own: bool) -> Headspace:
    endless = _endless(loader)
    kept = _Kept()
    for _ in range(KEPT):
        batch = next(endless)
        pristine = kept.add(batch)
        step(batch)
        kept.check(batch, pristine)
    del batch, pristine
    _synchronize()
    waited, began = 0.0, time.perf_counter()
    at = began
    for _ in range(batches):
        batch = next(endless)
        waited += time.perf_counter() - at
        step(batch)
        del batch  # as in a loop, whose next batch replaces it
        at = time.perf_counter()
    _synchronize()
    real = time.perf_counter() - began
    report = loader.report() if own else None
    endless.close()  # nothing is fetched while the steps below run
    for number in range(KEPT):
        step(kept.take(number))
    _synchronize()
    copying, began = 0.0, time.perf_counter()
    for number in range(batches):
        at = time.perf_counter()
        batch = kept.take(number)
        copying += time.perf_counter() - at
        step(batch)
    _synchronize()
    cached = time.perf_counter() - began - copying
    return Headspace(batches, real / batches, cached / batches, waited / batches, report)


def _endless(loader: Iterable[Any]) -> Generator[Any]:
    """The batches of one epoch after the other."""
    while True:
        iterator = iter(loader)
        count = 0
        try:
            for batch in iterator:
                count += 1
                yield batch
                del batch
        finally:
            if callable(close := getattr(iterator, "close", None)):
                close()
        if not count:
            raise ValueError("the loader has no batches")


class _Kept:
    """Batches that are kept, with copies for steps that change them."""

    def __init__(self) -> None:
        self._batches: list[Any] = []
        self._changed = False

    def add(self, batch: Any) -> list[int]:
        """Keep a copy; returns the versions of the batch's tensors."""
        self._batches.append(pytree.tree_map(_copied, batch))
        return _versions(batch)

    def check(self, batch: Any, before: list[int]) -> None:
        """Note whether a step has changed the batch's tensors."""
        self._changed |= _versions(batch) != before

    def take(self, number: int) -> Any:
        """A batch, in containers of its own; its tensors are copies if steps change them."""
        batch = self._batches[number % KEPT]
        return pytree.tree_map(_copied if self._changed else _same, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        copied = leaf.detach().clone()
        return copied.pin_memory() if leaf.device.type == "cpu" and leaf.is_pinned() else copied
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _same(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _versions(batch: Any) -> list[int]:
    """The versions of all tensors, which each change in place increments."""
    leaves = pytree.tree_leaves(batch)
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _synchronize() -> None:
    """Wait for an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextmanager
def _random_state_kept(loader: Any) -> Iterator[None]:
    """Restore the generators that an iteration draws from: torch's, and those of the loader and its samplers."""
    holders = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    generators = [torch.default_generator]
    for generator in (getattr(holder, "generator", None) for holder in holders):
        if isinstance(generator, torch.Generator) and all(generator is not known for known in generators):
            generators.append(generator)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
