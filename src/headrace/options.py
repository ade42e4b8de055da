"""What headrace's own keyword arguments mean, validated and frozen; their defaults stand here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = [
    "AUTO_CONCURRENCY",
    "LEAST_AHEAD",
    "ByDefault",
    "ExecutorKind",
    "OnError",
    "Options",
    "Placement",
    "look_ahead",
]

ExecutorKind = Literal["process", "thread"]
OnError = Literal["raise", "skip"]
Placement = Literal["auto", "thread", "process"]

# Fetches in flight for concurrency="auto". 64 keep a store of 20 ms busy at 3,200 objects/s, and are well within what
# one connection pool and the default limit of 1,024 descriptors bear.
AUTO_CONCURRENCY = 64

# With 6 batches ahead plans go out by fives while the consumer is the slower one; with 2 each call of next() would wake
# the engine (benchmarks/next_latency.py: 20 µs instead of 5).
LEAST_AHEAD = 6


class ByDefault(int):
    """A number that torch filled in and nobody asked for.

    Trainers make a loader anew from the attributes of another. What was a default there stays one.
    """


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments that `headrace.DataLoader` adds to torch's.

    Attributes:
        transform: applied to each sample, in the CPU workers; None for nothing.
        concurrency: how many samples are being fetched at once, across batches.
        placement: where the engine runs. ``"thread"``: in a daemon thread of this process. ``"process"``: in a process
            of its own. ``"auto"``: an async dataset with workers in a process, all else in a thread.
        on_error: ``"raise"``: a sample that fails is raised to the consumer. ``"skip"``: its batch comes without it.
        executor: what the CPU workers are: ``"process"`` or ``"thread"``.
        seed: what shuffling and each batch's randomness derive from; None: torch's generator, as in torch.
        device: where batches are copied to, as torch takes it, or ``"auto"``; None for host memory.
        device_prefetch: for how many batches, beside the one in use, copies may be under way.
    """

    transform: Callable[[Any], Any] | None = None
    concurrency: int | Literal["auto"] = "auto"
    placement: Placement = "auto"
    on_error: OnError = "raise"
    executor: ExecutorKind = "process"
    seed: int | None = None
    device: torch.device | str | int | None = None
    device_prefetch: int = 2

    def __post_init__(self) -> None:
        if self.transform is not None and not callable(self.transform):
            raise TypeError(f"transform must be callable, but got {self.transform!r}")
        if self.concurrency != "auto":
            if isinstance(self.concurrency, bool) or not isinstance(self.concurrency, int):
                raise TypeError(f'concurrency must be an int or "auto", but got {self.concurrency!r}')
            if self.concurrency < 1:
                raise ValueError(f'concurrency must be at least 1, or "auto", but got {self.concurrency}')
        if self.placement not in ("auto", "thread", "process"):
            raise ValueError(f'placement must be "auto", "thread" or "process", but got {self.placement!r}')
        if self.executor not in ("process", "thread"):
            raise ValueError(f'executor must be "process" or "thread", but got {self.executor!r}')
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f'on_error must be "raise" or "skip", but got {self.on_error!r}')
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise TypeError(f"seed must be an int or None, but got {self.seed!r}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, but got {self.seed}")
        if isinstance(self.device_prefetch, bool) or not isinstance(self.device_prefetch, int):
            raise TypeError(f"device_prefetch must be an int, but got {self.device_prefetch!r}")
        if self.device_prefetch < 0:
            raise ValueError(f"device_prefetch must not be negative, but got {self.device_prefetch}")

    @property
    def fetchers(self) -> int:
        """The number of samples being fetched at once."""
        return AUTO_CONCURRENCY if self.concurrency == "auto" else self.concurrency


def look_ahead(*, prefetch_factor: int | None, num_workers: int, concurrency: int, batch_size: int | None) -> int:
    """How many batches may be planned and not yet delivered.

    Args:
        prefetch_factor: what the user gave; None if nothing.
        num_workers: CPU workers; 0 counts as one.
        concurrency: samples being fetched at once on the loop; 0 where the workers read the dataset themselves.
        batch_size: samples in a batch, where it is known.
    """
    workers = max(1, num_workers)
    if prefetch_factor is not None:
        return max(1, prefetch_factor * workers)
    if not concurrency:
        return 2 * workers
    # One batch beyond what the fetch window covers, so that the window is full while a batch is being assembled; and
    # enough that plans can be sent in groups.
    return max(LEAST_AHEAD, 2 * workers, math.ceil(concurrency / (batch_size or 1)) + 1)
