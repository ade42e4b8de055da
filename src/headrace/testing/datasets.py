"""Datasets with a latency, for tests and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast

from headrace._core.interface.map_style import AsyncDataset

__all__ = ["SlowDataset"]

T_co = TypeVar("T_co", covariant=True)


class SlowDataset(AsyncDataset[T_co]):
    """A map-style dataset whose samples take `latency` seconds and no CPU.

    Args:
        length: number of samples.
        latency: seconds that `aget` waits.
        make: makes the sample at an index; by default the index itself.

    Example:
        >>> SlowDataset(8, 0.02, make=lambda i: i * i)[3]
        9
    """

    def __init__(self, length: int, latency: float, make: Callable[[int], T_co] | None = None) -> None:
        self.length = length
        self.latency = latency
        self.make = make

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> T_co:
        """Wait, then make the sample; raises `IndexError` past the end."""
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is out of range for {self.length} samples")
        await asyncio.sleep(self.latency)
        index %= self.length
        return cast("T_co", index) if self.make is None else self.make(index)
