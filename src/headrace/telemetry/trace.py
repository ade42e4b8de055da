"""Traces of all loaders of a process, for ui.perfetto.dev.

Batches become events in Chrome's trace event format, with a JSON object on each line. Slices of
threads (phase X) must be nested or apart: the trace processor drops overlapping slices. Overlapping
times are async events (phases b and e) with ids of their own: batches on the way, fetches, the
calls of an iteration. Times are rounded down to microseconds, so the order is kept.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.telemetry.counters import BatchRecord, Counters
from headrace.telemetry.figures import steps_of


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Trace all loaders of this process to a file.

    ui.perfetto.dev opens the file. The file has a track for each process and thread, and is written
    when the block ends, also by an exception. A loader that is running already is traced from the
    next batch on.

    Args:
        path: path of the file, in Chrome's trace event format. Compressed if the name ends with
            ``.gz``. An existing file is replaced: give each rank a file of its own.

    Yields:
        The file's path.

    Raises:
        OSError: the file cannot be written. Raised at the end of the block if the problem appears
            later.

    Example:
        >>> import headrace as hr, tempfile
        >>> loader = hr.DataLoader(list(range(6)), batch_size=2)
        >>> folder = tempfile.mkdtemp()
        >>> with hr.trace(f"{folder}/epoch.json.gz") as path:
        ...     batches = len(list(loader))
        >>> batches, path.name
        (3, 'epoch.json.gz')
    """
    place, pid = Path(path), os.getpid()
    place.write_bytes(b"")  # raises an error before the block, not after
    delivered: list[tuple[Counters, BatchRecord, int]] = []

    def keep(loader: Counters, record: BatchRecord) -> None:
        delivered.append((loader, record, threading.get_native_id()))

    Counters.subscribers.add(keep)
    try:
        yield place
    finally:
        Counters.subscribers.discard(keep)
        if os.getpid() == pid:  # in a fork, the file belongs to the parent
            _write(place, delivered)


def _write(path: Path, delivered: list[tuple[Counters, BatchRecord, int]]) -> None:
    events = _Events()
    # The next level of compression is a third slower, and saves a tenth.
    opened: Any = (
        functools.partial(gzip.open, compresslevel=1) if path.suffix == ".gz" else open
    )
    with opened(path, "wt", encoding="utf-8") as file:
        file.write('{"traceEvents":[\n')
        for loader, record, thread in delivered:
            file.writelines(f"{event},\n" for event in events.of(loader, record, thread))
        file.write(",\n".join(itertools.starmap(_named, events.names.items())) + "\n]}\n")


class _Events:
    """Events of batches, in the order of delivery.

    Attributes:
        pid: The process of the consumer.
        names: Names of processes (thread 0) and threads, by process and thread.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.names = {(self.pid, 0): "consumer"}
        self._ids = itertools.count(1)
        self._loaders: dict[Counters, str] = {}  # names, escaped for JSON
        self._calls: dict[tuple[str, int], int] = {}  # ids, by loader and iteration

    def of(self, loader: Counters, record: BatchRecord, thread: int) -> Iterator[str]:
        """Yield the events of a batch delivered on a thread."""
        if loader not in self._loaders:
            earlier = sum(each.name == loader.name for each in self._loaders)
            name = f"{loader.name} {earlier + 1}" if earlier else loader.name
            self._loaders[loader] = json.dumps(name)[1:-1]
        name = self._loaders[loader]
        yield from self._journey(record, name)
        yield from self._fetches(record, name)
        yield from self._work(record, name)
        # The calls of an iteration have one id. The training step is the time between two calls.
        call = self._calls.setdefault((name, record.iteration), next(self._ids))
        begin, end = _us(record.called), _us(record.returned)
        yield from _span(
            "next()", name, self.pid, thread, call, begin, end, _args(record)
        )

    def _journey(self, record: BatchRecord, name: str) -> Iterator[str]:
        """Yield the way of a batch through the stages.

        An async slice for the batch contains a slice for each stage.
        """
        at, end = _us(record.planned), _us(record.returned)
        journey = next(self._ids)
        begun, ended = _span("batch", name, self.pid, 0, journey, at, end, _args(record))
        yield begun
        for step, until in (*steps_of(record), ("delivery", record.returned)):
            to = min(_us(until), end)
            if to > at:  # known, and a microsecond or longer
                yield from _span(step, name, self.pid, 0, journey, at, to, _args(record))
                at = to
        yield ended
        yield _counters(self.pid, name, end, f'"ready batches":{record.ready}')

    def _fetches(self, record: BatchRecord, name: str) -> Iterator[str]:
        """Yield single fetches on the event loop, and the loop's load.

        The fetches have ended since the batch before.
        """
        times, fetches = record.times, record.fetches
        if fetches is None or not times.began:
            return
        pid, tid, load = fetches.pid, fetches.thread, times.load
        self.names.setdefault((pid, 0), f"loader of {name}")
        self.names.setdefault((pid, tid), f"event loop of {name}")
        for batch, slot, began, ended in struct.iter_unpack("4d", fetches.rows):
            args = f'{{"batch":{batch:.0f},"slot":{slot:.0f}}}'
            yield from _span(
                "single fetch",
                name,
                pid,
                tid,
                next(self._ids),
                _us(began),
                _us(ended),
                args,
            )
        if load.limit:
            values = (
                f'"fetches in flight":{load.in_flight},"fetches allowed":{load.limit},'
                f'"samples that wait":{load.queued},"plans that wait for memory":{load.held_plans}'
            )
            yield _counters(pid, name, _us(times.fetched), values)

    def _work(self, record: BatchRecord, name: str) -> Iterator[str]:
        """Yield transforms and collation, on their thread."""
        times = record.times
        if times.worked_by is None or not times.work_began:
            return
        pid, tid, worker = times.worked_by
        if worker >= 0:
            self.names.setdefault((pid, 0), f"worker {worker} of {name}")
        self.names.setdefault((pid, tid), "transform and collate")
        begin, end = _us(times.work_began), _us(times.work_ended)
        yield (
            f'{{"ph":"X","cat":"{name}","name":"transform and collate",'
            f'"pid":{pid},"tid":{tid},"ts":{begin},'
            f'"dur":{end - begin},"args":{_args(record)}}}'
        )


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


def _args(record: BatchRecord) -> str:
    return f'{{"batch":{record.number},"iteration":{record.iteration},"samples":{record.size}}}'


def _named(place: tuple[int, int], name: str) -> str:
    """Return the event that names a thread or process."""
    pid, tid = place
    kind = "thread_name" if tid else "process_name"
    return (
        f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{kind}","args":{{"name":"{name}"}}}}'
    )


def _span(
    name: str,
    loader: str,
    pid: int,
    tid: int,
    number: int,
    begin: int,
    end: int,
    args: str,
) -> tuple[str, str]:
    """Return the begin and the end of an async slice."""
    of = f'"cat":"{loader}","id2":{{"local":{number}}},"pid":{pid},"tid":{tid},"name":"{name}"'
    return (
        f'{{"ph":"b",{of},"ts":{begin},"args":{args}}}',
        f'{{"ph":"e",{of},"ts":{end}}}',
    )


def _counters(pid: int, name: str, at: int, values: str) -> str:
    return (
        f'{{"ph":"C","pid":{pid},"tid":0,"name":"{name}","ts":{at},"args":{{{values}}}}}'
    )
