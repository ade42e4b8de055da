"""Selection of the place for a loader's engine.

The engine is kept for the life of the loader.
"""

from __future__ import annotations

import contextlib
import threading

from headrace._base.remote_placement import RemotePlacement
from headrace._base.text import warn_user
from headrace._engine.config import EngineConfig, name_unpicklable
from headrace._links.placement import Placement, snapshot
from headrace._links.session import Session
from headrace._links.thread import ThreadPlacement
from headrace._ranks.rankinfo import bound
from headrace._records.batches import SessionStart
from headrace._streams.epochs import session_epoch
from headrace._streams.kinds import DatasetKind, propagate_epoch
from headrace._streams.resumable import warn_of_rereading
from headrace._transport.shared_pickle import SharedPickle
from headrace.errors import DeadlockError, NotPicklableError
from headrace.options import LoaderOptions, number_of_engines, remote_placement


def check_engines(options: LoaderOptions, kind: DatasetKind, num_workers: int) -> None:
    """Raise ValueError if `engines` or `placement` exclude other arguments."""
    engines = number_of_engines(options)
    remote = remote_placement(options)
    asked = f"engines={engines}"
    if remote is not None:
        asked = repr(remote)
        if options["engines"] != 1:
            raise ValueError(
                f"engines={options['engines']} is for this machine: "
                f"use {type(remote).__name__}(engines={options['engines']}, ...)"
            )
    elif engines == 1:
        return
    if not kind.is_async:
        raise ValueError(
            f"{asked} needs an async dataset: a torch dataset is read by num_workers"
        )
    if options["placement"] == "thread":
        raise ValueError(
            f"{asked} and placement='thread' exclude each other: engines are processes"
        )
    if kind is DatasetKind.ASYNC_MAP and 0 < num_workers < engines:
        raise ValueError(
            f"{asked}: engines divide the workers, so num_workers must be 0 or at least {engines}, "
            f"but got {num_workers}"
        )


def check_automatic(kind: DatasetKind, options: LoaderOptions, context: object) -> None:
    """Raise ValueError if ``num_workers="auto"`` excludes other arguments."""
    if kind.is_async and remote_placement(options) is None and context is None:
        return
    raise ValueError(
        'num_workers="auto" needs an async dataset, engines on this machine, and no '
        "multiprocessing_context=. Otherwise give a number of workers"
    )


