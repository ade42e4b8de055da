"""A stream with a given number of samples, so that ranks of unequal shards get the same number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from headrace._core.interface.distributed import Remainder
from headrace._core.interface.iterators import NOTHING, OperationIterator
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    close_iterator,
    expect_bool,
    expect_int,
    expect_same,
    expect_state,
)
from headrace.errors import ShortStreamError, StateError

T = TypeVar("T")


class EqualLength(OperationIterator[T]):
    """A given number of samples: truncated, or extended by the policy `remainder`.

    Args:
        start: returns an iterator; called again for ``"repeat"``, and for ``"pad"`` if it was restored near its end.
        length: number of samples.
        remainder: ``"pad"`` repeats the last sample, ``"repeat"`` starts again; they raise `ShortStreamError` if there
            is no sample, other policies if the iterator ends early.
    """

    operation = "equal length"

    def __init__(self, start: Callable[[], ResumableIterator[T]], length: int, remainder: Remainder) -> None:
        self._start = start
        self._inner = start()
        self._length = length
        self._left = length
        self._remainder = remainder
        self._last: T = NOTHING
        self._gave = False  # whether the current inner iterator has given a sample
        self._restarts = 0
        self._before = _BeforeLast[T]() if remainder == "pad" else None
        self._closed = False

    async def __anext__(self) -> T:
        if self._closed or self._left <= 0:
            await self.aclose()  # stops its read-ahead
            raise StopAsyncIteration
        try:
            sample = await anext(self._inner)
        except StopAsyncIteration:
            if await self._restart():
                return await anext(self)
            sample = self._last
        except Exception:  # of this sample, which counts as a position
            if self._before is not None:
                self._before.count(sample=False)
            raise
        else:
            if self._before is not None:
                self._last = sample
                self._before.count(sample=True)
        self._left -= 1
        self._gave = True
        return sample

    async def _restart(self) -> bool:
        if self._before is not None and self._gave:
            if self._last is NOTHING:
                self._last = await self._before.read_last(self._start)
            return False
        if self._remainder != "repeat" or not self._gave:  # without a sample it would be restarted for ever
            given, self._left = self._length - self._left, 0
            raise ShortStreamError(given=given, declared=self._length, repeats=self._remainder in ("pad", "repeat"))
        await close_iterator(self._inner)
        self._gave = False
        self._restarts += 1
        self._inner = self._start()
        return True

    def _position(self) -> State:
        inner = self._inner.state_dict()
        position: State = {"length": self._length, "left": self._left, "gave": self._gave, "inner": inner}
        position["restarts"] = self._restarts
        if self._before is not None:
            position["before_last"] = self._before.at(inner)
        return position

    def _restore(self, state: State) -> None:
        expect_same(state, "length", self._length)
        self._left = expect_int(state, "left")
        self._gave = expect_bool(state, "gave")
        self._restarts = expect_int(state, "restarts")
        inner = expect_state(state, "inner")
        if self._before is not None:
            self._before.restore(expect_state(state, "before_last"), inner)
        self._inner.load_state_dict(inner)

    async def aclose(self) -> None:
        self._closed = True
        await close_iterator(self._inner)


class _BeforeLast(Generic[T]):
    """Where the last sample of an iterator can be read again: a state before it, and how much was read since."""

    def __init__(self) -> None:
        self._state: State | None = None  # None: from the start
        self._read = 0  # samples and errors since
        self._later: State | None = None  # after these; not yet before the last sample
        self._read_later = 0
        self._gave = False  # whether there is a sample among those

    def count(self, *, sample: bool) -> None:
        """Count a sample or an error."""
        self._read += 1
        self._read_later += 1
        self._gave = self._gave or sample

    def at(self, inner: State) -> State:
        """The state, when `inner` is that of the iterator."""
        if self._gave:  # all samples before the later state can be left out
            self._state, self._read = self._later, self._read_later
        self._later, self._read_later, self._gave = inner, 0, False
        return {"inner": self._state, "read": self._read}

    def restore(self, state: State, inner: State) -> None:
        """Continue from a state."""
        self._state = None if state.get("inner") is None else expect_state(state, "inner")
        self._read = expect_int(state, "read")
        self._later = inner

    async def read_last(self, start: Callable[[], ResumableIterator[T]]) -> T:
        """Read the last sample again.

        Raises:
            StateError: there is none.
        """
        last: T = NOTHING
        iterator = start()
        try:
            if self._state is not None:
                iterator.load_state_dict(self._state)
            for _ in range(self._read):
                try:
                    last = await anext(iterator)
                except StopAsyncIteration:
                    break
                except Exception:  # it was raised when it was read for the first time
                    continue
        finally:
            await close_iterator(iterator)
        if last is NOTHING:
            raise StateError(f"the last sample was among {self._read} that could not be read again")
        return last
