"""Batches in page-locked host memory, for loops that copy them to a device themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from headrace._core.call_site import users_stacklevel
from headrace._core.device.containers import replaced
from headrace._core.failure import Failure, Stage
from headrace._core.torchcompat.private import pin_memory as pin_batch


class Pinning:
    """Copies each batch to pinned memory, as torch's loader does, in the consumer's thread.

    The memory is of torch's own allocator, never the slab of the batch, although a slab can be page-locked in place: a
    `non_blocking` copy may still read a batch that the user has dropped. torch's allocator knows of the copy and keeps
    the memory until then; a slab would be reused.
    """

    def __init__(self, pinned: Callable[[int], torch.Tensor]) -> None:
        self._pinned = pinned
        self._refused = False

    def __call__(self, batch: object, number: int) -> object:
        """The batch of this number, pinned; unchanged, after one warning, if there is no more pinned memory."""
        if self._refused:
            return batch
        try:
            return pin_batch(batch)  # type: ignore[no-untyped-call]
        except Exception as error:
            reason = self._refusal(batch) if isinstance(error, RuntimeError) else None
            if reason is None:  # of the user's own pin_memory(), or of the device
                raise Failure.caught(error, stage=Stage.PIN, batch=number).exception() from error.__cause__
        self._refused = True
        warnings.warn(
            f"no pinned memory could be allocated ({reason}). The rest of this epoch is in pageable memory: copies to "
            "a device are slower, and the thread that starts one waits for it, non_blocking or not.",
            stacklevel=users_stacklevel(),
        )
        return batch

    def _refusal(self, batch: object) -> str | None:
        """Why memory for the largest tensor of `batch` cannot be pinned; None if it can."""
        largest = 0

        def look(leaf: object) -> object:
            nonlocal largest
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
                largest = max(largest, leaf.numel() * leaf.itemsize)
            return leaf

        replaced(batch, look)
        try:
            self._pinned(largest)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None


def pinned(size: int) -> torch.Tensor:
    """`size` bytes of torch's pinned memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
