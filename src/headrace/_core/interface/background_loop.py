"""Blocking reads of async datasets: `dataset[i]` and a plain `for` wait for a background loop of the process."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar

from headrace._core.eventloop.loop_thread import LoopThread
from headrace._core.eventloop.per_loop import advise
from headrace._core.interface.async_contexts import context_managers, entered
from headrace._core.interface.fetch_plan import Functions, apply_functions
from headrace._core.interface.resumable import (
    ResumableIterator,
    State,
    expect_state,
    start_stream,
    warn_of_rereading,
)
from headrace._core.rankinfo import reader_divides, reading_divided

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_END = object()
_lock = threading.Lock()
_loop: tuple[int, LoopThread] | None = None


def background_loop() -> LoopThread:
    """The background loop of this process: started at first use, for the life of the process."""
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid() or not _loop[1].alive:
            _loop = (os.getpid(), LoopThread("headrace-background-loop"))
        return _loop[1]


def _close_at_exit() -> None:
    if _loop is not None:
        _loop[1].close(1.0)


atexit.register(_close_at_exit)  # at import: hooks run in reverse order, and engines that use the loop close first


def read_blocking(dataset: Any, read: Callable[[], Awaitable[T]]) -> T:
    """Await ``read()`` on the background loop, where `dataset` is entered first if it is a context manager."""

    async def reading() -> T:
        async with entered(dataset):
            try:
                return await read()
            except RuntimeError as error:
                advise(error)
                raise

    return background_loop().run(reading())


class SyncStream(Iterator[T_co], Generic[T_co]):
    """An async stream, read from the background loop one sample at a time; `functions` run on the reading thread."""

    def __init__(self, dataset: AsyncIterable[Any], functions: Functions = ()) -> None:
        self._dataset = dataset
        self._functions = functions
        self._divided = reader_divides()  # a context variable of this thread
        # After `__aenter__`, if there is one: `__aiter__` may use resources that it opens.
        self._stream: ResumableIterator[Any] | None = None if context_managers(dataset) else start_stream(dataset)
        self._saved: State | None = None  # to be restored after `__aenter__`

    def __next__(self) -> T_co:
        sample = read_blocking(self._dataset, self._read)
        if sample is _END:
            raise StopIteration
        transformed: T_co = apply_functions(self._functions, sample)
        return transformed

    async def _read(self) -> Any:
        with reading_divided(self._divided):
            if self._stream is None:
                self._stream = start_stream(self._dataset)
                if self._saved is not None:
                    self._stream.load_state_dict(self._saved)
            return await anext(self._stream, _END)

    def state_dict(self) -> State:
        """The position after the last sample, for `load_state_dict`; torchdata's `StatefulDataLoader` calls this."""

        async def position() -> State | None:  # on the loop, where samples are read ahead
            return self._saved if self._stream is None else self._stream.state_dict()

        return {"stream": background_loop().run(position())}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; before the first sample.

        Raises:
            StateError: the state is of another stream, or damaged.
        """
        if "stream" in state and state["stream"] is None:
            return
        warn_of_rereading(state)
        self._saved = expect_state(state, "stream")
        if self._stream is not None:
            with reading_divided(self._divided):
                self._stream.load_state_dict(self._saved)
