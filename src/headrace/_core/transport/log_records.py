"""Log records of workers and of the loader's process, for the handlers of the training process.

A record is a message of its own, sent before the next message to the process that requested this
one. That process passes the record on, or handles it if it is the training process. So a record
arrives before the batch that is made after it; the last records of a process that is killed are
lost.
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

_MOST_UNSENT = 100_000  # records, of which the oldest are lost


class Record(NamedTuple):
    pickled: bytes

    def handle(self) -> None:
        if _forwards:
            _unsent.append(self)
            return
        try:
            record: logging.LogRecord = pickle.loads(self.pickled)
            logging.getLogger(record.name).handle(record)
        except Exception:  # user code: a filter, or the class of something in `extra`
            if logging.raiseExceptions:
                sys.excepthook(*sys.exc_info())


_forwards = False  # whether this process's records go to another one
_unsent: deque[Record] = deque(maxlen=_MOST_UNSENT)


def unsent_records() -> Iterator[Record]:
    """Take the records of this process, to send them."""
    with suppress(IndexError):
        while True:
            yield _unsent.popleft()


def forward_records(worker: int | None) -> None:
    """Send all records of this process to the training process's handlers, and to none of its own.

    `worker` becomes an attribute of the records; it is None in the loader's process.
    """
    global _forwards
    _forwards = True
    root = logging.getLogger()
    for logger in [root, *logging.root.manager.loggerDict.values()]:
        if isinstance(
            logger, logging.Logger
        ):  # the trainer's handlers and filters are for the trainer's process
            logger.handlers.clear()
            logger.filters.clear()
            logger.propagate = True
    root.addHandler(_Forwarding(worker))


class _Forwarding(QueueHandler):
    """Sends records, each with its message composed and its traceback formatted, since both may hold any object."""

    def __init__(self, worker: int | None) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # no queue
        self._worker = worker

    def enqueue(self, record: logging.LogRecord) -> None:
        record.worker = self._worker
        try:
            pickled = pickle.dumps(record)
        except Exception:  # values of `extra=`
            for name, value in vars(record).items():
                setattr(
                    record,
                    name,
                    value if isinstance(value, str | int | float | None) else repr(value),
                )
            pickled = pickle.dumps(record)
        _unsent.append(Record(pickled))
