"""A trace of all loaders of this process, for ui.perfetto.dev.

Batches become events in Chrome's trace event format, one JSON object in a line. Slices of threads (phase X) must not
overlap but by nesting, or the trace processor drops them. What overlaps, batches on their way and fetches, are async
events (phases b and e) with ids of their own. Times are rounded down to microseconds, which keeps their order.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import itertools
import json
import os
import queue
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace._core.ranks.rankinfo import get_rank_info
from headrace._core.text import add_note
from headrace._version import __version__
from headrace.telemetry.counters import BatchRecord, Counters
from headrace.telemetry.figures import steps_of

__all__ = ["trace"]

WAITING = 256  # batches that wait to be written: then `next()` blocks, so that memory is bounded and nothing is lost
INTERVAL = 0.1  # seconds between two writes: being woken for each batch costs the consumer's thread the GIL
TRACKS = 1 << 30  # ids of tracks from here on: those of the kernel's threads are below 2**22
# The slices of a batch on its way that are not called as the step in which `next()` waits for it.
NAMES = {"work": "transform and collate", "loop": "hand-over", "hand-over": "ready"}

_FETCH = (
    '{"ph":"b","cat":%s,"name":"single fetch","id2":{"local":%%d},"pid":%d,"tid":%d,"ts":%%d,'
    '"args":{"batch":%%d,"slot":%%d}},\n'
    '{"ph":"e","cat":%s,"name":"single fetch","id2":{"local":%%d},"pid":%d,"tid":%d,"ts":%%d},\n'
)


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
        self._ids = 0
        self._names: weakref.WeakKeyDictionary[Counters, str] = weakref.WeakKeyDictionary()  # of loaders, as JSON
        self._named: dict[str, int] = {}  # loaders of the same class, which are numbered
        self._processes: set[int] = set()
        self._tracks: dict[tuple[int, object, int], tuple[int, int]] = {}  # id, end of the last slice
        self._last: dict[tuple[str, int], tuple[int, int, int]] = {}  # step: iteration, batch, end; by loader, thread
        self._fetched: dict[str, int] = {}  # bytes, by loader
        self._lock = open(path, "ab")  # noqa: SIM115  # by `close`
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.suffix == ".gz":  # a level more is a third slower, and saves a tenth
                self._file: Any = gzip.open(path, "wt", compresslevel=1, encoding="utf-8")  # noqa: SIM115
            else:
                self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
            rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "1")
            about = json.dumps({"program": "headrace", "version": __version__})
            consumer = self._process(self._pid, f"consumer, rank {rank}" if rank and ranks != "1" else "consumer", 0)
            self._file.write(f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{consumer}')
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
                labels = _meta("process_labels", self._pid, 0, {"labels": "headrace"})
                self._file.write(labels.removesuffix(",\n") + "\n]}\n")
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing alone would leave it to a fork that has the descriptor
        self._lock.close()
        return self._error

    def _events(self, loader: Counters, record: BatchRecord, thread: int) -> str:
        if (name := self._names.get(loader)) is None:
            number = self._named[loader.name] = self._named.get(loader.name, 0) + 1
            name = self._names[loader] = json.dumps(loader.name if number == 1 else f"{loader.name} {number}")
        flow = self._next_id()
        journey, fetch = self._journey(record, name, flow), self._fetch(record, name, flow)
        work, consumer = self._work(record, name, flow, thread), self._consumer(record, name, flow, thread)
        return "".join((*journey, *fetch, *work, *consumer, *self._loads(record, name)))

    def _journey(self, record: BatchRecord, name: str, flow: int) -> Iterator[str]:
        """The batch's way through the stages: one async slice, with one for each stage in it."""
        begin, end = _us(record.planned), _us(record.returned)
        of = f'"cat":{name},"id2":{{"local":{flow}}},"pid":{self._pid},"tid":0'
        yield f'{{"ph":"b",{of},"name":"batch","ts":{begin},"args":{_args(record)}}},\n'
        at = begin
        for step, until in (*steps_of(record), ("delivery", record.returned)):
            to = min(_us(until), end)
            if to <= at:  # unknown, or shorter than a microsecond
                continue
            starts = f',"bind_id":{flow},"flow_out":true' if at == begin else ""
            stage = NAMES.get(step, step)
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
        tid, named = self._track(fetches.pid, fetches.thread, f"event loop of {json.loads(name)}")
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
        tid, named = self._track(pid, native, title, begin, end)
        yield named
        bound = f'"bind_id":{flow},"flow_in":true,"flow_out":true'
        yield _slice("transform and collate", name, pid, tid, begin, end, _args(record), bound)

    def _consumer(self, record: BatchRecord, name: str, flow: int, thread: int) -> Iterator[str]:
        times = record.times
        begin, end = _us(record.called), _us(record.returned)
        tid, named = self._track(self._pid, (name, thread), f"next() of {json.loads(name)}", begin, end)
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

    def _track(self, pid: int, owner: object, name: str, begin: int = 0, end: int = 0) -> tuple[int, str]:
        """The id of the first track of `owner` whose last slice has ended, and the event that names it if it is new."""
        for number in itertools.count(1):
            tid, ended = self._tracks.get((pid, owner, number), (0, 0))
            if ended <= begin:
                break
        named = ""
        if not tid:
            tid = TRACKS + len(self._tracks)
            named = _meta("thread_name", pid, tid, {"name": name if number == 1 else f"{name} ({number})"})
        self._tracks[pid, owner, number] = tid, end
        return tid, named


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
