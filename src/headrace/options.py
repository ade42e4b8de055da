"""What headrace's own keyword arguments mean, validated and frozen; their defaults stand here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace._core.error_policy import OnError, error_policy

__all__ = [
    "AUTO_CONCURRENCY",
    "LEAST_AHEAD",
    "MEMORY_BUDGET",
    "MOST_CONCURRENCY",
    "ExecutorKind",
    "Hedge",
    "Options",
    "Placement",
    "RetryPolicy",
    "Unset",
    "as_policy",
    "look_ahead",
    "most_concurrency",
]

ExecutorKind = Literal["process", "thread"]
Hedge = Literal["auto"]
Placement = Literal["auto", "thread", "process"]

# Fetches in flight that concurrency="auto" begins with. 64 keep a store of 20 ms busy at 3,200 objects/s, and are well
# within what one connection pool and the usual limit of 1,024 descriptors bear.
AUTO_CONCURRENCY = 64
# And what it may grow to, where there are descriptors for it: 1,024 keep a store of 100 ms busy at 10,000 objects/s,
# about what one event loop can take in.
MOST_CONCURRENCY = 1024
# Bytes. 1,024 fetches of 1 MiB; a sixteenth of the memory of a small training machine.
MEMORY_BUDGET = 1 << 30

# With 6 batches ahead plans go out by fives while the consumer is the slower one; with 2 each call of next() would wake
# the engine (benchmarks/next_latency.py: 20 µs instead of 5).
LEAST_AHEAD = 6


class Unset(int):
    """A number that torch filled in and nobody asked for.

    Trainers make a loader anew from the attributes of another. What was a default there stays one.
    """


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How failed requests to a store are tried again. What is tried again at all: docs/retries.md.

    Attributes:
        max_attempts: the most times that one request is sent; 1 for no retries.
        initial_backoff: seconds; the wait before attempt n + 1 is random, up to ``initial_backoff * 2 ** (n - 1)``.
        max_backoff: seconds; what that grows to at most.
        deadline: seconds without progress after which no attempt is begun. A part of an object that has come in is
            progress.
        retry_ratio: how many retries each request that succeeds earns, for all fetchers together.
        burst: how many retries may be made before any is earned; a tenth of it comes back each second.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> RetryPolicy(max_attempts=3)
        RetryPolicy(max_attempts=3, initial_backoff=0.1, max_backoff=5.0, deadline=60.0, retry_ratio=0.2, burst=100)
    """

    max_attempts: int = 10
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    deadline: float = 60.0
    retry_ratio: float = 0.2
    burst: int = 100

    def __post_init__(self) -> None:
        for name, least in (("max_attempts", 1), ("burst", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"RetryPolicy: {name} must be an int of at least {least}, but got {value!r}")
        for name in ("initial_backoff", "max_backoff", "deadline", "retry_ratio"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"RetryPolicy: {name} must be a number of zero or more, but got {value!r}")

    def max_backoff_after(self, attempt: int) -> float:
        """The upper end, in seconds, of the random wait behind failed attempt `attempt`, counted from 1.

        Example:
            >>> [RetryPolicy().max_backoff_after(n) for n in (1, 2, 3, 50)]
            [0.1, 0.2, 0.4, 5.0]
        """
        return min(self.max_backoff, self.initial_backoff * 2.0 ** min(attempt - 1, 60))


def as_policy(retry: RetryPolicy | int) -> RetryPolicy:
    """The policy that a `retry=` argument means: itself, or so many attempts.

    Raises:
        TypeError: it is neither a policy nor an int.
        ValueError: an int below 1.
    """
    if isinstance(retry, RetryPolicy):
        return retry
    if isinstance(retry, bool) or not isinstance(retry, int):
        raise TypeError(f"retry must be a RetryPolicy or a number of attempts, but got {retry!r}")
    return RetryPolicy(max_attempts=retry)


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments that `headrace.DataLoader` adds to torch's.

    Attributes:
        transform: applied to each sample, in the CPU workers; None for nothing.
        concurrency: how many samples are being fetched at once, across batches; ``"auto"`` finds out.
        memory_budget: bytes that may be fetched, or being fetched, and not yet taken by the consumer; None for no
            bound.
        placement: where the engine runs. ``"thread"``: in a daemon thread of this process. ``"process"``: in a process
            of its own. ``"auto"``: an async dataset with workers in a process, all else in a thread.
        on_error: the policy for samples that fail.
        executor: what the CPU workers are: ``"process"`` or ``"thread"``.
        retry: how datasets of headrace try failed requests again; None leaves it to the dataset.
        hedge: ``"auto"``: a fetch that holds up the next batch for longer than is usual is begun a second time, and the
            first answer counts. None: never.
        seed: what shuffling and each batch's randomness derive from; None: torch's generator, as in torch.
        device: where batches are copied to, as torch takes it, or ``"auto"``; None for host memory.
        device_prefetch: for how many batches, beside the one in use, copies may be under way.
    """

    transform: Callable[[Any], Any] | None = None
    concurrency: int | Literal["auto"] = "auto"
    memory_budget: int | None = MEMORY_BUDGET
    placement: Placement = "auto"
    on_error: OnError = "raise"
    executor: ExecutorKind = "process"
    retry: RetryPolicy | None = None
    hedge: Hedge | None = None
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
        if self.memory_budget is not None:
            if isinstance(self.memory_budget, bool) or not isinstance(self.memory_budget, int):
                raise TypeError(f"memory_budget must be an int of bytes, or None, but got {self.memory_budget!r}")
            if self.memory_budget < 1:
                raise ValueError(f"memory_budget must be at least 1 byte, or None, but got {self.memory_budget}")
        if self.placement not in ("auto", "thread", "process"):
            raise ValueError(f'placement must be "auto", "thread" or "process", but got {self.placement!r}')
        if self.executor not in ("process", "thread"):
            raise ValueError(f'executor must be "process" or "thread", but got {self.executor!r}')
        error_policy(self.on_error)
        if self.retry is not None and not isinstance(self.retry, RetryPolicy):
            raise TypeError(f"retry must be a RetryPolicy, a number of attempts or None, but got {self.retry!r}")
        if self.hedge not in (None, "auto"):
            raise ValueError(f'hedge must be "auto" or None, but got {self.hedge!r}')
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
        """The number of samples that may be fetched at once, at most."""
        return most_concurrency() if self.concurrency == "auto" else self.concurrency


def most_concurrency() -> int:
    """How many fetches "auto" may come to: each can hold a connection, and half of the descriptors are for the rest."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST_CONCURRENCY // 2
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MOST_CONCURRENCY
    return max(1, min(MOST_CONCURRENCY, descriptors // 2))


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
