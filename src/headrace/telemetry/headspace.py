"""How much faster training could be with a perfect loader: steps on its batches, and on ones that are kept."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import torch

from headrace._core.text import digits, rate, seconds
from headrace._core.torchcompat.private import tree_map
from headrace.telemetry.report import Report

__all__ = ["Headspace", "headspace"]

KEPT = 4  # batches that are used again and again: few, since they may be large


class Headspace(NamedTuple):
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
        return max(1.0, self.step_seconds / self.cached_seconds)

    def __str__(self) -> str:
        said = (
            f"{rate(1 / self.step_seconds)} steps/s with the loader, {rate(1 / self.cached_seconds)} with batches that "
            f"are kept in memory ({self.batches} steps each): training could be {digits(self.speedup)} times as fast "
            f"at most, with a perfect loader.\nA step takes {seconds(self.step_seconds)} in place of "
            f"{seconds(self.cached_seconds)}: {seconds(self.waited_seconds)} are waiting for its batch."
        )
        return said if self.report is None else f"{said}\n{self.report.headline}"


def headspace(loader: Iterable[Any], step: Callable[[Any], object], batches: int = 50) -> Headspace:
    """Measure how much faster training could be at most, with a perfect loader.

    Runs `step` on batches of the loader, and then on four of them that are kept in memory, again and again. The first
    four steps warm up, and do not count. A loader with fewer batches begins further epochs.

    A headrace loader is copied, with an engine of its own: yours stays as it is, and so does torch's default generator
    on the host; a `generator=` of yours goes on. Any other loader is iterated. `step` trains the model, and what it
    changes in the tensors of a kept batch stays changed.

    Args:
        loader: the loader; a torch loader too.
        step: a plain function that takes a batch: forward, backward, optimizer, and the copy to the device where the
            loop makes it.
        batches: number of steps to measure, of each kind.

    Returns:
        The result. ``print(result)`` says what a perfect loader would gain, and what limits this one.

    Raises:
        ValueError: `batches` is less than 1, or the loader has none.

    Example:
        >>> import headrace as hr, time
        >>> found = hr.headspace(hr.DataLoader(range(64), 4), lambda batch: time.sleep(0.001), batches=20)
        >>> found.batches, found.speedup >= 1.0
        (20, True)
    """
    if batches < 1:
        raise ValueError(f"batches must be at least 1, but got {batches}")
    own = isinstance(loader, torch.utils.data.DataLoader) and callable(getattr(loader, "report", None))
    reader: Any = copy.copy(loader) if own else loader
    try:
        with torch.random.fork_rng(devices=[]):
            read, kept = _endless(reader), []
            for batch in itertools.islice(read, KEPT):
                kept.append(_in_new_containers(batch))
                step(batch)
            real, waited = _timed(step, itertools.islice(read, batches))
            report = reader.report() if own else None
            read.close()  # nothing is fetched while the steps below run
            again = map(_in_new_containers, itertools.cycle(kept))
            _timed(step, itertools.islice(again, KEPT))
            cached, _ = _timed(step, itertools.islice(again, batches))
            return Headspace(batches, real / batches, cached / batches, waited / batches, report)
    finally:
        if own:
            reader.close()


def _endless(loader: Iterable[Any]) -> Generator[Any]:
    """The batches of a loader, epoch after epoch."""
    count = 1
    while count:
        count = 0
        for count, batch in enumerate(loader, 1):  # noqa: B007
            yield batch
    raise ValueError("the loader has no batches")


def _in_new_containers(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf, batch)


def _timed(step: Callable[[Any], object], batches: Iterable[Any]) -> tuple[float, float]:
    """The seconds of the steps on some batches, and those of them for which they waited."""
    _synchronize()
    waited, began = 0.0, time.perf_counter()
    at = began
    for batch in batches:
        waited += time.perf_counter() - at
        step(batch)
        at = time.perf_counter()
    _synchronize()
    return time.perf_counter() - began, waited


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
