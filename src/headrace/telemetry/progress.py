"""A progress bar of tqdm with a loader's rate, waiting share and limit."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, Protocol, TextIO, TypeVar

from headrace._core.ranks.rankinfo import own_rank
from headrace.errors import UnknownRankError
from headrace.telemetry.counters import Counters, counters_of
from headrace.telemetry.formatting import rate, share
from headrace.telemetry.report import make_report

__all__ = ["Batches", "progress"]

T_co = TypeVar("T_co", covariant=True)
LIMIT_BATCHES = 256  # of which the limit is computed, in 5 ms
LIMIT_SHARE = 500  # times what that takes, until it is computed again
WINDOW = 20  # refreshes over which rate and waiting share are taken


class Batches(Protocol[T_co]):
    """A loader, for `for` and for `async for`."""

    def __iter__(self) -> Iterator[T_co]: ...
    def __aiter__(self) -> AsyncIterator[T_co]: ...
    def __len__(self) -> int: ...


def progress(
    loader: Batches[T_co], *, name: str = "", interval: float | None = None, file: TextIO | None = None
) -> Batches[T_co]:
    """Show a tqdm progress bar while a loader is iterated, with the rate, the waiting share and the limit.

    It is drawn by the iteration itself, after a batch. On ranks other than 0 nothing is shown.

    Args:
        loader: a `DataLoader`. Each iteration over the result is one over the loader.
        name: what the bar begins with.
        interval: seconds between two updates; by default 0.5, and 30 where standard error, or `file`, is no terminal.
        file: where the bar is shown; by default standard error, or the notebook.

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
    return _Progress(loader, name, interval, file)


class _Progress(Generic[T_co]):
    def __init__(self, loader: Batches[T_co], name: str, interval: float | None, file: TextIO | None) -> None:
        self._loader = loader
        self._options = name, interval, file

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[T_co]:
        return _Iteration(iter(self._loader), _Line(self._loader, *self._options))

    def __aiter__(self) -> AsyncIterator[T_co]:
        return _Iteration(aiter(self._loader), _Line(self._loader, *self._options))


class _Iteration(Iterator[T_co], AsyncIterator[T_co]):
    """One iteration, of either kind: when it is dropped, the bar is closed."""

    def __init__(self, batches: Any, line: _Line) -> None:
        self._batches = batches
        self._line = line
        weakref.finalize(self, line.close)

    def __next__(self) -> T_co:
        try:
            batch: T_co = next(self._batches)
        except StopIteration:
            self._line.close()
            raise
        self._line.on_batch()
        return batch

    async def __anext__(self) -> T_co:
        try:
            batch: T_co = await anext(self._batches)
        except StopAsyncIteration:
            self._line.close()
            raise
        self._line.on_batch()
        return batch


class _Line:
    """The bar of one iteration."""

    def __init__(self, loader: Any, name: str, interval: float | None, file: TextIO | None) -> None:
        from tqdm.auto import tqdm

        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # without tqdm's thread, which would outlive the iteration

        Bar.set_lock(threading.RLock())  # tqdm's own is of multiprocessing
        self._loader = loader
        self._counters: Counters = loader._control.counters
        try:
            total = len(loader)
        except (TypeError, NotImplementedError):  # a stream
            total = None
        shown = True
        with contextlib.suppress(UnknownRankError):  # which the loader raises, unless it has data_parallel=
            shown = own_rank().rank == 0
        stream = file or sys.stderr
        self._interval = interval or (0.5 if "ipykernel" in sys.modules or stream.isatty() else 30.0)
        head = f"{name} epoch {loader._control.next_epoch - 1}".lstrip()
        self._bar = Bar(
            total=total, desc=head, unit="batch", file=file, mininterval=0, dynamic_ncols=True, disable=not shown
        )
        self._marks = deque([self._mark()], WINDOW)
        self._position: int | None = None
        self._due = time.perf_counter() + self._interval
        self._limit, self._limit_due = "", 0.0

    def _mark(self) -> tuple[float, int, float]:
        """The sums now: time, samples, seconds of waiting."""
        stats = self._counters.snapshot()
        return time.perf_counter(), stats.samples, stats.wait_seconds

    def on_batch(self) -> None:
        """Draw the bar, if that is due."""
        if time.perf_counter() >= self._due or self._position is None:
            self._show()

    def _show(self) -> None:
        (record,) = self._counters.log.records(1) or (None,)
        if record is None or self._bar.disable:
            self._due = float("inf")
            return
        position = record.number + 1
        if self._position is None:  # the first batch, which a resumed epoch begins with in the middle
            self._position = self._bar.n = self._bar.initial = self._bar.last_print_n = position - 1
        before, after = self._marks[0], self._mark()
        self._marks.append(after)
        now, samples, waited = (new - old for new, old in zip(after, before, strict=True))
        if after[0] >= self._limit_due:
            report = make_report(self._counters.log.records(LIMIT_BATCHES), self._loader._control.setup(self._loader))
            change = ", ".join(f"{name}={value!r}" for name, value in report.change.items())
            self._limit = f", limit: {report.limit}" + (f", try {change}" if change else "")
            self._limit_due = after[0] + max(1.0, LIMIT_SHARE * (time.perf_counter() - after[0]))
        said = f"{rate(samples / max(now, 1e-9))} samples/s, waiting {share(min(1.0, waited / max(now, 1e-9)))}"
        self._bar.set_postfix_str(said + self._limit, refresh=False)
        with contextlib.suppress(OSError, ValueError):  # the file was closed: training goes on
            self._bar.update(max(0, position - self._bar.n))
        self._due = time.perf_counter() + self._interval

    def close(self) -> None:
        """Draw the bar for the last time; any number of times."""
        if not self._bar.disable:
            self._limit_due = 0.0
            self._show()
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
