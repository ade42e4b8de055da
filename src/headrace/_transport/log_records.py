"""Log records of child processes, sent to the training process.

A worker or the loader's process sends a record as a separate message, before the next message to
the parent process. The parent passes the record on. In the training process, the handlers of the
program receive the record. So a record arrives before later batches. If a process is killed, the
last records of the process are lost.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from logging.handlers import QueueHandler
from typing import NamedTuple

_MOST_UNSENT = 100_000  # records; the oldest records beyond are lost


class Record(NamedTuple):
    """A pickled log record."""

    pickled: bytes

    def handle(self) -> None:
        if _forwards:
            _unsent.append(self)
            return
        try:
            record: logging.LogRecord = pickle.loads(self.pickled)
            logging.getLogger(record.name).handle(record)
        except Exception:  # user code: a filter, or the class of an object in `extra`
            if logging.raiseExceptions:
                sys.excepthook(*sys.exc_info())


_forwards = False  # whether this process sends records to another process
_unsent: deque[Record] = deque(maxlen=_MOST_UNSENT)


def unsent_records() -> Iterator[Record]:
    """Take the records of this process, for sending."""
    with suppress(IndexError):
        while True:
            yield _unsent.popleft()


def forward_records(worker: int | None) -> None:
    """Send all records of this process to the training process.

    The handlers of this process are removed. `worker` becomes an attribute of the records; None
    stands for the loader's process.
    """
    global _forwards
    _forwards = True
    root = logging.getLogger()
    for logger in [root, *logging.root.manager.loggerDict.values()]:
        # Handlers and filters of the trainer belong to the trainer's process.
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.filters.clear()
            logger.propagate = True
    root.addHandler(_Forwarding(worker))


class _Forwarding(QueueHandler):
    """Sends records with composed messages and formatted tracebacks.

    Message arguments and tracebacks may hold any object.
    """

    def __init__(self, worker: int | None) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # no queue
        self._worker = worker

    def enqueue(self, record: logging.LogRecord) -> None:
        record.worker = self._worker
        try:
            pickled = pickle.dumps(record)
        except Exception:  # values in `extra=`
            for name, value in vars(record).items():
                setattr(
                    record,
                    name,
                    value if isinstance(value, str | int | float | None) else repr(value),
                )
            pickled = pickle.dumps(record)
        _unsent.append(Record(pickled))
