"""Fixed arguments of a loader."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from torch.utils.data import DataLoader as TorchDataLoader

from headrace._base.remote_placement import RemotePlacement
from headrace._engine.look_ahead import (
    MOST_OF_A_WORKER,
    MOST_SMALL,
    look_ahead,
    most_ahead,
    most_fetches,
)
from headrace._order.samplers import CursorSampler
from headrace._records.error_policy import ErrorPolicy
from headrace._streams.kinds import DatasetKind, joined_part
from headrace._streams.resumable import is_stateful
from headrace.options import LoaderOptions, number_of_engines, remote_placement

if TYPE_CHECKING:
    TorchLoader: TypeAlias = TorchDataLoader[Any]
else:
    # Unsubscripted: a later torch may have two type parameters (pull request 93841 of pytorch).
    TorchLoader = TorchDataLoader


def samplers_of(loader: TorchLoader) -> tuple[Any, Any, Any]:
    """Return the batch sampler, the sampler, and the batch sampler's sampler.

    None stands for a missing sampler.
    """
    return (
        loader.batch_sampler,
        loader.sampler,
        getattr(loader.batch_sampler, "sampler", None),
    )


def deciding_sampler(loader: TorchLoader) -> Any:
    """Return the sampler that decides on the order.

    The result is the sampler of single indices, or a user's batch sampler.
    """
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    # A subclass of `BatchSampler` with an inherited `__iter__` batches as torch does.
    inherits = (
        isinstance(batches, BatchSampler)
        and type(batches).__iter__ is BatchSampler.__iter__
    )
    return batches.sampler if inherits else batches  # type: ignore[attr-defined]


def samplers_within(sampler: object) -> list[Any]:
    """Return a sampler, and the samplers in attributes, which the sampler may draw from."""
    found = [sampler]
    for each in found:
        for name, value in getattr(each, "__dict__", {}).items():
            # A sampler needs no base class. A dataset with a state has `__getitem__`.
            draws = hasattr(value, "__iter__") and not hasattr(value, "__getitem__")
            has_state = draws and is_stateful(value)
            is_named = name == "sampler" and value is not None
            if isinstance(value, TorchDataLoader) or any(
                value is other for other in found
            ):
                continue
            if isinstance(value, Sampler) or has_state or is_named:
                found.append(value)
    return found


def drawn_freely(loader: TorchLoader) -> float:
    """Return how many batches may be drawn at any time.

    Drawing so many batches uses no generator shared with the program.
    """
    samplers = samplers_within(loader._index_sampler)
    modules = [type(each).__module__ for each in samplers]
    if not all(each.startswith(("headrace.", "torch.utils.")) for each in modules):
        return 0  # a user's sampler
    sampler = samplers[-1]
    if isinstance(sampler, CursorSampler) or getattr(sampler, "generator", None) is None:
        return math.inf
    if type(sampler) is RandomSampler and (
        sampler.replacement or len(sampler) != len(sampler.data_source)
    ):
        return 0
    # With the last batch, torch's samplers draw once more.
    return len(loader._index_sampler) - 1


def is_automatic(loader: TorchLoader) -> bool:
    """Whether the number of workers is searched."""
    return bool(vars(loader)["num_workers"] == "auto")


class LookAheadBounds(NamedTuple):
    """Bounds of the number of batches planned ahead."""

    least: int
    most: int


class LoaderSpec(NamedTuple):
    """Dataset and headrace's own options of a loader.

    Torch's arguments are read from the loader at each epoch.
    """

    source: Any  # the dataset to fetch from
    kind: DatasetKind
    # Functions put by `map` before the loader's transform.
    maps: tuple[Callable[[Any], Any], ...]
    options: LoaderOptions  # checked
    policy: ErrorPolicy  # policy of `on_error`
    device: torch.device | None  # target of copies of batches; None for host memory

    @property
    def engines(self) -> int:
        """Number of engines. A stream is read by a single engine."""
        return (
            number_of_engines(self.options) if self.kind is DatasetKind.ASYNC_MAP else 1
        )

    @property
    def remote(self) -> RemotePlacement | None:
        """Placement of the engines on other machines, or None."""
        return remote_placement(self.options)

    @property
    def placement(self) -> str:
        """Requested place of the engine. Several engines, and engines elsewhere, are processes."""
        placement = self.options["placement"]
        return (
            placement if isinstance(placement, str) and self.engines == 1 else "process"
        )

    def copies(self, loader: TorchLoader) -> int:
        """Number of workers that read a copy of a torch dataset.

        0 if the engine reads an async dataset, or if this process reads.
        """
        return 0 if self.kind.is_async else int(loader.num_workers)

    def reads_in_persistent_workers(self, loader: TorchLoader) -> bool:
        """Whether persistent workers keep a torch dataset.

        Then samples read ahead when an epoch is left change the next epoch.
        """
        return loader.persistent_workers and self.copies(loader) > 0

    def look_ahead(self, loader: TorchLoader) -> LookAheadBounds:
        """Return how many batches are planned ahead."""
        options, fetches = self.options, most_fetches(self.options)
        # A hedged fetch takes a bit more than twice the usual time. Meanwhile the other fetches
        # must not run dry.
        concurrency = (
            1 if self.kind.is_iterable else fetches * (3 if options["hedge"] else 1)
        )
        batch_size: int | None = loader.batch_size or getattr(
            loader.batch_sampler, "batch_size", None
        )
        given = vars(loader)["prefetch_factor"]  # without torch's default
        concurrency = concurrency if self.kind.is_async else 0
        free = drawn_freely(loader)
        # If draws are limited, no draw may depend on the number of workers found.
        searched = is_automatic(loader) and math.isfinite(free)
        workers = max(self.engines, 1 if searched else loader.num_workers)
        least = look_ahead(
            workers, prefetch_factor=given, concurrency=concurrency, batch_size=batch_size
        )
        # Samples ahead in the sampler. Neighbouring ranges, and blocks, are then read together.
        samples = 0
        if joined_part(self.source, loader.sampler):
            samples = getattr(loader.sampler, "samples_ahead", 0)
        if given is None:
            least = max(least, samples // (batch_size or 1) + 1)  # whole groups of blocks
        # Batches on the device keep no worker busy, and so do not count.
        if self.device is not None:
            least += options["device_prefetch"]
        most = least
        if given is None:
            if self.kind is DatasetKind.ASYNC_ITERABLE:
                most = MOST_SMALL
            elif free and self.kind is DatasetKind.MAP and loader.in_order:
                most = min(MOST_SMALL, MOST_OF_A_WORKER * loader.num_workers)
            elif free and self.kind is DatasetKind.ASYNC_MAP and not samples:
                most = most_ahead(least, concurrency=fetches, batch_size=batch_size)
        return LookAheadBounds(least, max(least, most))
