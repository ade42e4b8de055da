"""A trace of all loaders of this process, for ui.perfetto.dev.

Batches become events in Chrome's trace event format, one JSON object in a line. Slices of threads (phase X) must not
overlap but by nesting, or the trace processor drops them. What overlaps, batches on their way and fetches, are async
events (phases b and e) with ids of their own. Times are rounded down to microseconds, which keeps their order.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace._core.ranks.rankinfo import get_rank_info
from headrace._core.text import add_note
from headrace._version import __version__
from headrace.telemetry.batch_log import BatchLog, BatchRecord

__all__ = ["trace"]

WAITING = 256  # batches that wait to be written: then `next()` blocks, so that memory is bounded and nothing is lost
INTERVAL = 0.1  # seconds between two writes: being woken for each batch costs the consumer's thread the GIL
TRACKS = 1 << 30  # ids of threads from here on are tracks of ours: the kernel's are below 2**22

_FETCH = (
    '{"ph":"b","cat":%s,"name":"single fetch","id2":{"local":%%d},"pid":%d,"tid":%d,"ts":%%d,'
    '"args":{"batch":%%d,"slot":%%d}},\n'
    '{"ph":"e","cat":%s,"name":"single fetch","id2":{"local":%%d},"pid":%d,"tid":%d,"ts":%%d},\n'
)


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
    written = str(path)
    if "{rank}" in written:
        written = written.replace("{rank}", str(get_rank_info().rank))
    pid, rank = os.getpid(), os.environ.get("RANK", "")
    several = rank and os.environ.get("WORLD_SIZE", "1") != "1"
    file = _TraceFile(Path(written), _Events(pid, f"consumer, rank {rank}" if several else "consumer"))

    def subscriber(log: BatchLog, record: BatchRecord) -> None:
        if os.getpid() == pid:  # not in a fork, which has no thread that writes
            file.waiting.put((log, record, threading.get_native_id()))

    end = BatchLog.trace_all(subscriber)
    raised: BaseException | None = None
    try:
        yield Path(written)
    except BaseException as error:
        raised = error
        raise
    finally:
        end()
        if os.getpid() == pid and (failed := file.close()) is not None:
            add_note(raised or failed, f"headrace: the trace {written} is not complete: {failed!r}")
            if raised is None:
                raise failed


class _TraceFile:
    """A trace that is being written, by a thread of its own.

    Attributes:
        waiting: batches to be written, with the log of their loader and the native id of the consumer's thread.
    """

    def __init__(self, path: Path, events: _Events) -> None:
        self._events = events
        self._raw = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "wb")
        self._error: BaseException | None = None
        self.waiting: queue.Queue[tuple[BatchLog, BatchRecord, int]] = queue.Queue(WAITING)
        self._ending = threading.Event()
        try:
            fcntl.flock(self._raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._raw.truncate()
            packed: Any = self._raw
            if path.suffix == ".gz":  # a level more is a third slower, and saves a tenth
                packed = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=1)
            self._file = io.TextIOWrapper(packed, encoding="utf-8")
            self._file.write(events.header())
            self._file.flush()
            self._thread = threading.Thread(target=self._run, name="headrace-trace", daemon=True)
            self._thread.start()
        except BlockingIOError:
            self._raw.close()
            raise ValueError(
                f"another trace is writing {path}: give each its own file; on several ranks put {{rank}} in the name"
            ) from None
        except BaseException:  # Ctrl-C too: nothing else would close it
            self._raw.close()
            raise

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(INTERVAL)  # before the last batches are taken
            for _ in range(self.waiting.qsize()):
                item = self.waiting.get()
                try:
                    if self._error is None:
                        self._file.write(self._events.of(*item))
                except BaseException as error:  # a full disk; raised when the block ends
                    self._error = error

    def close(self) -> BaseException | None:
        """Write what is left; returns the error that ended the writing."""
        self._ending.set()
        self._thread.join()
        try:
            if self._error is None:
                self._file.write(self._events.end())
            self._file.flush()
            fcntl.flock(self._raw, fcntl.LOCK_UN)  # closing alone would leave it to a fork that has the descriptor
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        with contextlib.suppress(OSError):
            self._raw.close()
        return self._error


class _Events:
    """Makes the events of a trace, of the consumer's process by name; used by one thread."""

    def __init__(self, pid: int, name: str) -> None:
        self._pid = pid
        self._name = name
        self._ids = 0
        self._names: dict[BatchLog, str] = {}  # of loaders, as JSON; further ones of the same name are numbered
        self._processes: set[int] = set()
        self._tracks: dict[tuple[int, object], tuple[int, int]] = {}  # id, end of the last slice
        self._used: set[int] = set()  # ids of threads
        self._last: dict[tuple[str, int], tuple[int, int, int]] = {}  # step: iteration, batch, end; by loader, thread
        self._fetched: dict[str, int] = {}  # bytes, by loader

    def header(self) -> str:
        """The file's beginning."""
        about = json.dumps({"program": "headrace", "version": __version__})
        consumer = self._process(self._pid, self._name, 0)
        return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{consumer}'

    def end(self) -> str:
        """The file's end."""
        return _meta("process_labels", self._pid, 0, {"labels": "headrace"}).removesuffix(",\n") + "\n]}\n"

    def of(self, log: BatchLog, record: BatchRecord, thread: int) -> str:
        """The events of a delivered batch, given the native id of the consumer's thread."""
        if (name := self._names.get(log)) is None:
            number, name = 1, json.dumps(log.name)
            while name in self._names.values():
                number += 1
                name = json.dumps(f"{log.name} {number}")
            self._names[log] = name
        flow = self._next_id()
        journey, fetch = self._journey(record, name, flow), self._fetch(record, name, flow)
        work, consumer = self._work(record, name, flow, thread), self._consumer(record, name, flow, thread)
        return "".join((*journey, *fetch, *work, *consumer, *self._loads(record, name)))

    def _journey(self, record: BatchRecord, name: str, flow: int) -> Iterator[str]:
        """The batch's way through the stages: one async slice, with one for each stage in it."""
        times = record.times
        points = [
            ("plan", times.admitted),
            ("queue", times.began),
            ("fetch", times.fetched),
            ("worker queue", times.work_began),
            ("transform and collate", times.work_ended),
            ("hand-over", times.assembled),
            ("ready", record.taken),
            ("delivery", record.returned),
        ]
        if not times.admitted:  # no engine: the consumer's thread reads it
            points[:6] = [("plan", times.work_began), points[4]]
        elif times.work_began > times.assembled:  # on the consumer's thread, after the engine was done
            points[3:7] = [("hand-over", times.assembled), ("ready", times.work_began), points[4]]
        begin, end = _us(record.planned), _us(record.returned)
        of = f'"cat":{name},"id2":{{"local":{flow}}},"pid":{self._pid},"tid":0'
        args = _args(record)
        yield f'{{"ph":"b",{of},"name":"batch","ts":{begin},"args":{args}}},\n'
        at = begin
        for stage, until in points:
            to = min(_us(until), end)
            if to <= at:  # unknown, or shorter than a microsecond
                continue
            starts = f',"bind_id":{flow},"flow_out":true' if at == begin else ""
            yield f'{{"ph":"b",{of},"name":"{stage}","ts":{at}{starts},"args":{{"batch":{record.number}}}}},\n'
            yield f'{{"ph":"e",{of},"name":"{stage}","ts":{to}}},\n'
            at = to
        yield f'{{"ph":"e",{of},"name":"batch","ts":{end}}},\n'

    def _fetch(self, record: BatchRecord, name: str, flow: int) -> Iterator[str]:
        """The fetch of the batch on the event loop, and the single fetches that have ended since the one before."""
        times, fetches = record.times, record.fetches
        if fetches is None or not times.began:
            return
        if fetches.pid != self._pid:
            yield self._process(fetches.pid, f"loader of {json.loads(name)}", 1)
        tid, named = self._place(fetches.pid, fetches.thread, f"event loop of {json.loads(name)}")
        yield named
        of = f'"cat":{name},"id2":{{"local":{self._next_id()}}},"pid":{fetches.pid},"tid":{tid}'
        begin, end = _us(times.began), _us(times.fetched)
        bound = f'"bind_id":{flow},"flow_in":true,"flow_out":true'
        yield f'{{"ph":"b",{of},"name":"fetch of a batch","ts":{begin},{bound},"args":{_args(record)}}},\n'
        yield f'{{"ph":"e",{of},"name":"fetch of a batch","ts":{end}}},\n'
        rows = np.frombuffer(fetches.rows).reshape(-1, 4)
        values = np.empty((len(rows), 6), np.int64)
        values[:, 0] = values[:, 4] = np.arange(self._ids + 1, self._ids + 1 + len(rows))
        self._ids += len(rows)
        values[:, 2:4] = rows[:, 0:2]
        values[:, (1, 5)] = rows[:, 2:4] * 1e6
        escaped = name.replace("%", "%%")
        both = _FETCH % (escaped, fetches.pid, tid, escaped, fetches.pid, tid)
        yield (both * len(rows)) % tuple(values.ravel().tolist())

    def _work(self, record: BatchRecord, name: str, flow: int, thread: int) -> Iterator[str]:
        times = record.times
        if times.worked_by is None or not times.work_began:
            return
        pid, native, worker = times.worked_by
        if (pid, native) == (self._pid, thread):
            return  # inside `next()`
        title = f"worker {worker}" if worker >= 0 else "assembling thread"
        if worker >= 0:
            yield self._process(pid, f"{title} of {json.loads(name)}", 2 + worker)
        begin, end = _us(times.work_began), _us(times.work_ended)
        tid, named = self._place(pid, native, title, (begin, end))
        yield named
        bound = f'"bind_id":{flow},"flow_in":true,"flow_out":true'
        yield _slice("transform and collate", name, pid, tid, begin, end, _args(record), bound)

    def _consumer(self, record: BatchRecord, name: str, flow: int, thread: int) -> Iterator[str]:
        """The call of `next()`, with its parts, and the step before it."""
        times = record.times
        begin, end = _us(record.called), _us(record.returned)
        tid, named = self._place(self._pid, (name, thread), f"next() of {json.loads(name)}", (begin, end), thread)
        yield named
        last = self._last.get((name, tid))
        if last is not None and last[2] < begin:
            what = "step" if last[0] == record.iteration else "between iterations"
            args = f'{{"batch":{last[1]},"iteration":{last[0]}}}'
            yield _slice(what, name, self._pid, tid, last[2], begin, args)
        self._last[name, tid] = (record.iteration, record.number, end)
        yield _slice("next()", name, self._pid, tid, begin, end, _args(record))
        short = f'{{"batch":{record.number}}}'
        taken, refilled = _us(record.taken), _us(record.refilled)
        if begin < taken:
            yield _slice("wait", name, self._pid, tid, begin, taken, short)
            if times.worked_by is not None and times.worked_by[:2] == (self._pid, thread):
                worked, done = max(begin, _us(times.work_began)), min(taken, _us(times.work_ended))
                if worked < done:
                    yield _slice("transform and collate", name, self._pid, tid, worked, done, short)
        if taken < refilled:
            yield _slice("plan", name, self._pid, tid, taken, refilled, short)
        # The end of the flow, which must not begin before the plan: that may have been made in this call.
        yield _slice("delivery", name, self._pid, tid, refilled, end, short, f'"bind_id":{flow},"flow_in":true')

    def _loads(self, record: BatchRecord, name: str) -> Iterator[str]:
        times = record.times
        yield _counters(self._pid, name, _us(record.returned), f'"ready batches":{record.ready}')
        if record.fetches is not None and times.load.limit:
            load = times.load
            values = (
                f'"fetches in flight":{load.in_flight},"fetches allowed":{load.limit},'
                f'"samples that wait":{load.queued},"plans that wait for memory":{load.held_plans}'
            )
            yield _counters(record.fetches.pid, name, _us(times.fetched), values)
        if times.nbytes:
            self._fetched[name] = self._fetched.get(name, 0) + times.nbytes
            yield _counters(self._pid, name, _us(record.returned), f'"bytes delivered":{self._fetched[name]}')

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _process(self, pid: int, name: str, place: int) -> str:
        """The events that name a process; empty if it is named already."""
        if pid in self._processes:
            return ""
        self._processes.add(pid)
        order = _meta("process_sort_index", pid, 0, {"sort_index": place})
        return _meta("process_name", pid, 0, {"name": name}) + order

    def _place(
        self, pid: int, owner: object, name: str, times: tuple[int, int] | None = None, native: int | None = None
    ) -> tuple[int, str]:
        """The id of a thread's track whose last slice has ended before this one, and the event that names a new track.

        Slices of an `owner` (the native id of a thread, or `native` is that) share tracks; without `times`, the first.
        """
        number = 0
        while True:
            number += 1
            key = pid, (owner, number)
            if key not in self._tracks:
                wanted = native if native is not None else owner
                tid = wanted if number == 1 and isinstance(wanted, int) and wanted not in self._used else 0
                tid = tid or TRACKS + len(self._used)
                self._used.add(tid)
                self._tracks[key] = tid, times[1] if times else 0
                return tid, _meta("thread_name", pid, tid, {"name": name if number == 1 else f"{name} ({number})"})
            tid, ended = self._tracks[key]
            if times is None or times[0] >= ended:
                self._tracks[key] = tid, max(ended, times[1] if times else 0)
                return tid, ""


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


def _args(record: BatchRecord) -> str:
    return f'{{"batch":{record.number},"iteration":{record.iteration},"samples":{record.size}}}'


def _slice(name: str, loader: str, pid: int, tid: int, begin: int, end: int, args: str, more: str = "") -> str:
    more = more and f",{more}"
    return (
        f'{{"ph":"X","cat":{loader},"name":"{name}","pid":{pid},"tid":{tid},"ts":{begin},"dur":{end - begin}'
        f'{more},"args":{args}}},\n'
    )


def _counters(pid: int, name: str, at: int, values: str) -> str:
    return f'{{"ph":"C","pid":{pid},"tid":0,"name":{name},"ts":{at},"args":{{{values}}}}},\n'


def _meta(kind: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{kind}","args":{json.dumps(args)}}},\n'
