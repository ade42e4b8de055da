"""Samples in blocks, one block ahead of whoever takes them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Block:
    """Samples that are made at once.

    Attributes:
        samples: in order.
        error: what stands behind them; nothing more comes then.
        end: nothing more comes.
    """

    samples: deque[Any]
    error: Exception | None = None
    end: bool = False


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


class BlockReader(ABC):
    """Makes one block after the other, each while the one before it is used; begins at once."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Block] | None = asyncio.get_running_loop().create_task(self._next_block())

    async def block(self) -> Block:
        """The next samples; they may be none where nothing comes behind them."""
        assert self._task is not None
        await asyncio.wait((self._task,))  # a reader that gives up waiting loses nothing
        block = self._task.result()
        self._task = None if block.end else asyncio.get_running_loop().create_task(self._next_block())
        return block

    async def aclose(self) -> None:
        """End what is under way."""
        if self._task is not None:
            await end_all([self._task])
            self._task = None

    @abstractmethod
    async def _next_block(self) -> Block:
        """Make the next block; what goes wrong is its `error`."""