class PlacementSelector:
    """The engines of a loader.

    Besides the current engine, retired engines serve iterations begun before a change.

    Args:
        placement: the requested place: ``"auto"``, ``"thread"`` or ``"process"``.
        remote: the placement on other machines, where the engines are processes; or None.
        engines: number of engines.
    """

    def __init__(
        self, placement: str, remote: RemotePlacement | None, engines: int
    ) -> None:
        self._placement = placement
        self._remote = remote
        self._asked = engines
        self._current: Placement | None = None
        # The first configuration of the current engine.
        self._config: EngineConfig | None = None
        # The first functions of the current engine.
        self._made_with: SharedPickle | None = None
        # The snapshot of the dataset, if the current engine has a copy of the dataset.
        self._seen: list[object] | None = None
        self._retired: list[Placement] = []
        self._pickled: SharedPickle | None = None  # the last pickled functions
        self.where = "not started"  # the name of the last placement

    def open(
        self,
        config: EngineConfig,
        start: SessionStart,
        *,
        persistent: bool,
        anew: bool = False,
    ) -> Session:
        """Start a session.

        The session runs in the current engine, if it fits `config`.

        Args:
            config: The configuration.
            start: The beginning of the epoch.
            persistent: Whether workers with a copy of this process are kept for the next epoch.
            anew: Whether to start new workers, without changes made by earlier epochs.
        """
        warn_of_rereading(start.streams)
        work = self._functions(config)
        forked = config.workers_are_forks and self._placement != "process"
        if not persistent and (forked or not config.kind.is_async):
            placement = ThreadPlacement(config, for_one_session=True)
            self.where = placement.name
            try:
                return placement.open(config, None, start)
            except BaseException:  # Ctrl-C too: nothing owns the placement yet
                placement.close()
                raise
        for retired in [each for each in self._retired if each.idle]:
            self._retired.remove(retired)
            retired.close()
        current = self._current
        if current is not None and (anew or not self._serves(current, config, work)):
            # A setting has changed (the dataset, for example). Current iterations continue
            # unchanged.
            self._retired.append(current)
            current = self._current = None
        if current is None:
            current = self._current = self._place(config, work)
            self._config, self._made_with = config, work
            self._seen = snapshot(config.dataset) if current.has_copy else None
        # In aget: a session there would start another session, recursively.
        if current.is_current:
            raise DeadlockError(what="iter() of a loader")
        self.where = current.name
        return current.open(config, work, start)

    def _serves(
        self, current: Placement, config: EngineConfig, work: SharedPickle | None
    ) -> bool:
        """Whether the engines fit `config`.

        The engines must be alive, belong to this process, and have a valid copy of the dataset.
        """
        assert self._config is not None
        same = config.functions_of_epoch or work is self._made_with
        if not (current.alive and same and self._config.same_engine(config)):
            return False
        return self._seen is None or self._seen == snapshot(config.dataset)

    def set_epoch(
        self, dataset: object, epoch: int, *, only_wanted: bool = False
    ) -> None:
        """Call a dataset's `set_epoch` in this process.

        A copy in another process gets the epoch with the next session.
        """
        with bound(session_epoch, epoch):
            if self._seen is None or self._config is None:
                propagate_epoch(dataset, epoch, only_wanted=only_wanted)
                return
            copied = self._config.dataset
            same = self._seen == snapshot(copied)
            propagate_epoch(copied, epoch)
            if same:  # the copy stays valid
                self._seen = snapshot(copied)

    def drop(self) -> None:
        """Close the engines of a collected loader.

        The garbage collector may run on any thread, with any lock held. On a thread of a cluster's
        client, such as Ray, a call of the client would wait for itself for ever. A new thread
        therefore closes engines on other machines.
        """
        if self._remote is None:
            self.close()
            return
        # RuntimeError: the interpreter shuts down, and the exit hook has closed the engines.
        with contextlib.suppress(RuntimeError):
            threading.Thread(
                target=self.close, name="headrace-close", daemon=True
            ).start()

    def close(self) -> None:
        """End all engines. The next session starts a new engine."""
        engines = filter(None, (*self._retired, self._current))
        self._current, self._seen, self._pickled, self._retired = None, None, None, []
        for engine in engines:
            engine.close()

    def _functions(self, config: EngineConfig) -> SharedPickle | None:
        """Return the pickled functions, if another process needs the functions."""
        remote, in_process = self._remote is not None, self._placement == "process"
        forks = config.kind.is_async and config.workers_are_forks
        if (forks and in_process) or (remote and config.context is not None):
            raise ValueError(
                "this placement= and multiprocessing_context= exclude each other: workers of this "
                "context need an engine in a thread of this process. Leave out one of the two."
            )
        if forks or not config.kind.is_async or not (config.has_processes or in_process):
            return None
        try:
            self._pickled = SharedPickle.dumps(
                config.worker_task(), self._pickled, portable=remote
            )
        except Exception as error:
            name_unpicklable(config, error)
        return self._pickled

    def _place(self, config: EngineConfig, work: SharedPickle | None) -> Placement:
        if self._remote is not None:
            from headrace._links.remote import RemoteEngines

            return RemoteEngines(config, self._remote, self._asked)
        if work is not None and self._placement != "thread":
            from headrace._links.process import ProcessPlacement

            try:
                return ProcessPlacement(config, work, self._asked)
            except NotPicklableError as error:
                if self._placement == "process":
                    raise
                warning = (
                    "the loader runs in a thread of this process, where the trainer's Python slows "
                    f"it: {error}"
                )
                warn_user(warning, RuntimeWarning)
        return ThreadPlacement(config, work)
