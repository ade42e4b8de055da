"""What the epochs of a loader are made from: the arguments that are fixed for its life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from headrace._core.error_policy import ErrorPolicy
from headrace._core.ray_placement import RayPlacement
from headrace._core.streams.kinds import DatasetKind
from headrace.options import LoaderOptions, number_of_engines

TorchLoader: TypeAlias = TorchDataLoader[object]


@dataclass(frozen=True, slots=True)
class LoaderSpec:
    """A loader's dataset and headrace's own options. Torch's arguments are read from the loader at each epoch."""

    source: Any  # the dataset that is fetched from
    kind: DatasetKind
    maps: tuple[Callable[[Any], Any], ...]  # functions that `map` put before the loader's transform
    options: LoaderOptions  # checked
    policy: ErrorPolicy  # of `on_error`
    device: torch.device | None  # that batches are copied to; None for host memory

    @property
    def engines(self) -> int:
        return number_of_engines(self.options)

    @property
    def placement(self) -> str | RayPlacement:
        """The requested place of the engine; several are processes."""
        placement = self.options["placement"]
        return "process" if self.engines > 1 and not isinstance(placement, RayPlacement) else placement
