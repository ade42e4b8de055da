"""A server for each test of a module, where a process for each would take longer than most of the tests do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from headrace import Store
from object_server import Fault, ObjectServer


def store_of(server: ObjectServer, folder: str = "", **options: Any) -> Store:
    """A folder of a server's bucket, or all of it, as a store."""
    return Store(
        f"{server.url}/{folder}".rstrip("/"), options=server.store_options, **options
    )


class WatchedServer(ObjectServer):
    """A server that knows whether it still is as a new one, but for what it has counted and seen."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        super().__init__(objects)
        self._told = False

    def store(self, folder: str = "", **options: Any) -> Store:
        """A folder of the bucket, or all of it, as a store."""
        return store_of(self, folder, **options)

    def is_as_new(self) -> bool:
        if self._told or self._process is None or self.latency:
            return False
        requests = self.requests()
        return not (requests["PUT"] or requests["DELETE"])

    def misbehave(self, *faults: Fault) -> None:
        self._told = True
        super().misbehave(*faults)

    def restart(self, down: float) -> None:
        self._told = True
        super().restart(down)


class Servers:
    """Servers with the same objects, one after the other; a context manager.

    Args:
        objects: by key.
    """

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self._objects = objects
        self._kept: WatchedServer | None = None

    @contextlib.contextmanager
    def one(self, request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
        """The server for the test of `request`: that of the test before, unless that test has changed it.

        A test with the mark `counts` gets a new one. What a test has counted or seen would not be
        its own alone: a request that the test before has given up may still be on its way."""
        if self._kept is not None and request.node.get_closest_marker("counts"):
            self.close()
        if self._kept is None:
            self._kept = WatchedServer(self._objects)
            self._kept.start()
        yield self._kept
        if not self._kept.is_as_new():
            self.close()

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
