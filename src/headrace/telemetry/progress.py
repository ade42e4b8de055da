"""One line on a running iteration: its position, its rate, and what it waits for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, Protocol, TextIO, TypeVar

from headrace._core.rankinfo import own_rank
from headrace.errors import UnknownRankError
from headrace.telemetry.displays import choose_display
from headrace.telemetry.exported import counters_of
from headrace.telemetry.live_line import LiveLine
from headrace.telemetry.report import make_report

__all__ = ["Batches", "Progress", "progress"]

T_co = TypeVar("T_co", covariant=True)
LIMIT_BATCHES = 256  # of which the limit is computed, in 5 ms


class Batches(Protocol[T_co]):
    """A loader, for `for` and for `async for`."""

    def __iter__(self) -> Iterator[T_co]: ...
    def __aiter__(self) -> AsyncIterator[T_co]: ...
    def __len__(self) -> int: ...


def progress(
    loader: Batches[T_co], *, name: str = "", interval: float | None = None, file: TextIO | None = None
) -> Progress[T_co]:
    """Show, while a loader is iterated, the batch, the rate, the remaining time, the waiting share and the limit.

    In a terminal and in a notebook a line that changes, below what the program prints meanwhile; in a file or pipe a
    line every 30 seconds, and one at the end. On ranks other than 0 nothing. A thread draws it, so that a loader that
    does not answer is seen; a batch costs 2 µs. The environment variable NO_COLOR is heeded.

    Args:
        loader: a `DataLoader`. Each iteration over the result is one over the loader.
        name: what the line begins with.
        interval: seconds between two lines; by default 0.5, and 30 in a file or pipe.
        file: where the line is shown; by default standard error, or the notebook.

    Returns:
        An iterable over the loader's batches, for `for` and for `async for`, with the loader's length.

    Raises:
        TypeError: `loader` is no `DataLoader`.
        ValueError: `interval` is not positive.

    Example:
        >>> import headrace as hr
        >>> loader = hr.DataLoader(list(range(8)), batch_size=4)
        >>> for batch in hr.progress(loader, name="train"): print(batch)
        tensor([0, 1, 2, 3])
        tensor([4, 5, 6, 7])
    """
    counters_of(loader, "headrace.progress")
    if interval is not None and not interval > 0:
        raise ValueError(f"interval must be a positive number of seconds, but got {interval}")
    return Progress(loader, name, interval, file)


class Progress(Generic[T_co]):
    """A loader whose iterations show a line; see `progress`.

    Args:
        loader: the loader.
        name: what the line begins with.
        interval: seconds between two lines; None for the display's.
        file: where it is shown; None for standard error, or the notebook.
    """

    def __init__(self, loader: Batches[T_co], name: str, interval: float | None, file: TextIO | None) -> None:
        self._loader = loader
        self._name = name
        self._interval = interval
        self._file = file

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[T_co]:
        # The loader begins first: a thread that is there already would be in the way of workers that are forked.
        line, batches = self._line(), iter(self._loader)
        return batches if line is None else _Shown(batches, line.begin())

    def __aiter__(self) -> AsyncIterator[T_co]:
        line, batches = self._line(), aiter(self._loader)
        return batches if line is None else _ShownAsync(batches, line.begin())

    def _line(self) -> LiveLine | None:
        with contextlib.suppress(UnknownRankError):  # which the loader raises, unless it has data_parallel=
            if own_rank().rank:
                return None
        display = choose_display(self._file)
        if display is None:
            return None
        loader: Any = self._loader
        control = loader._control
        return LiveLine(
            control.counters,
            display,
            report=lambda: make_report(control.counters.log.records(LIMIT_BATCHES), control.setup(loader)),
            name=self._name,
            epoch=control.next_epoch,
            batches=_length(loader),
            interval=self._interval or display.interval,
        )


def _length(loader: Batches[object]) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a stream
        return None


class _Shown(Iterator[T_co]):
    """The iterator of `for`: when it is dropped, the line ends."""

    def __init__(self, batches: Iterator[T_co], line: LiveLine) -> None:
        self._batches = batches
        self._line = line
        weakref.finalize(self, line.end)

    def __next__(self) -> T_co:
        try:
            return next(self._batches)
        except StopIteration:
            self._line.end(complete=True)
            raise
        except KeyboardInterrupt:  # its traceback would hold this, and come before the end of the line
            self._line.end()
            raise


class _ShownAsync(AsyncIterator[T_co]):
    """The iterator of `async for`: when it is dropped, the line ends."""

    def __init__(self, batches: AsyncIterator[T_co], line: LiveLine) -> None:
        self._batches = batches
        self._line = line
        weakref.finalize(self, line.end)

    async def __anext__(self) -> T_co:
        try:
            return await anext(self._batches)
        except StopAsyncIteration:
            self._line.end(complete=True)
            raise
