"""A collate function that carries the loader's transform, for libraries that rebuild a torch loader from ours.

accelerate, Ray Train and others make a plain `torch.utils.data.DataLoader` out of the attributes of
the loader that they are given. Of headrace's own arguments such a loader knows nothing;
`loader.collate_fn` brings the transform along.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from headrace._core.ranks.rankinfo import bound

Transform = Callable[[object], object]

# Shared with processes that are forked from this one, so that a warning given by a worker is not
# given again by the workers of the next epoch.
_warned = mmap.mmap(-1, 1)


_applied: ContextVar[tuple[Transform, ...] | None] = ContextVar("headrace_applied", default=None)


def collating(applied: tuple[Transform, ...]) -> bound:
    """While a collate function is called: `applied` are the transforms that its samples have been through."""
    return bound(_applied, applied)


class _Parts(NamedTuple):
    """What a `PortableCollate` is made of."""

    collate: Callable[[Any], Any]
    transform: Transform | None
    batched: bool
    warn: Callable[[], object] | None


class PortableCollate:
    """The value of `loader.collate_fn` if a plain torch loader would need the transform too.

    In headrace's own workers samples have been transformed when it is called. Anywhere else it
    transforms them first, and warns once that the loader was rebuilt, or calls `warn`. Attributes
    are those of `collate`, to read, set and delete. Where not `batched`, `collate` is given a
    sample in place of a list of samples.
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
        """Transform the samples, unless that has been done, and collate them."""
        collate, transform, batched, warn = self.portable_parts
        applied = _applied.get()
        if applied is None:
            (warn or _warn_once)()
        if transform is None or (
            applied is not None and any(done is transform for done in applied)
        ):
            return collate(samples)
        transformed = [transform(sample) for sample in samples] if batched else transform(samples)
        with collating((*(applied or ()), transform)):
            return collate(transformed)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "portable_parts":  # not set while it is being unpickled
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
    """The user's collate function, also of a `PortableCollate`."""
    return (
        collate_fn.portable_parts.collate if isinstance(collate_fn, PortableCollate) else collate_fn
    )


def same() -> None:
    """Do nothing: a torch loader loses no option. The loader's class still tells one that is made anew by it."""


def _warn_once() -> None:
    worker = get_worker_info()
    if _warned[0] or (worker is not None and worker.id != 0):
        return
    _warned[0] = 1
    warnings.warn(
        "a torch DataLoader that was rebuilt from a headrace.DataLoader is being iterated (accelerate's prepare() and "
        "skip_first_batches(), and Ray Train's prepare_data_loader(), rebuild loaders). Its samples and their order "
        "are right, but headrace's engine does not run: concurrency=, retry=, hedge=, on_error=, device= and "
        "memory_budget= have no effect, and fetching is slow. Let headrace prepare its loader: with accelerate by "
        "loader = headrace.integrations.accelerate.prepare(accelerator, loader), in Ray Train by "
        "headrace.integrations.ray.prepare_data_loader(loader). docs/trainers.md has the other trainers.",
        RuntimeWarning,
        stacklevel=3,
    )
