"""A stream in another order, by windows of a buffer's size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace._core.interface.epochs import Order
from headrace._core.interface.iterators import StreamIterator
from headrace._core.interface.reread import Reread
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    expect_int,
    expect_same,
    snapshot,
)
from headrace._core.seeding import batch_seed

T = TypeVar("T")


class _Window(Generic[T]):
    """Samples that are permuted together.

    Attributes:
        number: of the window.
        samples: those that are left, or have been read so far.
        given: number of samples given.
        read: number of samples read for it, once it is complete.
        errors: number of errors before them.
        start: the position before it; None before it is read.
    """

    __slots__ = ("errors", "given", "number", "read", "samples", "start")

    def __init__(self, number: int, given: int = 0) -> None:
        self.number = number
        self.samples: list[T] = []
        self.given = given
        self.read = self.errors = 0
        self.start: Callable[[], State] | None = None


class ShuffleBuffer(StreamIterator[T]):
    """Another order: each window of `size` samples is permuted. For each sample given, one of the next window is read.

    It depends only on `order` and the order of `inner`. A sample moves by less than `size` places, and never leaves its
    window. In TensorFlow's `Dataset.shuffle`, each sample that enters the buffer replaces one drawn at random, so that
    a sample can be delayed without bound, and the samples in the buffer can be from anywhere in the stream: its state
    would be the samples themselves. Here it is the position before the window, from which the window is read again, and
    what had been read of the next one.
    """

    operation = "shuffle"

    def __init__(self, inner: ResumableIterator[T], size: int, order: Order) -> None:
        super().__init__(inner)
        self._size = size
        self._order = order
        self._key = order.key()
        self._window = _Window[T](-1)
        self._next = _Window[T](0)
        self._random = random.Random()
        self._reread = Reread()
        self._saved: State = {}  # the position while samples are read again
        self._ended = False
        self._closed = False

    async def __anext__(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        if not self._window.samples or self._reread.left:
            await self._begin_window()
        if self._window.given and not self._ended and len(self._next.samples) < self._size:
            await self._read_one()
        self._window.given += 1
        return self._draw()

    def _draw(self) -> T:
        samples = self._window.samples
        # To remove an element from the middle of a list in constant time, swap it with the last.
        chosen = int(self._random.random() * len(samples))
        samples[chosen], samples[-1] = samples[-1], samples[chosen]
        return samples.pop()

    async def _begin_window(self) -> None:
        while not self._window.samples:
            following = self._next
            while not self._ended and len(following.samples) < self._size:
                if self._reread.left:
                    await self._reread.drop_one(self._read_again, self.operation)
                else:
                    await self._read_one()
            if not following.samples:
                raise StopAsyncIteration
            following.read = len(following.samples)
            self._window, self._next = following, _Window(following.number + 1)
            self._random.seed(batch_seed(self._key, 0, following.number))
            for _ in range(min(following.given, len(following.samples))):
                self._draw()
        await self._reread.drop(self._read_again, self.operation)

    async def _read_one(self) -> None:
        """Read a sample of the next window, an error, or the end."""
        following = self._next
        if following.start is None:
            following.start = snapshot(self._inner)
        try:
            following.samples.append(await anext(self._inner))
        except StopAsyncIteration:
            self._ended = True
        except Exception:  # of user code: counted, since it takes a place when the window is read again
            following.errors += 1
            raise

    async def _read_again(self) -> None:
        await self._read_one()
        if self._ended:
            raise StopAsyncIteration

    def _position(self) -> State:
        if self._reread.left:
            return self._saved
        window = self._window if self._window.samples else self._next
        start = window.start or snapshot(self._inner)
        read = len(self._next.samples) + self._next.errors
        errors = self._next.errors
        rest: State | None = None
        if window is self._window:
            read, errors = read + window.read + window.errors, errors + window.errors
            after = self._next.start or snapshot(self._inner)
            rest = {"length": window.read, "errors": window.errors, "after": after()}
        return {
            "size": self._size,
            **self._order.to_state(),
            "window": window.number,
            "given": window.given,
            "read": read,
            "errors": errors,
            "inner": start(),
            "rest": rest,  # of the current window, for a reader that continues after it
        }

    def _restore(self, state: State) -> None:
        expect_same(state, "size", self._size)
        self._order = self._order.restored(state)
        self._key = self._order.key()
        self._next = _Window(expect_int(state, "window"), expect_int(state, "given", most=self._size))
        self._reread = Reread(expect_int(state, "read"), expect_int(state, "errors"))
        self._saved = {name: value for name, value in state.items() if name != "operation"}
        super()._restore(state)

    async def aclose(self) -> None:
        self._closed = True
        await super().aclose()
