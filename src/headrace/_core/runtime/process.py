"""The process placement: engines in sidecar processes, where neither they nor the trainer's Python slow each other.

The consumer's process has no thread of headrace. Plans are sent and batches
received on the consumer's own thread; a blocking consumer waits for a socket, an async one for its descriptor.
"""

from __future__ import annotations

import functools
import os

from headrace._core.batches import SessionStart
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.runtime.dataset_copy import DatasetCopy
from headrace._core.runtime.exit_hooks import close_at_exit
from headrace._core.runtime.group_session import GroupSession
from headrace._core.runtime.process_session import ProcessSession
from headrace._core.runtime.sidecar import SidecarTask, StartSession
from headrace._core.runtime.sidecar_process import SidecarProcess
from headrace._core.transport.shared_pickle import SharedPickle


class ProcessPlacement:
    """One sidecar process, or several. The loader owns it.

    Args:
        config: what to run.
        work: the functions of the first session.
        engines: number of processes.

    Raises:
        NotPicklableError: the dataset cannot be pickled.
    """

    is_current = False

    def __init__(self, config: EngineConfig, work: SharedPickle, engines: int = 1) -> None:
        try:
            self._pickled = SharedPickle.dumps(config.without_functions())
        except Exception as error:
            name_unpicklable(config, error)
        self._fixed = None if config.functions_of_epoch else work
        self._config = config
        self._copy = DatasetCopy(config)
        self.dataset_bytes = self._pickled.nbytes
        """The size of the copied part of the dataset, in bytes."""
        self._pid = os.getpid()
        self._modules = (*self._pickled.modules, *work.modules)
        self._engines: list[SidecarProcess] = []
        self._replaced: list[SidecarProcess] = []  # those that died, until their sessions are closed
        try:
            for number in range(engines):
                self._engines.append(self._start(number, engines, later=number > 0))
        except BaseException:  # Ctrl-C too: nothing owns the process yet
            self.close()
            raise
        close_at_exit(self)

    def _start(self, number: int, engines: int, *, later: bool = False) -> SidecarProcess:
        task = SidecarTask(self._pickled, self._config.rank, number, engines)
        return SidecarProcess(task, self._modules, later=later)

    def serves(self, config: EngineConfig, work: SharedPickle | None) -> bool:
        """Whether a sidecar is alive, of this process, and does what `config` asks for, of the current dataset."""
        alive = self._pid == os.getpid() and not all(engine.ended for engine in self._engines)
        return alive and (config.functions_of_epoch or work is self._fixed) and self._copy.serves(config)

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch` here. Its copy gets the epoch with the next session, and stays valid."""
        self._copy.set_epoch(epoch)

    def open(
        self, config: EngineConfig, work: SharedPickle | None, epoch: int, *, set_epoch: bool, start: SessionStart
    ) -> ProcessSession | GroupSession:
        """Start a session."""
        assert work is not None
        opening = StartSession(epoch, set_epoch, work, config.steps_seed(epoch), start)
        if len(self._engines) == 1:
            return self._engines[0].open(opening)
        open_at = functools.partial(self._open_at, opening)
        return GroupSession.of_loader(config, open_at, len(self._engines), first=start.batch)

    def _open_at(self, opening: StartSession, number: int) -> ProcessSession:
        """Start one engine's part of a session; an engine that has died is replaced."""
        if self._engines[number].ended:
            self._replaced.append(self._engines[number])
            self._engines[number] = self._start(number, len(self._engines))
        for dead in [each for each in self._replaced if each.idle]:
            self._replaced.remove(dead)
            _end([dead])
        return self._engines[number].open(opening)

    @property
    def idle(self) -> bool:
        """Whether none of its sessions is open."""
        return all(engine.idle for engine in (*self._engines, *self._replaced))

    def close(self) -> None:
        """End all sessions, the workers and the sidecars."""
        _end([*self._engines, *self._replaced])


def _end(engines: list[SidecarProcess]) -> None:
    for engine in engines:
        engine.close()
    for engine in engines:
        engine.join()
