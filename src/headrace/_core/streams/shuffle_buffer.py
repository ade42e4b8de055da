"""A stream in another order, by windows of a buffer's size."""

from __future__ import annotations

import random
from collections.abc import AsyncIterable
from typing import TypeVar

from headrace._core.seeding import batch_seed
from headrace._core.streams.operation import Mark, ReplayOperation
from headrace._core.streams.order import Order

T = TypeVar("T")


class ShuffleBuffer(ReplayOperation[T]):
    """Another order: each window of `size` samples is permuted. For each sample given, one of the next window is read.

    It depends only on `order` and the order of `source`. A sample moves by less than `size` places, and never leaves
    its window. In TensorFlow's `Dataset.shuffle`, each sample that enters the buffer replaces one drawn at random, so
    that a sample can be delayed without bound, and the samples in the buffer can be from anywhere in the stream: its
    state would be the samples themselves. Here it is the position before the window, from which the window is read
    again, and the number of samples given of it.
    """

    operation = "shuffle"
    options = ("size",)
    fields = (("order", Order), ("window", int))

    def __init__(self, source: AsyncIterable[T], size: int, order: Order) -> None:
        super().__init__(source)
        self._size = size
        self._order = order
        self._window = 0  # number of the window that is read
        self._ahead: list[T] = []  # its samples
        self._ahead_errors = 0  # errors before them
        self._ahead_mark: Mark | None = None  # the position before it
        self._samples: list[T] = []  # left of the window that is given
        self._random = random.Random()
        self._ended = False
        self._closed = False

    async def _next(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        samples = self._samples
        if samples:
            if not self._ended and len(self._ahead) < self._size:
                await self._read_one()
        else:
            while not self._ended and len(self._ahead) < self._size:
                await self._read_one()
            samples = self._begin_window()
        # To remove an element from the middle of a list in constant time, swap it with the last.
        chosen = int(self._random.random() * len(samples))
        samples[chosen], samples[-1] = samples[-1], samples[chosen]
        return samples.pop()

    def _begin_window(self) -> list[T]:
        if not self._ahead:
            raise StopAsyncIteration
        self._mark = self._latest_mark()
        self._random.seed(batch_seed(self._order.key(), 0, self._window))
        self._window += 1
        self._samples, self._ahead, self._ahead_errors, self._ahead_mark = self._ahead, [], 0, None
        return self._samples

    async def _read_one(self) -> None:
        """Read a sample of the next window, an error, or the end."""
        if self._ahead_mark is None:
            self._ahead_mark = self._new_mark()
        try:
            self._ahead.append(await anext(self._inner))
        except StopAsyncIteration:
            self._ended = True
        except Exception:  # of user code
            self._ahead_errors += 1
            raise

    def _latest_mark(self) -> Mark:
        """The position before the current window; where that ends, that before the next, with the errors in it."""
        if self._samples and self._mark is not None:
            return self._mark
        mark, errors = self._ahead_mark or self._new_mark(), self._ahead_errors
        return Mark(self._given - errors, self._errors - errors, mark.position)

    async def aclose(self) -> None:
        self._closed = True
        await super().aclose()
