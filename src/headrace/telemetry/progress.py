"""A progress bar of tqdm with a loader's rate, waiting share and limit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TextIO, TypeVar

from tqdm.auto import tqdm

from headrace._core.ranks.rankinfo import own_rank
from headrace._core.text import printable, rate, share
from headrace.errors import UnknownRankError
from headrace.telemetry.counters import counters_of
from headrace.telemetry.report import make_report

__all__ = ["progress"]

T_co = TypeVar("T_co", covariant=True)
REPORTED = 256  # batches of which rate, waiting share and limit are computed, in 5 ms
REPORT_SECONDS = 2.0  # until they are computed again


def progress(
    loader: Iterable[T_co], *, name: str = "", file: TextIO | None = None
) -> _Progress[T_co]:
    """Show a tqdm progress bar while a loader is iterated, with the rate, the waiting share and the limit.

    It is drawn by the iteration itself, after a batch: each 0.5 s, or 30 s where standard error, or
    `file`, is no terminal. On ranks other than 0 nothing is shown.

    Args:
        loader: a `DataLoader`. Each iteration over the result is one over the loader.
        name: what the bar begins with.
        file: where the bar is shown; by default standard error, or the notebook.

    Returns:
        An iterable over the loader's batches, for `for` and for `async for`, with the loader's
        length.

    Raises:
        TypeError: `loader` is no `DataLoader`.

    Example:
        >>> import headrace as hr
        >>> loader = hr.DataLoader(list(range(8)), batch_size=4)
        >>> for batch in hr.progress(loader, name="train"): print(batch)
        tensor([0, 1, 2, 3])
        tensor([4, 5, 6, 7])
    """
    counters_of(loader, "headrace.progress")
    return _Progress(loader, name, file)


class _Progress(Generic[T_co]):
    def __init__(self, loader: Any, *options: Any) -> None:
        self._loader, self._options = loader, options

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[T_co]:
        return _Iteration(iter(self._loader), self._loader, *self._options)

    def __aiter__(self) -> AsyncIterator[T_co]:
        return _Iteration(aiter(self._loader), self._loader, *self._options)


class _Bar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # without tqdm's thread, which would outlive the iteration


_Bar.set_lock(threading.RLock())  # tqdm's own is of multiprocessing


class _Iteration(Iterator[T_co], AsyncIterator[T_co]):
    """One iteration, of either kind, and its bar, which is closed when this is dropped."""

    _bar: Any = None

    def __init__(self, batches: Any, loader: Any, name: str, file: TextIO | None) -> None:
        self._batches, self._loader, self._control = batches, loader, loader._control
        self._begun, self._due, shown, total = False, 0.0, True, None
        with suppress(TypeError, NotImplementedError):  # a stream
            total = len(loader)
        with suppress(UnknownRankError):  # which the loader raises, unless it has data_parallel=
            shown = own_rank().rank == 0
        terminal = "ipykernel" in sys.modules or (file or sys.stderr).isatty()
        self._bar = _Bar(
            total=total,
            desc=f"{printable(name)} epoch {self._control.next_epoch - 1}".lstrip(),
            unit="batch",
            file=file,
            mininterval=0.5 if terminal else 30.0,
            dynamic_ncols=True,
            disable=not shown,
        )

    def __next__(self) -> T_co:
        return self._counted(next(self._batches))  # type: ignore[no-any-return]

    async def __anext__(self) -> T_co:
        return self._counted(await anext(self._batches))  # type: ignore[no-any-return]

    def _counted(self, batch: Any) -> Any:
        if not self._bar.disable:
            if time.perf_counter() >= self._due:
                self._describe(behind=1)
                if not self._begun:  # a resumed epoch begins in the middle
                    self._bar.initial = self._bar.last_print_n = self._bar.n
                    self._begun = True
            with suppress(OSError, ValueError):  # the file was closed: training goes on
                self._bar.update()
        return batch

    def _describe(self, behind: int) -> None:
        """Set what stands after the bar, and its position: so many before the last batch, failed ones included."""
        records = self._control.counters.records(REPORTED)
        report = make_report(records, self._control.setup(self._loader))
        said = f"{rate(report.samples / max(report.seconds, 1e-9))} samples/s, waiting {share(report.wait_share)}"
        change = ", ".join(f"{name}={value!r}" for name, value in report.change.items())
        limit = f", limit: {report.limit}" + (f", try {change}" if change else "")
        self._bar.set_postfix_str(said + limit if report.batches else "", refresh=False)
        self._bar.n = max(self._bar.n, records[-1].number + 1 - behind)
        self._due = time.perf_counter() + REPORT_SECONDS

    def __del__(self) -> None:
        """Draw the bar for the last time."""
        if self._bar is not None and not self._bar.disable:
            with suppress(OSError, ValueError, ImportError):  # the last at the interpreter's exit
                if self._begun:
                    self._describe(behind=0)
                self._bar.close()
