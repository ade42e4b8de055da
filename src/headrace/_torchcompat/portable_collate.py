"""A collate function with the loader's transform.

accelerate, Ray Train and others build a plain `torch.utils.data.DataLoader` from the attributes of
a loader. The plain loader ignores headrace's own arguments, but uses `loader.collate_fn`, so the
transform is part of `loader.collate_fn`.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from headrace._ranks.rankinfo import bound

Transform = Callable[[object], object]

# Shared with processes forked from this process: after a warning by a worker, the workers of the
# next epoch do not warn again.
_warned = mmap.mmap(-1, 1)


_applied: ContextVar[tuple[Transform, ...] | None] = ContextVar(
    "headrace_applied", default=None
)


def collating(applied: tuple[Transform, ...]) -> bound:
    """Set the transforms already applied to samples, during a collate call."""
    return bound(_applied, applied)


class _Parts(NamedTuple):
    """The parts of a `PortableCollate`."""

    collate: Callable[[Any], Any]
    transform: Transform | None
    batched: bool
    warn: Callable[[], object] | None


class PortableCollate:
    """The value of `loader.collate_fn` if a torch loader needs the transform.

    In headrace's own workers the samples are already transformed. Anywhere else `PortableCollate`
    transforms the samples first, and either warns once about the rebuilt loader or calls `warn`.
    Attributes are read, set and deleted on `collate`. If not `batched`, `collate` gets a sample
    instead of a list of samples.
    """

    portable_parts: _Parts

    def __init__(
        self,
        collate: Callable[[Any], Any],
        transform: Transform | None,
        *,
        batched: bool,
        warn: Callable[[], object] | None = None,
    ) -> None:
        self.__dict__["portable_parts"] = _Parts(collate, transform, batched, warn)

    def __call__(self, samples: Any) -> Any:
        """Transform the samples, unless already done, and collate them."""
        collate, transform, batched, warn = self.portable_parts
        applied = _applied.get()
        if applied is None:
            (warn or _warn_once)()
        if transform is None or (
            applied is not None and any(done is transform for done in applied)
        ):
            return collate(samples)
        transformed = (
            [transform(sample) for sample in samples] if batched else transform(samples)
        )
        with collating((*(applied or ()), transform)):
            return collate(transformed)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "portable_parts":  # not set during unpickling
            raise AttributeError(name)
        return getattr(self.portable_parts.collate, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.portable_parts.collate, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.portable_parts.collate, name)

    def __repr__(self) -> str:
        parts = self.portable_parts
        return f"{type(self).__name__}({parts.collate!r}, transform={parts.transform!r})"


def without_transform(collate_fn: Any) -> Any:
    """Return the user's collate function, also of a `PortableCollate`."""
    if isinstance(collate_fn, PortableCollate):
        return collate_fn.portable_parts.collate
    return collate_fn


def same() -> None:
    """Do nothing: a rebuilt torch loader loses no option.

    The class of the collate function still identifies a rebuilt loader.
    """


def _warn_once() -> None:
    worker = get_worker_info()
    if _warned[0] or (worker is not None and worker.id != 0):
        return
    _warned[0] = 1
    warnings.warn(
        "a torch DataLoader that was rebuilt from a headrace.DataLoader is being iterated "
        "(accelerate's prepare() and skip_first_batches(), and Ray Train's prepare_data_loader(), "
        "rebuild loaders). Its samples and their order are right, but headrace's engine does not "
        "run: concurrency=, retry=, hedge=, on_error=, device= and memory_budget= have no effect, "
        "and fetching is slow. Let headrace prepare its loader: with accelerate by loader = "
        "headrace.integrations.accelerate.prepare(accelerator, loader), in Ray Train by "
        "headrace.integrations.ray.prepare_data_loader(loader). docs/trainers.md has the other "
        "trainers.",
        RuntimeWarning,
        stacklevel=3,
    )
