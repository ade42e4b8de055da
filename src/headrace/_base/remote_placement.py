"""The interface of placements on other machines.

A value of ``placement=`` on other machines is a `RemotePlacement`. The only connection to such a
machine is an `EngineHost` for each engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar


class EngineHost(ABC):
    """The place of one engine on another machine.

    `headrace._links.hosted.HostedEngine` does the work there.

    Attributes:
        alive: whether a session can be opened.
    """

    alive: bool = True

    @abstractmethod
    async def connect(self, port: int, token: bytes) -> None:
        """Have the engine's process connect to a port of this machine, for a session.

        The process is started if needed. The connection begins with `token`.

        Raises:
            OSError: the machine or the process is lost. Another call may succeed.
            Exception: no further call can succeed.
        """

    @abstractmethod
    async def how_it_ended(self) -> str | None:
        """Return how the engine's process ended, or None."""

    @abstractmethod
    def close(self) -> None:
        """Let the process end, without waiting."""

    @abstractmethod
    def join(self) -> None:
        """Wait for the end of the process, after `close`; kill the process after a deadline."""


class RemotePlacement(ABC):
    """The place of a loader's engines on other machines.

    Attributes:
        name: the name in `stats()`.
        engines: number of engines.
        least: number of engines required to begin an epoch.
        cpus_per_engine: number of CPUs for each engine.
        start_timeout: seconds to wait for these engines.
        shortage: where to see why an engine does not start.
    """

    __slots__ = ()

    name: ClassVar[str]
    engines: int
    cpus_per_engine: float
    start_timeout: float

    @property
    @abstractmethod
    def least(self) -> int: ...

    @property
    @abstractmethod
    def shortage(self) -> str: ...

    @abstractmethod
    def hosts(self, setup: Any, engines: int) -> Sequence[EngineHost]:
        """Return the places of some engines.

        Args:
            setup: the first argument of each `HostedEngine`; the second is the engine's number.
            engines: number of engines.
        """
