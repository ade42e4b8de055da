"""Log records of worker processes, for the handlers of the training process.

Workers, and the loader's process, append their records to an unnamed file shared with the training process, each in
one call of `write`: records do not mix, no writer waits for a reader, and the records of a process from before it was
killed are kept. The training process reads the file when a batch is requested, while it waits for one, when a loader is
closed and at exit: it needs no thread. A byte in a pipe ends its wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import pickle
import struct
import sys
import tempfile
import threading
import warnings

from headrace._core.eventloop import waiting
from headrace._core.eventloop.block_warnings import is_repeated

_HEADER = struct.Struct("<4sI")  # a mark, and the size of the pickled record that follows
_MARK = b"\x93log"
_READ = 1 << 20  # bytes at a time
_CAN_FREE = hasattr(mmap, "MADV_REMOVE")
MOST_UNREAD = 64 << 20  # bytes; a writer drops and counts records beyond it, and reports them with its next record


class _Reader:
    """The training process's end; one for the process, made when its first worker starts."""

    def __init__(self) -> None:
        self.file = _file_without_name()
        try:
            self.woken, self.wake = os.pipe()
        except BaseException:  # Ctrl-C too: nothing owns the file yet
            os.close(self.file)
            raise
        for end in (self.woken, self.wake):
            os.set_blocking(end, False)
        self._position = self._freed = 0
        self._turn = threading.Lock()
        self._closed = False
        waiting.handle_while_waiting(self.woken, self._on_wake)

    def read(self) -> None:
        """Pass new records to this process's handlers."""
        while not self._closed and os.lseek(self.file, 0, os.SEEK_END) != self._position:
            # Another thread, or a handler on this one, is reading: it checks again before it returns.
            if not self._turn.acquire(blocking=False):
                return
            try:
                if not self._read():
                    return  # part of a record; its writer wakes this process afterwards
            finally:
                self._turn.release()

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # another thread was faster
            if not self._closed:
                os.read(self.woken, 4096)
        self.read()

    def _read(self) -> bool:
        begin, unread = self._position, b""
        while data := os.pread(self.file, _READ, self._position + len(unread)):
            unread += data
            while len(unread) >= _HEADER.size:
                mark, size = _HEADER.unpack_from(unread)
                if mark != _MARK:
                    warnings.warn("log records of workers were lost: there was no memory for one", stacklevel=4)
                    self._position = os.lseek(self.file, 0, os.SEEK_END)
                    return True
                if len(unread) < _HEADER.size + size:
                    break
                _handle(unread[_HEADER.size : _HEADER.size + size])
                unread = unread[_HEADER.size + size :]
                self._position += _HEADER.size + size
        self._free()
        return self._position != begin

    def _free(self) -> None:
        """Return the memory of records that were read to the kernel, a megabyte or more at a time."""
        end = self._position - self._position % mmap.ALLOCATIONGRANULARITY
        if _CAN_FREE and end - self._freed >= _READ:
            with mmap.mmap(self.file, end - self._freed, offset=self._freed) as read:
                read.madvise(mmap.MADV_REMOVE)
            self._freed = end

    def close(self) -> None:
        self._closed = True
        waiting.forget_while_waiting()
        for descriptor in (self.file, self.woken, self.wake):
            os.close(descriptor)


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("headrace-log", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def _handle(pickled: bytes) -> None:
    try:
        record: logging.LogRecord = pickle.loads(pickled)
        if not is_repeated(record):
            logging.getLogger(record.name).handle(record)
    except Exception:  # user code: a filter, or the class of something in `extra`
        if logging.raiseExceptions:
            sys.excepthook(*sys.exc_info())


_reader: _Reader | None = None
_adopted: tuple[int, int] | None = None  # in a worker: the file, and the pipe that wakes the reader


def descriptors() -> tuple[int, int]:
    """The descriptors by which a new worker writes records, for `adopt`."""
    global _reader
    if _adopted is not None:
        return _adopted
    if _reader is None:
        _reader = _Reader()
    return _reader.file, _reader.wake


def adopt(file: int, wake: int) -> None:
    """Write this process's records to these descriptors, which this owns from now on."""
    global _adopted
    _adopted = file, wake


def handle_records() -> None:
    """Pass new records of workers to this process's handlers."""
    if _reader is not None:
        _reader.read()


def close() -> None:
    """Handle the remaining records and close the file, after all its writers have ended."""
    global _reader
    if _reader is not None:
        _reader.read()
        forget()


def forget() -> None:
    """Close, in a fork, the parent's descriptors."""
    global _reader
    if _reader is not None:
        _reader.close()
        _reader = None


def forward_records(worker: int | None) -> None:
    """Send all records of this process to the training process's handlers, and to none of its own.

    `worker` becomes an attribute of the records; it is None in the loader's process.
    """
    assert _adopted is not None
    root = logging.getLogger()
    for logger in [root, *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):  # the trainer's handlers and filters are for the trainer's process
            logger.handlers.clear()
            logger.filters.clear()
            logger.propagate = True
    root.addHandler(_Forwarding(worker, *_adopted))


class _Forwarding(logging.Handler):
    def __init__(self, worker: int | None, file: int, wake: int) -> None:
        super().__init__()
        self._worker = worker
        self._file = file
        self._wake = wake
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(_picklable(record, self._worker))
        except Exception:  # as in logging's own handlers: a record must not end user code
            self.handleError(record)

    def _write(self, pickled: bytes) -> None:
        if _CAN_FREE and os.fstat(self._file).st_blocks * 512 > MOST_UNREAD:
            self._dropped += 1
            return
        if self._dropped:
            text = f"{self._dropped} log records were dropped: the training process had not read earlier ones"
            self._dropped = 0
            lost = logging.LogRecord("headrace", logging.WARNING, __file__, 0, text, None, None)
            self._write(_picklable(lost, self._worker))
        os.write(self._file, _HEADER.pack(_MARK, len(pickled)) + pickled)
        with contextlib.suppress(OSError):  # the pipe is full, which wakes it as well, or closed: it has ended
            os.write(self._wake, b"\0")


def _picklable(record: logging.LogRecord, worker: int | None) -> bytes:
    """The pickled record, its message composed and its traceback formatted, since they may hold any object."""
    attributes = {**record.__dict__, "msg": record.getMessage(), "args": None, "worker": worker}
    if record.exc_info and not record.exc_text:
        attributes["exc_text"] = logging.Formatter().formatException(record.exc_info)
    attributes["exc_info"] = None
    try:
        return pickle.dumps(logging.makeLogRecord(attributes))
    except Exception:  # values of `extra=`
        plain = {name: value if _is_plain(value) else repr(value) for name, value in attributes.items()}
        return pickle.dumps(logging.makeLogRecord(plain))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
