"""Blocking reads of async datasets, on a background loop of the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import AsyncIterable, Iterator
from typing import Any, Generic, TypeVar

from headrace._eventloop.loop_thread import LoopThread
from headrace._ranks.rankinfo import bound, reader_divides, reading_divided
from headrace._streams.composition import Functions, apply_functions
from headrace._streams.epochs import session_epoch
from headrace._streams.resumable import start_stream
from headrace._torchcompat.private import outside_workers

T_co = TypeVar("T_co", covariant=True)
_END = object()
_lock = threading.Lock()  # guards `_loop`
_loop: LoopThread | None = None
# Another thread of the parent may hold the lock at a fork.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def background_loop() -> LoopThread:
    """Return the background loop of this process.

    The loop starts at the first use and lives as long as the process.
    """
    global _loop
    with _lock:
        if _loop is None or not _loop.alive:
            _loop = LoopThread("headrace-background-loop")
        return _loop


@atexit.register
def _close_at_exit() -> None:
    if _loop is not None:
        _loop.close(1.0)


class SyncStream(Iterator[T_co], Generic[T_co]):
    """Blocking iterator over an async stream.

    The background loop reads one sample at a time. Functions run on the reading thread. With
    `whole`, the iterator yields all samples in a torch worker too, not only the worker's part.
    """

    def __init__(
        self,
        dataset: AsyncIterable[Any],
        functions: Functions = (),
        *,
        whole: bool = False,
    ) -> None:
        self._functions = functions
        self._place = outside_workers if whole else contextlib.nullcontext
        # From context variables of this thread.
        self._divided = reader_divides()
        self._epoch = bound(session_epoch, session_epoch.get())
        with self._place():
            self._stream = start_stream(dataset)

    def __next__(self) -> T_co:
        with self._place():
            sample = background_loop().run(self._read())
        if sample is _END:
            raise StopIteration
        transformed: T_co = apply_functions(self._functions, sample)
        return transformed

    async def _read(self) -> Any:
        with reading_divided(self._divided), self._epoch:
            return await anext(self._stream, _END)
