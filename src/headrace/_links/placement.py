"""The base class of placements, and snapshots of datasets.

Placements still open at exit are closed here.
"""

from __future__ import annotations

import atexit
import os
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sized
from contextlib import suppress

from headrace._engine.config import EngineConfig
from headrace._links.session import Session
from headrace._records.batches import SessionStart
from headrace._streams.kinds import walk_datasets
from headrace._transport.shared_pickle import SharedPickle, fingerprint

CLOSE_DEADLINE = 1.0  # seconds for each step of closing: tasks, workers, loop, process

_living: weakref.WeakSet[Placement] = weakref.WeakSet()


class Placement(ABC):
    """The place of a loader's engines.

    The loader owns the placement. Placements still open at exit are closed before the zygote.
    """

    name: str  # the name in `stats()`
    is_current = False  # whether the caller is on the engine's own thread
    has_copy = True  # whether the engines read a copy of the dataset

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Sessions still referred to.
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether a session can be opened in this process."""

    @property
    def idle(self) -> bool:
        return all(session.ended for session in self.sessions)

    def open(
        self, config: EngineConfig, work: SharedPickle | None, start: SessionStart
    ) -> Session:
        _living.add(self)
        session = self._open(config, work, start)
        self.sessions.add(session)
        return session

    @abstractmethod
    def _open(
        self, config: EngineConfig, work: SharedPickle | None, start: SessionStart
    ) -> Session: ...

    def close(self) -> None:
        """End all sessions and engines.

        Further calls do nothing. In a fork, `close` does nothing, because a fork has no sessions
        and no engines.
        """
        if self._pid != os.getpid():
            return
        for session in list(self.sessions):
            session.close()
        self._end()

    @abstractmethod
    def _end(self) -> None: ...


# Exit hooks run in the reverse order of registration. This hook therefore runs before the hooks of
# the modules imported above.
@atexit.register
def _close_all() -> None:
    for placement in list(_living):
        with suppress(KeyboardInterrupt):  # the processes then end by themselves
            placement.close()


def snapshot(dataset: object) -> list[object]:
    """Return a list for detecting changes of a dataset.

    If two lists are equal, a copy of the dataset is taken as still valid. The list has the length,
    attributes, functions and class of the dataset, and of all inner datasets. The comparison
    detects new values of attributes, a changed length of containers, and functions changed or
    redefined in a notebook. The comparison does not detect a replaced element.
    """
    found: list[object] = []
    for part in walk_datasets(dataset):
        for name, value in ("", part), *getattr(part, "__dict__", {}).items():
            plain = isinstance(
                value, type(None) | bool | int | float | complex | str | bytes
            )
            # Two bound methods are equal if the objects are identical. A comparison of elements
            # would cost as much as a copy.
            found.append(
                (
                    name,
                    type(value),
                    value if plain else types.MethodType(id, value),
                    _length(value),
                )
            )
            # The fingerprint of a class from the main module includes functions and globals used by
            # the class.
            if name == "":
                found.append(fingerprint(type(value)))
            elif callable(value) and not isinstance(value, type):
                found.append(fingerprint(value))
    return found


def _length(value: object) -> int | None:
    if isinstance(value, Sized):
        with suppress(Exception):  # user code, or a class without a length
            return len(value)
    return None
