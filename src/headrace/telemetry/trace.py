"""A trace of all loaders of this process, for ui.perfetto.dev.

Batches become events in Chrome's trace event format, one JSON object in a line. Slices of threads (phase X) must not
overlap but by nesting, or the trace processor drops them. What overlaps are async events (phases b and e) with ids of
their own: batches on their way, fetches, the calls of one iteration. Times are rounded down to microseconds, which
keeps their order.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import itertools
import json
import os
import queue
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace._core.ranks.rankinfo import get_rank_info
from headrace._core.text import add_note
from headrace.telemetry.counters import BatchRecord, Counters
from headrace.telemetry.figures import steps_of

__all__ = ["trace"]

WAITING = 256  # batches that wait to be written: then `next()` blocks, so that memory is bounded and nothing is lost
INTERVAL = 0.1  # seconds between two writes: being woken for each batch costs the consumer's thread the GIL


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write what all loaders of this process do inside the block to a file that ui.perfetto.dev opens.

    The file has a track for each process and thread. It is complete when the block ends, also by an exception. Loaders
    that run already are in it from their next batch on.

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
    written = str(path)
    if "{rank}" in written:
        written = written.replace("{rank}", str(get_rank_info().rank))
    trace = _Trace(Path(written))
    end = Counters.subscribe(trace.add, single_fetches=True)
    raised: BaseException | None = None
    try:
        yield Path(written)
    except BaseException as error:
        raised = error
        raise
    finally:
        end()
        if (failed := trace.close()) is not None:
            add_note(raised or failed, f"headrace: the trace {written} is not complete: {failed!r}")
            if raised is None:
                raise failed


class _Trace:
    """The file of a trace, and the thread that makes its events and writes them."""

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._waiting: queue.Queue[tuple[Counters, BatchRecord, int]] = queue.Queue(WAITING)
        self._ending = threading.Event()
        # What the events so far have named and numbered, used by the thread alone:
        self._ids = itertools.count(1)
        self._names: weakref.WeakKeyDictionary[Counters, str] = weakref.WeakKeyDictionary()  # of loaders, escaped
        self._numbers: dict[str, int] = {}  # of loaders of the same class
        self._named: set[tuple[int, int]] = set()  # processes (with 0) and threads
        self._last: dict[tuple[str, int], tuple[int, int, int]] = {}  # id, batch and end of each iteration's last call
        self._lock = open(path, "ab")  # noqa: SIM115  # by `close`
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.suffix == ".gz":  # a level more is a third slower, and saves a tenth
                self._file: Any = gzip.open(path, "wt", compresslevel=1, encoding="utf-8")  # noqa: SIM115
            else:
                self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
            self._file.write('{"traceEvents":[\n' + self._name(self._pid, 0, "consumer").removeprefix(",\n"))
            self._file.flush()
            self._thread = threading.Thread(target=self._run, name="headrace-trace", daemon=True)
            self._thread.start()
        except BaseException as error:  # Ctrl-C too: nothing else would close it
            self._lock.close()
            if isinstance(error, BlockingIOError):
                raise ValueError(
                    f"another trace is writing {path}: give each its own file; on several ranks put {{rank}} in the "
                    f"name"
                ) from None
            raise

    def add(self, loader: Counters, record: BatchRecord) -> None:
        """Write a batch that is delivered; on the consumer's thread."""
        if os.getpid() == self._pid:  # not in a fork, which has no thread that writes
            self._waiting.put((loader, record, threading.get_native_id()))

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(INTERVAL)  # before the last batches are taken
            for _ in range(self._waiting.qsize()):
                item = self._waiting.get()
                try:
                    if self._error is None:
                        self._file.write(self._events(*item))
                except BaseException as error:  # a full disk; raised when the block ends
                    self._error = error

    def close(self) -> BaseException | None:
        """Write what is left; returns the error that ended the writing. Does nothing in a fork."""
        if os.getpid() != self._pid:
            return None
        self._ending.set()
        self._thread.join()
        try:
            if self._error is None:
                self._file.write("\n]}\n")
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing alone would leave it to a fork that has the descriptor
        self._lock.close()
        return self._error

    def _events(self, loader: Counters, record: BatchRecord, thread: int) -> str:
        if (name := self._names.get(loader)) is None:
            number = self._numbers[loader.name] = self._numbers.get(loader.name, 0) + 1
            name = loader.name if number == 1 else f"{loader.name} {number}"
            name = self._names[loader] = json.dumps(name)[1:-1]
        every = self._journey, self._fetches, self._work, self._calls
        return "".join(itertools.chain.from_iterable(each(record, name, thread) for each in every))

    def _journey(self, record: BatchRecord, name: str, thread: int) -> Iterator[str]:
        """The batch's way through the stages: one async slice, with one for each stage in it."""
        begin, end = _us(record.planned), _us(record.returned)
        journey, inside, at = next(self._ids), "", begin
        for step, until in (*steps_of(record), ("delivery", record.returned)):
            to = min(_us(until), end)
            if to > at:  # known, and a microsecond or longer
                inside += _span(step, name, self._pid, 0, journey, at, to, _args(record))
                at = to
        yield _span("batch", name, self._pid, 0, journey, begin, end, _args(record), inside)
        yield _counters(self._pid, name, end, f'"ready batches":{record.ready}')

    def _fetches(self, record: BatchRecord, name: str, thread: int) -> Iterator[str]:
        """The fetch of the batch on the event loop, and the single fetches that have ended since the one before."""
        times, fetches = record.times, record.fetches
        if fetches is None or not times.began:
            return
        pid, tid, load = fetches.pid, fetches.thread, times.load
        yield self._name(pid, 0, f"loader of {name}") + self._name(pid, tid, f"event loop of {name}")
        begin, end = _us(times.began), _us(times.fetched)
        yield _span("fetch of a batch", name, pid, tid, next(self._ids), begin, end, _args(record))
        for batch, slot, began, ended in struct.iter_unpack("4d", fetches.rows):
            args = f'{{"batch":{batch:.0f},"slot":{slot:.0f}}}'
            yield _span("single fetch", name, pid, tid, next(self._ids), _us(began), _us(ended), args)
        if load.limit:
            values = (
                f'"fetches in flight":{load.in_flight},"fetches allowed":{load.limit},'
                f'"samples that wait":{load.queued},"plans that wait for memory":{load.held_plans}'
            )
            yield _counters(pid, name, end, values)

    def _work(self, record: BatchRecord, name: str, thread: int) -> Iterator[str]:
        """Transforms and collation, on the thread that did them."""
        times = record.times
        if times.worked_by is None or not times.work_began:
            return
        pid, tid, worker = times.worked_by
        if worker >= 0:
            yield self._name(pid, 0, f"worker {worker} of {name}")
        yield self._name(pid, tid, "transform and collate")
        begin, end = _us(times.work_began), _us(times.work_ended)
        yield (
            f',\n{{"ph":"X","cat":"{name}","name":"transform and collate","pid":{pid},"tid":{tid},"ts":{begin},'
            f'"dur":{end - begin},"args":{_args(record)}}}'
        )

    def _calls(self, record: BatchRecord, name: str, thread: int) -> Iterator[str]:
        """The call of `next()`, and the step of the loop before it."""
        begin, end = _us(record.called), _us(record.returned)
        call, batch, ended = self._last.get((name, record.iteration)) or (next(self._ids), -1, begin)
        if ended < begin:
            yield _span("step", name, self._pid, thread, call, ended, begin, f'{{"batch":{batch}}}')
        yield _span("next()", name, self._pid, thread, call, begin, end, _args(record))
        self._last[name, record.iteration] = call, record.number, end

    def _name(self, pid: int, tid: int, name: str) -> str:
        """The event that names a thread, or a process by a `tid` of 0; empty if it is named already."""
        if (pid, tid) in self._named:
            return ""
        self._named.add((pid, tid))
        kind = "thread_name" if tid else "process_name"
        return f',\n{{"ph":"M","pid":{pid},"tid":{tid},"name":"{kind}","args":{{"name":"{name}"}}}}'


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


def _args(record: BatchRecord) -> str:
    return f'{{"batch":{record.number},"iteration":{record.iteration},"samples":{record.size}}}'


def _span(
    name: str, loader: str, pid: int, tid: int, number: int, begin: int, end: int, args: str, inside: str = ""
) -> str:
    """An async slice, with what is nested in it."""
    of = f'"cat":"{loader}","id2":{{"local":{number}}},"pid":{pid},"tid":{tid},"name":"{name}"'
    return f',\n{{"ph":"b",{of},"ts":{begin},"args":{args}}}{inside},\n{{"ph":"e",{of},"ts":{end}}}'


def _counters(pid: int, name: str, at: int, values: str) -> str:
    return f',\n{{"ph":"C","pid":{pid},"tid":0,"name":"{name}","ts":{at},"args":{{{values}}}}}'
