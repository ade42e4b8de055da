"""Delivery of batches on the consumer's thread: unpickling, pinning, and torch's warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from headrace._core.batches import HostBatch
from headrace._core.call_site import users_stacklevel
from headrace._core.failure import Failure, Stage
from headrace._core.transport.pickling import PickledPayload
from headrace.errors import NotPicklableError


def opened(host: HostBatch) -> Any:
    """The batch's data, on the consumer's thread: its classes are the consumer's."""
    if not isinstance(host.data, PickledPayload):
        return host.data
    try:
        return host.data.loads()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        remedy = "Its classes have to be importable, or picklable by value, in this process too."
        unpicklable = NotPicklableError(what="the return value of collate_fn", reason=reason, remedy=remedy)
        raise Failure.caught(unpicklable, stage=Stage.CLAIM, batch=host.plan.number).exception() from error


class Delivery:
    """Finalizes each batch of an epoch, and warns if a stream yields more batches than its `len`.

    Args:
        finalize: pins a batch, or claims it from its copy to a device; given the batch and its number.
        dataset: the user's, to be named in the warning.
        announced: `len(dataset)` in this epoch, in samples; None if the loader's length was never read, or if the
            dataset is no stream.
        copies: whether each worker reads a copy of the stream.
    """

    def __init__(
        self, *, finalize: Callable[[Any, int], Any] | None, dataset: object, announced: int | None, copies: bool
    ) -> None:
        self._finalize = finalize
        self._dataset = dataset
        self._announced = announced
        self._copies = copies
        self._given = 0

    def __call__(self, batch: Any, number: int) -> Any:
        """The batch of this number as the consumer gets it."""
        self._given += 1
        if self._announced is not None and self._given > self._announced:
            self._warn()
        return batch if self._finalize is None else self._finalize(batch, number)

    def _warn(self) -> None:
        # Torch's message, which compares batches with samples.
        message = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._announced}"
            f"(when accessing len(dataloader)), but {self._given} samples have been fetched. "
        )
        if self._copies:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(message, stacklevel=users_stacklevel())


def should_pin(pin_memory: bool, device: str) -> bool:
    """Whether batches will be pinned; warns, in torch's words, where they were to be and will not.

    Args:
        pin_memory: the loader's argument.
        device: its `pin_memory_device`, which torch ignores.
    """
    if not pin_memory:
        return False
    if device:
        _warn_at_iter(
            f"pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'."
        )
    if not torch.accelerator.is_available():
        _warn_at_iter(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
        )
        return False
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == "mps":
        _warn_at_iter(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used."
        )
        return False
    return True


def check_pin_memory_device(named: str, device: torch.device) -> None:
    """Raise `ValueError` where `pin_memory_device` names no device, or another than the one that batches go to.

    Args:
        named: the loader's `pin_memory_device`.
        device: its `device`.
    """
    try:
        pinned = torch.device(named)
    except RuntimeError as error:
        raise ValueError(f"pin_memory_device={named!r} is no device: {str(error).splitlines()[0]}") from error
    both_numbered = pinned.index is not None and device.index is not None
    if pinned.type != device.type or (both_numbered and pinned.index != device.index):
        raise ValueError(
            f"device={str(device)!r} and pin_memory_device={named!r} disagree; leave out pin_memory_device, "
            "whose memory serves every device"
        )


def _warn_at_iter(message: str) -> None:
    warnings.warn(message, stacklevel=users_stacklevel())
