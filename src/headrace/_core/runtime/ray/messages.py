"""What the consumer and the actor of an engine say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._core.batches import SessionStart
from headrace._core.pool.settings import Settings


@dataclass(frozen=True, slots=True)
class EnginePart:
    """Which of the loader's engines an actor is, and the settings of the consumer's process.

    Attributes:
        engine: its number, from 0.
        engines: how many the loader has.
        settings: for its processes.
    """

    engine: int
    engines: int
    settings: Settings


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The request for a session.

    Attributes:
        number: the session's, in the loader.
        epoch: the epoch's number.
        set_epoch: whether to call the dataset's `set_epoch`.
        base_seed: of the epoch, as in `EngineConfig`.
        start: where it begins within the epoch.
        work: the number of the functions that assemble its batches.
    """

    number: int
    epoch: int
    set_epoch: bool
    base_seed: int
    start: SessionStart
    work: int


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The answer to plans of a session that has ended.

    Attributes:
        error: the error that ended it, if any.
        death: how the engine's process has ended; None if it has not.
    """

    error: BaseException | None
    death: str | None
