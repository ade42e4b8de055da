"""The file of a trace, which a thread of its own writes while loaders run."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import BinaryIO

from headrace._core.notes import add_note
from headrace.telemetry.batch_log import BatchLog, BatchRecord
from headrace.telemetry.trace_events import TraceEvents

if os.name == "posix":
    import fcntl

__all__ = ["TraceFile"]

WAITING = 256  # batches that wait to be written: then `put` blocks, so that memory is bounded and nothing is lost
INTERVAL = 0.1  # seconds between two writes: being woken for each batch costs the consumer's thread the GIL
FLUSHED = 1.0  # seconds after which what was written is in the file
LEVEL = 1  # of the compression: a level more is a third slower, and saves a tenth

_open_here: set[str] = set()  # where files cannot be locked
_Item = tuple[BatchLog, BatchRecord, int]


class TraceFile:
    """A trace that is being written. `hr.trace` owns it, and closes it.

    Args:
        path: the file; compressed by gzip if it ends with ``.gz``.
        events: makes events of batches.

    Raises:
        OSError: the file cannot be written.
        ValueError: another trace is writing it.
    """

    def __init__(self, path: Path, events: TraceEvents) -> None:
        self._path = path
        self._events = events
        self._file = _opened(path)
        self._compressor = zlib.compressobj(LEVEL, wbits=31) if path.suffix == ".gz" else None
        self._error: BaseException | None = None
        self._waiting: deque[_Item] = deque()
        self._wake = threading.Event()  # the thread, before the interval is over
        self._room = threading.Condition()
        self._ending = False
        try:
            self._write(events.header())
            self._file.flush()
            self._thread = threading.Thread(target=self._run, name="headrace-trace", daemon=True)
            self._thread.start()
        except BaseException:  # Ctrl-C too: nothing else would close the file
            self._close_file()
            raise

    def put(self, log: BatchLog, record: BatchRecord, thread: int) -> None:
        """Add a delivered batch; from any thread. Blocks while too many wait to be written.

        Args:
            log: the log of its loader.
            record: the batch.
            thread: the native id of the consumer's thread.
        """
        if self._error is not None:
            return
        self._waiting.append((log, record, thread))
        if len(self._waiting) >= WAITING:
            with self._room:
                self._wake.set()
                self._room.wait_for(lambda: len(self._waiting) < WAITING or self._ending)

    def close(self) -> None:
        """Write what is left; raises the error that ended the writing before."""
        self._ending = True
        self._wake.set()
        self._thread.join()
        try:
            if self._error is None:
                self._write(self._events.end())
                if self._compressor is not None:
                    self._file.write(self._compressor.flush())
                self._file.flush()
        except OSError as error:
            self._error = error
        finally:
            self._close_file()
        if self._error is not None:
            add_note(self._error, f"headrace: the trace {self._path} is not complete")
            raise self._error

    def close_after(self, error: BaseException) -> None:
        """As `close`, after an error of the block, which gets a note in place of an error of writing."""
        try:
            self.close()
        except Exception as failed:
            add_note(error, f"headrace: the trace {self._path} is not complete: {failed!r}")

    def _run(self) -> None:
        flushed = time.monotonic()
        ending = False
        while not ending:
            self._wake.wait(INTERVAL)
            self._wake.clear()
            ending = self._ending  # before the last batches are taken
            try:
                while self._waiting:
                    self._write(self._events.of(*self._waiting.popleft()))
                if time.monotonic() - flushed > FLUSHED:
                    if self._compressor is not None:
                        self._file.write(self._compressor.flush(zlib.Z_SYNC_FLUSH))
                    self._file.flush()
                    flushed = time.monotonic()
            except BaseException as error:  # a full disk; raised when the block ends
                self._error = error
                ending = True
                self._waiting.clear()
            with self._room:
                self._room.notify_all()

    def _write(self, text: str) -> None:
        data = text.encode()
        self._file.write(data if self._compressor is None else self._compressor.compress(data))

    def _close_file(self) -> None:
        _open_here.discard(os.path.realpath(self._path))
        with contextlib.suppress(OSError):  # of the last flush, after an error of an earlier one
            if os.name == "posix":
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing alone would leave it to a fork that has the descriptor
        with contextlib.suppress(OSError):  # as above
            self._file.close()


def _opened(path: Path) -> BinaryIO:
    """The file, empty, for this trace alone."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "wb")
    try:
        if not _locked(file, path):
            raise ValueError(
                f"another trace is writing {path}: give each its own file; on several ranks put {{rank}} in the name"
            )
        file.truncate()
    except BaseException:  # Ctrl-C too: nothing else would close it
        file.close()
        raise
    return file


def _locked(file: BinaryIO, path: Path) -> bool:
    if os.name == "posix":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:  # another trace holds it
            return False
        except OSError:  # a file system without locks
            pass
    real = os.path.realpath(path)
    if real in _open_here:
        return False
    _open_here.add(real)
    return True
