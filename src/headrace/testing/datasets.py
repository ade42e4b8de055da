"""Datasets that wait, for tests and measurements of whatever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from headrace._core.interface.map_style import AsyncDataset

__all__ = ["SlowDataset"]

T_co = TypeVar("T_co", covariant=True)


def _itself(index: int) -> Any:
    return index


class SlowDataset(AsyncDataset[T_co]):
    """A dataset whose every sample takes `latency` seconds to arrive and costs nothing else.

    Args:
        length: how many samples there are.
        latency: seconds that `aget` waits.
        make: what the sample at an index is; the index itself if not given.

    Example:
        >>> SlowDataset(8, 0.02, make=lambda i: i * i)[3]
        9
    """

    def __init__(self, length: int, latency: float, make: Callable[[int], T_co] = _itself) -> None:
        self.length = length
        self.latency = latency
        self.make = make

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> T_co:
        """Wait, then make the sample; IndexError beyond the length."""
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is out of range for {self.length} samples")
        await asyncio.sleep(self.latency)
        return self.make(index % self.length)
