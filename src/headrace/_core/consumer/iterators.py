"""The iterators of an epoch, for `for` and for `async for`."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sized
from typing import TypeVar

import anyio.lowlevel
from torch.autograd.profiler import record_function

from headrace._core.consumer.epoch import WAIT, Epoch
from headrace._core.interface.resumable import State
from headrace._core.torchcompat.private import profiler_enabled

T_co = TypeVar("T_co", covariant=True)


class BatchIterator(Iterator[T_co]):
    """The iterator of `for`: blocks in `next()` until a batch is ready.

    Args:
        epoch: the epoch it iterates over; owned from here on.
        loader: kept alive as long as the iterator: dropping a loader ends its engine.
    """

    def __init__(self, epoch: Epoch, loader: Sized) -> None:
        self._epoch = epoch
        self._loader = loader
        self._turn = threading.RLock()

    def __next__(self) -> T_co:
        record = _begin_record(self) if profiler_enabled() else None
        try:
            with self._turn:  # threads that share an iterator take turns
                while (batch := self._epoch.poll()) is WAIT:
                    self._epoch.wait()
                return batch  # type: ignore[no-any-return]
        finally:
            if record is not None:
                record.__exit__(None, None, None)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self, lag: int = 0) -> State:
        """The state of this iteration, for the `load_state_dict` of a loader; see `DataLoader.state_dict`."""
        return self._epoch.state(lag).to_dict()

    @property
    def last_point(self) -> object:
        """The position after the last batch that was given out: another object after each."""
        return self._epoch.last_point

    def close(self) -> None:
        """Stop fetching for this epoch; the loader stays usable."""
        self._epoch.close()


class AsyncBatchIterator(AsyncIterator[T_co]):
    """The iterator of `async for`: waits in `anext()` on the caller's event loop (asyncio, uvloop, trio).

    Args:
        epoch: the epoch it iterates over; owned from here on.
        loader: kept alive as long as the iterator: dropping a loader ends its engine.
    """

    def __init__(self, epoch: Epoch, loader: Sized) -> None:
        self._epoch = epoch
        self._loader = loader

    async def __anext__(self) -> T_co:
        # Other tasks of the caller's loop get their turn even while batches are always ready.
        await anyio.lowlevel.checkpoint()
        record = _begin_record(self) if profiler_enabled() else None
        try:
            while (batch := self._epoch.poll()) is WAIT:
                await self._epoch.wait_async()
        except StopIteration:
            raise StopAsyncIteration from None
        finally:
            if record is not None:
                record.__exit__(None, None, None)
        return batch  # type: ignore[no-any-return]

    def state_dict(self, lag: int = 0) -> State:
        """The state of this iteration, for the `load_state_dict` of a loader; see `DataLoader.state_dict`."""
        return self._epoch.state(lag).to_dict()

    async def aclose(self) -> None:
        """Stop fetching for this epoch; the loader stays usable."""
        self._epoch.close()


def _begin_record(iterator: object) -> record_function:
    """Begin the profiler's record of a call of `next()`, named as torch's is; tools look for both ends of the name.

    In `async for` it lasts until the batch is there: what other tasks of the loop do meanwhile is shown inside it.
    """
    record = record_function(f"enumerate(DataLoader)#{type(iterator).__name__}.__next__")
    record.__enter__()  # type: ignore[no-untyped-call]
    return record
