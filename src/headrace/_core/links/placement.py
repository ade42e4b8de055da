"""What all placements of engines share, their end at exit, and whether a copy of a dataset is still true."""

from __future__ import annotations

import atexit
import os
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sized
from contextlib import suppress

from headrace._core.batches import SessionStart
from headrace._core.engine.config import EngineConfig
from headrace._core.links.session import Session
from headrace._core.streams.kinds import walk_datasets
from headrace._core.transport.shared_pickle import SharedPickle, fingerprint

CLOSE_DEADLINE = 1.0  # seconds for each step of closing: tasks, workers, loop, process

_living: weakref.WeakSet[Placement] = weakref.WeakSet()


class Placement(ABC):
    """Engines somewhere, for one loader, which owns them. Those that are left are closed at exit, before the zygote."""

    name: str  # for `stats()`
    is_current = False  # whether the caller is on the engine's own thread
    has_copy = True  # whether the engines read a copy of the dataset

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # those that are referred to

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether a session can be opened in this process."""

    @property
    def idle(self) -> bool:
        return all(session.ended for session in self.sessions)

    def open(self, config: EngineConfig, work: SharedPickle | None, start: SessionStart) -> Session:
        _living.add(self)
        session = self._open(config, work, start)
        self.sessions.add(session)
        return session

    @abstractmethod
    def _open(
        self, config: EngineConfig, work: SharedPickle | None, start: SessionStart
    ) -> Session: ...

    def close(self) -> None:
        """End all sessions and engines; idempotent, and without effect in a fork, which has neither."""
        if self._pid != os.getpid():
            return
        for session in list(self.sessions):
            session.close()
        self._end()

    @abstractmethod
    def _end(self) -> None: ...


# hooks run in the reverse order of their registration, so this comes before those of what is
# imported
@atexit.register
def _close_all() -> None:
    for placement in list(_living):
        with suppress(KeyboardInterrupt):  # which leaves the rest of it to its processes
            placement.close()


def snapshot(dataset: object) -> list[object]:
    """What says whether a copy of a dataset is still true: equal lists if no difference is found.

    It has the length, attributes, functions and class of the dataset, and of the datasets it is
    made of. So it detects attributes that were set, containers that grew or shrank, and functions
    that changed, or that were defined anew in a notebook; not an element that was replaced.
    """
    found: list[object] = []
    for part in walk_datasets(dataset):
        for name, value in ("", part), *getattr(part, "__dict__", {}).items():
            plain = isinstance(value, type(None) | bool | int | float | complex | str | bytes)
            # Bound methods are equal if their objects are identical; comparing elements would cost
            # as much as a copy.
            found.append(
                (name, type(value), value if plain else types.MethodType(id, value), _length(value))
            )
            # with the functions and globals that a class of the program's main module uses
            if name == "":
                found.append(fingerprint(type(value)))
            elif callable(value) and not isinstance(value, type):
                found.append(fingerprint(value))
    return found


def _length(value: object) -> int | None:
    if isinstance(value, Sized):
        with suppress(Exception):  # user code, or a class that has none after all
            return len(value)
    return None
