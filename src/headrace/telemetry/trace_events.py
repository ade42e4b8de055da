"""Batches as events in Chrome's trace event format, one JSON object in a line.

Slices of threads (phase X) must not overlap but by nesting, or the trace processor drops them. What overlaps, batches
on their way and fetches, are async events (phases b and e) with ids of their own. Times are rounded down to
microseconds, which keeps their order.
"""

from __future__ import annotations

import bisect
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace._core.batches import FetchTimes
from headrace._version import __version__
from headrace.telemetry.batch_log import BatchLog, BatchRecord

__all__ = ["TraceEvents"]

TRACKS = 1 << 30  # ids of threads from here on are tracks of ours: the kernel's are below 2**22
KEPT = 256  # slices of a track that are compared with a new one
MEMORY_INTERVAL = 100_000  # microseconds between two samples of the memory of this process

_FETCH = (
    '{"ph":"b","cat":%s,"name":"single fetch","id2":{"local":%%d},"pid":%d,"tid":%d,"ts":%%d,'
    '"args":{"batch":%%d,"slot":%%d}},\n'
    '{"ph":"e","cat":%s,"name":"single fetch","id2":{"local":%%d},"pid":%d,"tid":%d,"ts":%%d},\n'
)


class TraceEvents:
    """Makes the events of a trace; used by one thread.

    Args:
        pid: the consumer's process.
        name: its name.
    """

    def __init__(self, pid: int, name: str) -> None:
        self._pid = pid
        self._name = name
        self._ids = 0
        self._names: dict[int, str] = {}  # of loaders, by the id of their log
        self._logs: list[BatchLog] = []  # keeps these ids
        self._processes: set[int] = set()
        self._tracks: dict[tuple[int, object], _Track] = {}
        self._used: set[int] = set()  # ids of threads
        self._last: dict[tuple[int, int], tuple[int, int, int]] = {}  # step: iteration, batch, end; by loader, thread
        self._fetched: dict[int, int] = {}  # bytes, by loader
        self._measured = 0

    def header(self) -> str:
        """The file's beginning."""
        about = json.dumps({"program": "headrace", "version": __version__})
        return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n' + self._process(
            self._pid, self._name, 0
        )

    def end(self) -> str:
        """The file's end."""
        return _meta("process_labels", self._pid, 0, {"labels": "headrace"}).removesuffix(",\n") + "\n]}\n"

    def of(self, log: BatchLog, record: BatchRecord, thread: int) -> str:
        """The events of a delivered batch.

        Args:
            log: that of its loader.
            record: the batch.
            thread: the native id of the consumer's thread.
        """
        key = id(log)
        name = self._loader(log)
        flow = self._next_id()
        return "".join(
            (
                *self._journey(record, name, flow),
                *self._in_fetch(record, name, flow),
                *self._work(record, name, flow, thread),
                *self._consumer(record, name, flow, thread, key),
                *self._loads(record, name, key),
            )
        )

    # Each part.

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
        args = self._args(record)
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

    def _in_fetch(self, record: BatchRecord, name: str, flow: int) -> Iterator[str]:
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
        yield f'{{"ph":"b",{of},"name":"fetch of a batch","ts":{begin},{bound},"args":{self._args(record)}}},\n'
        yield f'{{"ph":"e",{of},"name":"fetch of a batch","ts":{end}}},\n'
        yield self._single(fetches, name, tid)

    def _single(self, fetches: FetchTimes, name: str, tid: int) -> str:
        rows = np.frombuffer(fetches.rows).reshape(-1, 4)
        if not len(rows):
            return ""
        values = np.empty((len(rows), 6), np.int64)
        values[:, 0] = values[:, 4] = np.arange(self._ids + 1, self._ids + 1 + len(rows))
        self._ids += len(rows)
        values[:, 2:4] = rows[:, 0:2]
        values[:, (1, 5)] = rows[:, 2:4] * 1e6
        escaped = name.replace("%", "%%")
        both = _FETCH % (escaped, fetches.pid, tid, escaped, fetches.pid, tid)
        return (both * len(rows)) % tuple(values.ravel().tolist())

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
        yield _slice("transform and collate", name, pid, tid, begin, end, self._args(record), bound)

    def _consumer(self, record: BatchRecord, name: str, flow: int, thread: int, key: int) -> Iterator[str]:
        """The call of `next()`, with its parts, and the step before it."""
        times = record.times
        begin, end = _us(record.called), _us(record.returned)
        tid, named = self._place(self._pid, (key, thread), f"next() of {json.loads(name)}", (begin, end), thread)
        yield named
        last = self._last.get((key, tid))
        if last is not None and last[2] < begin:
            what = "step" if last[0] == record.iteration else "between iterations"
            args = f'{{"batch":{last[1]},"iteration":{last[0]}}}'
            yield _slice(what, name, self._pid, tid, last[2], begin, args)
        self._last[key, tid] = (record.iteration, record.number, end)
        yield _slice("next()", name, self._pid, tid, begin, end, self._args(record))
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

    def _loads(self, record: BatchRecord, name: str, key: int) -> Iterator[str]:
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
            self._fetched[key] = self._fetched.get(key, 0) + times.nbytes
            yield _counters(self._pid, name, _us(record.returned), f'"bytes delivered":{self._fetched[key]}')
        now = _us(time.perf_counter())
        if now - self._measured > MEMORY_INTERVAL and (resident := _resident_bytes()):
            self._measured = now
            yield _counters(self._pid, '"memory"', now, f'"resident bytes":{resident}')

    # Names and ids.

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _args(self, record: BatchRecord) -> str:
        return f'{{"batch":{record.number},"iteration":{record.iteration},"samples":{record.size}}}'

    def _loader(self, log: BatchLog) -> str:
        """The loader's name as JSON; further ones of the same name are numbered."""
        if id(log) not in self._names:
            name, number = log.name, 1
            while (quoted := json.dumps(name)) in self._names.values():
                number += 1
                name = f"{log.name} {number}"
            self._names[id(log)] = quoted
            self._logs.append(log)
        return self._names[id(log)]

    def _process(self, pid: int, name: str, place: int) -> str:
        """The events that name a process; empty if it is named already."""
        if pid in self._processes:
            return ""
        self._processes.add(pid)
        return _meta("process_name", pid, 0, {"name": name}) + _meta(
            "process_sort_index", pid, 0, {"sort_index": place}
        )

    def _place(
        self, pid: int, owner: object, name: str, times: tuple[int, int] | None = None, native: int | None = None
    ) -> tuple[int, str]:
        """The id of a thread's track where a slice overlaps no other, and the event that names the track if it is new.

        Args:
            pid: the process.
            owner: whose slices share a track; the native id of a thread, if nothing else.
            name: of the track.
            times: the beginning and the end of the slice; None for the track alone.
            native: the native id of the thread, if that is not the owner.
        """
        number = 0
        while True:
            number += 1
            track = self._tracks.get((pid, (owner, number)))
            if track is None:
                wanted = native if native is not None else owner
                tid = wanted if number == 1 and isinstance(wanted, int) and wanted not in self._used else 0
                tid = tid or TRACKS + len(self._used)
                self._used.add(tid)
                track = self._tracks[pid, (owner, number)] = _Track(tid)
                if times is not None:
                    track.fits(*times)
                shown = name if number == 1 else f"{name} ({number})"
                return tid, _meta("thread_name", pid, tid, {"name": shown})
            if times is None or track.fits(*times):
                return track.tid, ""


class _Track:
    """The last slices of a track, none of which overlaps another."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self._slices: list[tuple[int, int]] = []  # ascending
        self._floor = -sys.maxsize

    def fits(self, begin: int, end: int) -> bool:
        """Add a slice if it overlaps none."""
        slices = self._slices
        place = bisect.bisect_left(slices, (begin, end))
        if begin < self._floor or (place and slices[place - 1][1] > begin):
            return False
        if place < len(slices) and slices[place][0] < end:
            return False
        slices.insert(place, (begin, end))
        if len(slices) > KEPT:
            self._floor = slices.pop(0)[1]
        return True


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


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


def _resident_bytes() -> int:
    """The resident memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
