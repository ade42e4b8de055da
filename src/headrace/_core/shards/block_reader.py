"""Samples in blocks that are produced one block ahead of the reader."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

from headrace._core.eventloop.per_loop import end_all


class Block(NamedTuple):
    """Samples that are produced together.

    Attributes:
        samples: in order.
        error: raised after the samples; the last block if there is one.
        end: whether this is the last block.
    """

    samples: deque[Any]
    error: Exception | None = None
    end: bool = False


class BlockReader(ABC):
    """Produces each block while the previous one is used; the first one at once."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Block] | None = asyncio.get_running_loop().create_task(self._next_block())

    async def block(self) -> Block:
        """The next block; the last one may be empty."""
        assert self._task is not None
        await asyncio.wait((self._task,))  # loses nothing when it is cancelled
        block = self._task.result()
        self._task = None if block.end else asyncio.get_running_loop().create_task(self._next_block())
        return block

    async def aclose(self) -> None:
        if self._task is not None:
            await end_all([self._task])
            self._task = None

    @abstractmethod
    async def _next_block(self) -> Block:
        """Produce the next block; an exception becomes its `error`."""
