"""What all placements of engines share, their end at exit, and whether a copy of a dataset is still true."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized

from headrace._core.batches import SessionStart
from headrace._core.engine.config import EngineConfig
from headrace._core.links.session import Session
from headrace._core.streams.blocking import attributes_before_enter
from headrace._core.streams.kinds import child_datasets, walk_datasets
from headrace._core.transport.shared_pickle import SharedPickle, fingerprint

CLOSE_DEADLINE = 1.0  # seconds for each step of closing: tasks, workers, loop, process

_living: weakref.WeakSet[Placement] = weakref.WeakSet()


class Placement(ABC):
    """Engines somewhere, for one loader, which owns them. Those that are left are closed at exit, before the zygote.

    Attributes:
        is_current: whether the caller is on the engine's own thread.
        has_copy: whether the engines read a copy of the dataset.
        sessions: those that are referred to.
    """

    is_current = False
    has_copy = True

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether a session can be opened in this process."""

    @property
    def idle(self) -> bool:
        """Whether none of its sessions is open."""
        return all(session.ended for session in self.sessions)

    def open(self, config: EngineConfig, work: SharedPickle | None, start: SessionStart) -> Session:
        """Start a session."""
        _living.add(self)
        session = self._open(config, work, start)
        self.sessions.add(session)
        return session

    @abstractmethod
    def _open(self, config: EngineConfig, work: SharedPickle | None, start: SessionStart) -> Session: ...

    def close(self) -> None:
        """End all sessions and engines; idempotent, and without effect in a fork, which has neither."""
        if self._pid != os.getpid():
            return
        for session in list(self.sessions):
            session.close()
        self._end()

    @abstractmethod
    def _end(self) -> None: ...


@atexit.register  # hooks run in the reverse order of their registration, so this comes before those of what is imported
def _close_all() -> None:
    for placement in list(_living):
        placement.close()


class Snapshot:
    """The length, attributes and functions of a dataset, and of the datasets it is made of.

    It detects attributes that were set, containers that grew or shrank, and functions that changed; not an element that
    was replaced. Attributes set by `__aenter__` are ignored: each process enters its own copy.
    """

    def __init__(self, dataset: object) -> None:
        self._seen = [*_features(dataset, set())]
        values = (value for part in walk_datasets(dataset) for value in attributes_before_enter(part).values())
        functions = (value for value in values if callable(value) and not isinstance(value, type))
        self._functions = [*map(fingerprint, functions)]

    def same_as(self, other: Snapshot) -> bool:
        """Whether no difference is found."""
        if len(self._seen) != len(other._seen) or self._functions != other._functions:
            return False
        return all(_same(*features) for features in zip(self._seen, other._seen, strict=True))


_Feature = tuple[str, object, int | None]

# Attributes of these classes are compared by value, others by identity and length: comparing each element would cost
# as much as copying them.
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _same(one: _Feature, other: _Feature) -> bool:
    (name, value, length), (other_name, other_value, other_length) = one, other
    if name != other_name or length != other_length or type(value) is not type(other_value):
        return False
    return value is other_value or (isinstance(value, _PLAIN) and value == other_value)


def _features(dataset: object, visited: set[int]) -> Iterator[_Feature]:
    yield "dataset", dataset, _length(dataset)
    if id(dataset) in visited:
        return
    visited.add(id(dataset))
    for name, value in attributes_before_enter(dataset).items():
        yield name, value, _length(value)
        for part in child_datasets(value):
            yield from _features(part, visited)


def _length(value: object) -> int | None:
    if isinstance(value, Sized):
        with contextlib.suppress(Exception):  # user code, or a class that has none after all
            return len(value)
    return None
