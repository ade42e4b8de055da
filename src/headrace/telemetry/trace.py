"""A trace of all loaders of this process, for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from headrace._core.rankinfo import get_rank_info
from headrace.telemetry.batch_log import BatchLog, BatchRecord
from headrace.telemetry.trace_events import TraceEvents
from headrace.telemetry.trace_file import TraceFile

__all__ = ["trace"]

_SHARED_CLOCKS = ("CLOCK_MONOTONIC", "mach_absolute_time", "QueryPerformanceCounter")


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write what all loaders of this process do inside the block to a file that ui.perfetto.dev opens.

    The file has a track for each process and thread: the calls of `next()` and the steps between them, each batch's way
    through the stages, the work of each worker, single fetches, and counters. It is written while the block runs, and
    complete when it ends, also by an exception. Loaders that run already are in it from their next batch on.

    Args:
        path: the file, in Chrome's trace event format; compressed if it ends with ``.gz``. ``{rank}`` in it is replaced
            by the rank of this process; ranks must not write the same file. A file that exists is replaced.

    Yields:
        The file's path.

    Raises:
        OSError: the file cannot be written; at the block's end if that is found out later.
        ValueError: another trace, of this process or another, is writing the file.
        UnknownRankError: as for `get_rank_info`, with ``{rank}`` in the path.

    Example:
        >>> import headrace as hr, tempfile
        >>> loader = hr.DataLoader(list(range(6)), batch_size=2)
        >>> with tempfile.TemporaryDirectory() as folder, hr.trace(f"{folder}/epoch.json.gz") as path:
        ...     batches = len(list(loader))
        ...     batches, path.name
        (3, 'epoch.json.gz')
    """
    clock = time.get_clock_info("perf_counter").implementation
    if not any(name in clock for name in _SHARED_CLOCKS):
        raise RuntimeError(
            f"time.perf_counter is {clock} here, which other processes do not share: no trace is possible"
        )
    written = Path(os.fspath(path).replace("{rank}", _rank()) if "{rank}" in os.fspath(path) else path)
    pid = os.getpid()
    file = TraceFile(written, TraceEvents(pid, _process_name()))

    def subscriber(log: BatchLog, record: BatchRecord) -> None:
        if os.getpid() == pid:  # not in a fork, which has no thread that writes
            file.put(log, record, threading.get_native_id())

    end = BatchLog.trace_all(subscriber)
    try:
        yield written
    except BaseException as error:
        end()
        if os.getpid() == pid:
            file.close_after(error)
        raise
    end()
    if os.getpid() == pid:
        file.close()


def _rank() -> str:
    return str(get_rank_info().rank)


def _process_name() -> str:
    """The name of the consumer's process in the trace: with its rank, if there are several."""
    rank = os.environ.get("RANK", "")
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"consumer, rank {rank}" if rank and several else "consumer"
