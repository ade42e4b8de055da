"""Choosing where a loader's engine runs, and keeping it for the loader's life."""

from __future__ import annotations

import warnings
from typing import Any

from headrace.datasets.protocol import tell_epoch
from headrace.engine.engine import Recipe
from headrace.errors import NotPicklableError, ReentrantError
from headrace.placement.process import ProcessPlacement, ProcessSession
from headrace.placement.thread import EpochPlacement, EpochSession, ThreadPlacement, ThreadSession

__all__ = ["Engines"]


class Engines:
    """The engines of one loader: the one that serves it, and any that still serve iterations begun before a change.

    The loader owns it, and calls `close`.

    Args:
        placement: ``"auto"``, ``"thread"`` or ``"process"``.
    """

    def __init__(self, placement: str) -> None:
        self._placement = placement
        self._current: ThreadPlacement | ProcessPlacement | None = None
        self._retired: list[ThreadPlacement | ProcessPlacement] = []
        self.where = "not started"
        """Where the engine runs, and why."""

    def open(
        self, recipe: Recipe, epoch: int, *, tell_dataset: bool, keep: bool
    ) -> ThreadSession | ProcessSession | EpochSession:
        """Start a session, in the engine that is there if it does what `recipe` asks for.

        Args:
            recipe: what to run.
            epoch: the session's number.
            tell_dataset: whether `set_epoch` of a copy of the dataset in another process is called even if it does not
                want it.
            keep: whether the engine outlives the session.

        Raises:
            ReentrantError: called on the engine's own thread.
        """
        if not keep:
            self.where = "thread: workers with a torch dataset, for one epoch"
            return EpochPlacement(ThreadPlacement(recipe)).open(epoch, tell_dataset=tell_dataset)
        self._retired = [retired for retired in self._retired if not _closed_if_idle(retired)]
        if self._current is not None and not self._current.serves(recipe):
            # Something was set since (collate_fn, say). Iterations that run go on as they began.
            self._retired.append(self._current)
            self._current = None
        if self._current is None:
            self._current = self._place(recipe)
        if self._current.is_current:  # in aget: its session would start another, and so on
            raise ReentrantError(what="iter() of a loader")
        return self._current.open(epoch, tell_dataset=tell_dataset)

    def tell_dataset(self, dataset: Any, epoch: int, *, only_wanted: bool) -> None:
        """Tell a dataset of this process which epoch comes; a copy in another is told with its next session."""
        if isinstance(self._current, ProcessPlacement):
            self._current.tell_dataset(epoch)
        else:
            tell_epoch(dataset, epoch, only_wanted=only_wanted)

    def close(self) -> None:
        """End all engines; the next session starts anew."""
        engines = [*self._retired, *([self._current] if self._current is not None else [])]
        self._current, self._retired = None, []
        for engine in engines:
            engine.close()

    def _place(self, recipe: Recipe) -> ThreadPlacement | ProcessPlacement:
        if self._placement == "process" and recipe.kind.is_async:
            self.where = "process: placement='process'"
            return ProcessPlacement(recipe)
        if not recipe.kind.is_async:
            why = "a torch dataset's workers do the reading"
        elif self._placement == "thread":
            why = "placement='thread'"
        elif not recipe.num_workers:
            why = "num_workers=0"
        else:
            try:
                placed = ProcessPlacement(recipe)
            except NotPicklableError as error:
                if error.what in recipe.parts():
                    raise  # a thread's workers need it too
                why = str(error)
                warnings.warn(
                    f"the loader runs in a thread of this process, where the trainer's Python slows it: {error}",
                    RuntimeWarning,
                    stacklevel=6,
                )
            else:
                self.where = "process: an async dataset with workers"
                return placed
        self.where = f"thread: {why}"
        return ThreadPlacement(recipe)


def _closed_if_idle(placement: ThreadPlacement | ProcessPlacement) -> bool:
    if placement.idle:
        placement.close()
    return placement.idle
