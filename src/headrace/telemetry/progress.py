"""Progress bars of tqdm for loaders."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TextIO, TypeVar

from tqdm.auto import tqdm

from headrace._base.text import printable, rate
from headrace._ranks.rankinfo import own_rank
from headrace.errors import UnknownRankError
from headrace.telemetry.counters import counters_of
from headrace.telemetry.report import make_report

__all__ = ["progress"]

T_co = TypeVar("T_co", covariant=True)
REPORTED = 256  # batches for rate, waiting share and limit, computed in 5 ms
REPORT_SECONDS = 2.0  # seconds between two computations


def progress(
    loader: Iterable[T_co], *, name: str = "", file: TextIO | None = None
) -> _Progress[T_co]:
    """Show a tqdm progress bar while a loader is iterated.

    The bar has the rate, the waiting share and the limit. The iteration itself draws the bar, after
    a batch: every 0.5 s, or every 30 s if standard error, or `file`, is not a terminal. Ranks other
    than 0 show nothing.

    Args:
        loader: a `DataLoader`. Each iteration over the result iterates over the loader.
        name: text at the beginning of the bar.
        file: output of the bar. The default is standard error, or the notebook.

    Returns:
        An iterable over the loader's batches, for `for` and for `async for`, with the loader's
        length.

    Raises:
        TypeError: `loader` is not a `DataLoader`.

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
    monitor_interval = 0  # no thread of tqdm: the thread would outlive the iteration


_Bar.set_lock(threading.RLock())  # tqdm's own lock is of multiprocessing


class _Iteration(Iterator[T_co], AsyncIterator[T_co]):
    """An iteration, sync or async, with its bar.

    The bar is closed when the iteration is garbage-collected.
    """

    _bar: Any = None

    def __init__(self, batches: Any, loader: Any, name: str, file: TextIO | None) -> None:
        self._batches, self._loader, self._control = batches, loader, loader._control
        self._begun, self._due, shown, total = False, 0.0, True, None
        with suppress(TypeError, NotImplementedError):  # a stream without a length
            total = len(loader)
        with suppress(UnknownRankError):  # raised by the loader, unless data_parallel= is given
            shown = own_rank().rank == 0
        terminal = "ipykernel" in sys.modules or (file or sys.stderr).isatty()
        self._bar = _Bar(
            total=total,
            desc=f"{printable(name)} epoch {self._control.position.next_epoch - 1}".lstrip(),
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
        """Update the text and the position of the bar.

        The position is `behind` batches before the last batch. Failed batches count too.
        """
        records = self._control.counters.records(REPORTED)
        report = make_report(records, self._control.setup(self._loader))
        said = ""
        if report.batches:
            speed = rate(report.samples / max(report.seconds, 1e-9))
            said = f"{speed} samples/s, {report.summary}"
        self._bar.set_postfix_str(said, refresh=False)
        self._bar.n = max(self._bar.n, records[-1].number + 1 - behind)
        self._due = time.perf_counter() + REPORT_SECONDS

    def __del__(self) -> None:
        """Draw the bar for the last time."""
        if self._bar is not None and not self._bar.disable:
            # At the interpreter's exit, imports fail.
            with suppress(OSError, ValueError, ImportError):
                if self._begun:
                    self._describe(behind=0)
                self._bar.close()
