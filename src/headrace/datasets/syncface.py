"""The sync face of async datasets: `dataset[i]` and a plain `for` wait for a background loop of the process."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncIterable, Iterator
from typing import Generic, TypeVar

from headrace.loopthread import LoopThread

__all__ = ["SyncStream", "face_loop"]

T_co = TypeVar("T_co", covariant=True)
_END = object()
_lock = threading.Lock()
_face: tuple[int, LoopThread] | None = None


def face_loop() -> LoopThread:
    """The background loop of the sync face: one for each process, made at first use, lives as long as the process."""
    global _face
    with _lock:
        if _face is None or _face[0] != os.getpid():
            loop = LoopThread("headrace-sync-face")
            atexit.register(loop.close, 1.0)
            _face = (os.getpid(), loop)
        return _face[1]


class SyncStream(Iterator[T_co], Generic[T_co]):
    """An async stream, read from the background loop one sample at a time."""

    def __init__(self, dataset: AsyncIterable[T_co]) -> None:
        self._loop = face_loop()
        self._stream = aiter(dataset)

    def __next__(self) -> T_co:
        sample = self._loop.run(self._read())
        if sample is _END:
            raise StopIteration
        return sample  # type: ignore[return-value]

    async def _read(self) -> T_co | object:
        return await anext(self._stream, _END)
