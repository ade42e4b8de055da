"""Timing of one epoch, loaded by torch's DataLoader or by headrace."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from demo.interrupts import interrupts_held

__all__ = [
    "Batches",
    "BlockingGets",
    "FixedOrder",
    "Timing",
    "batches_within",
    "time_epoch",
    "torch_loader",
]

Batches = list[list[int]]

WARM_UP = 1  # batches for each worker before the clock starts
# s per sample beside the store's latency, measured 0.7 ms; determines the number of torch's batches
OVERHEAD = 0.002


class FixedOrder:
    """A batch sampler with given batches, so that all loaders get the same.

    Args:
        batch_size: samples in a full batch.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.batches: Batches = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class BlockingGets(Dataset[tuple[torch.Tensor, int]]):
    """A plain torch dataset: `__getitem__` sends a GET and waits for the object.

    Each worker keeps a connection open.

    Args:
        url: the bucket, by plain HTTP.
        keys: the objects.
        transform: CPU work on the bytes of each.
        label_of: returns the label in a key.
    """

    def __init__(
        self,
        url: str,
        keys: Sequence[str],
        transform: Callable[[bytes], torch.Tensor],
        label_of: Callable[[str], int],
    ) -> None:
        self._server = urlsplit(url)
        self._keys = keys
        self._transform = transform
        self._label_of = label_of
        self._connection: http.client.HTTPConnection | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        key = self._keys[index]
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._server.netloc)
        self._connection.request("GET", f"{self._server.path}/{key}")
        response = self._connection.getresponse()
        data = response.read()
        if response.status != http.HTTPStatus.OK:
            raise OSError(f"GET of {key!r}: HTTP status {response.status}")
        return self._transform(data), self._label_of(key)

    def close(self) -> None:
        """Close this process's connection; those of workers end with them."""
        if self._connection is not None:
            self._connection.close()


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples delivered by one loader, and the time.

    Attributes:
        samples: samples delivered.
        labels: the sum of their labels.
        seconds: from `iter()` to the last batch, with workers started before.
    """

    samples: int
    labels: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


class _Loader(Protocol):
    def __iter__(self) -> Iterator[Any]: ...


@contextlib.contextmanager
def torch_loader(
    dataset: Any, order: FixedOrder, workers: int
) -> Iterator[TorchDataLoader[Any]]:
    """Torch's loader with persistent workers, which are ended on exit."""
    with warnings.catch_warnings():
        # more workers than cores: they mostly wait
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader: TorchDataLoader[Any] = TorchDataLoader(
            dataset,
            batch_sampler=order,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        try:
            yield loader
        finally:
            # Torch ends persistent workers only when the loader is collected, and a traceback may
            # hold it.
            iterator, loader._iterator = loader._iterator, None
            if iterator is not None:
                iterator._shutdown_workers()  # type: ignore[attr-defined]


def time_epoch(
    loader: _Loader,
    order: FixedOrder,
    batches: Batches,
    *,
    workers: int,
    on_batch: Callable[[int, float], object],
) -> Timing:
    """Time the loading of `batches`, without the start of the workers.

    Args:
        loader: torch's or headrace's, with `order` as its batch sampler.
        order: the loader's batch sampler.
        batches: the indices of each batch.
        workers: the loader's worker processes.
        on_batch: called with the batches so far, and with the samples per second.
    """
    order.batches = batches[: WARM_UP * max(1, workers)]
    with interrupts_held():
        first = iter(loader)
    _exhaust(first)
    order.batches = batches
    samples = labels = 0
    began = time.perf_counter()
    for number, (_, some) in enumerate(loader, 1):
        samples += len(some)
        labels += int(some.sum())
        on_batch(number, samples / (time.perf_counter() - began))
    return Timing(samples, labels, time.perf_counter() - began)


def _exhaust(batches: Iterable[object]) -> None:
    for _ in batches:
        pass


def batches_within(
    seconds: float, batches: Batches, *, latency: float, workers: int
) -> Batches:
    """As many of the first batches as can be loaded one object at a time in about `seconds`; one a worker at least."""
    each = (latency + OVERHEAD) / max(1, workers)
    ends = itertools.accumulate(len(batch) for batch in batches)
    fitting = sum(end * each <= seconds for end in ends)
    return batches[: max(fitting, workers, 1)]
