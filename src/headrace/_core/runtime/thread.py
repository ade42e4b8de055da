"""The thread placement: the engine on an event loop in a daemon thread of the caller's process."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Sequence

from headrace._core.batches import BatchPlan, SessionStart
from headrace._core.engine.config import EngineConfig
from headrace._core.engine.engine import Engine
from headrace._core.engine.handoff import Handoff
from headrace._core.engine.session import Session
from headrace._core.engine.stepping import StepsOnConsumersThread
from headrace._core.eventloop.loop_thread import LoopThread
from headrace._core.interface.blocking import background_loop, context_managers
from headrace._core.open_session import BatchQueue, SessionWrapper
from headrace._core.pool.supervisor import WORK_DEADLINE
from headrace._core.runtime.exit_hooks import close_at_exit
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import EngineDiedError

CLOSE_DEADLINE = 1.0  # seconds for each step of closing: tasks, workers, loop


class ThreadPlacement:
    """An engine and its thread. The loader owns it.

    The engine has a loop of its own, unless the dataset is an async context manager: then it runs on the background
    loop that `dataset[i]` uses, so that all reads of the dataset in this process share what `__aenter__` opened.
    """

    def __init__(self, config: EngineConfig, work: SharedPickle | None = None) -> None:
        self._config = config
        self._fixed = None if config.functions_of_epoch else work
        self._engine = Engine(config, work if config.context is None else None)
        self._shares_loop = config.kind.is_async and bool(context_managers(config.dataset))
        try:
            self._loop = background_loop() if self._shares_loop else LoopThread("headrace-engine")
        except BaseException:  # no thread could be started, or Ctrl-C: the engine has workers
            self._engine.kill()
            self._engine.release()
            raise
        self._pid = os.getpid()
        self._sessions: weakref.WeakSet[ThreadSession] = weakref.WeakSet()
        self._closed = False
        close_at_exit(self)

    def serves(self, config: EngineConfig, work: SharedPickle | None) -> bool:
        """Whether this engine is alive, of this process, and does what `config` asks for."""
        same_functions = config.functions_of_epoch or work is self._fixed
        return self._loop.alive and self._engine.usable and same_functions and self._config.same_engine(config)

    def open(
        self, config: EngineConfig, work: SharedPickle | None, epoch: int, *, set_epoch: bool, start: SessionStart
    ) -> ThreadSession:
        """Start a session; its batches and errors arrive at its handoff."""
        handoff = Handoff()
        shipped = work if config.context is None else None
        steps = StepsOnConsumersThread(handoff) if config.steps_on_consumers_thread else None
        functions = shipped if config.has_processes else config.assembler
        session = self._engine.session(handoff, functions, start, config.steps_seed(epoch), steps)
        opened = ThreadSession(session, handoff, self._loop)
        self._sessions.add(opened)
        run = functools.partial(self._engine.start, set_epoch=set_epoch, pipe_seed=config.pipe_seed, start=start)
        self._loop.call_soon(run, session, epoch)
        return opened

    @property
    def is_current(self) -> bool:
        return self._loop.is_current

    @property
    def idle(self) -> bool:
        """Whether none of its sessions is open."""
        return all(session.handoff.ended for session in self._sessions)

    def close(self) -> None:
        """End all sessions, the workers and the thread, in that order; warn if user code does not end."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return  # a fork: threads and workers are the parent's
        for session in list(self._sessions):
            session.close()
        if self._loop.is_current:
            # The last reference was dropped on the engine's own thread, which cannot wait for itself.
            self._loop.start(self._end())
            return
        left: str | None = None
        try:  # processes that have not ended are killed below
            closing = self._loop.start(self._engine.close(CLOSE_DEADLINE))
            left = closing.result(timeout=5 * CLOSE_DEADLINE + WORK_DEADLINE)
        except TimeoutError:
            left = self._loop.blocked_in()
        except EngineDiedError:
            pass
        self._engine.kill()
        if not self._shares_loop:
            left = self._loop.close(CLOSE_DEADLINE)
        self._engine.watch.close()
        if left is None:
            self._engine.release()
        else:
            warnings.warn(
                f"the loader did not end within its deadline: {left}. In aget and __aiter__, let CancelledError pass, "
                f"and move what blocks to a thread with anyio.to_thread.run_sync.",
                RuntimeWarning,
                stacklevel=2,
            )

    async def _end(self) -> None:
        """End the engine, and the loop after it, on that loop."""
        await self._engine.close(CLOSE_DEADLINE)
        self._engine.kill()
        self._engine.watch.close()
        if not self._shares_loop:
            self._loop.close(CLOSE_DEADLINE)


class ThreadSession:
    """The consumer's end of a session: plans out, batches in.

    Attributes:
        handoff: where the batches arrive.
    """

    def __init__(self, session: Session, handoff: Handoff, loop: LoopThread) -> None:
        self.handoff = handoff
        self._session = session
        self._loop = loop
        self._pid = os.getpid()
        loop.on_death(self._on_death)

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the engine's thread, where waiting for a batch would deadlock.

        Raises:
            ForkedError: this process is a fork, without that thread.
        """
        self._loop.check_process()
        return self._loop.is_current

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        self._loop.call_soon(self._session.admit, plans)

    def on_consumed(self, number: int) -> None:
        with contextlib.suppress(EngineDiedError):  # the handoff has the error
            self._loop.call_soon(self._session.on_consumed, number)

    def request_status(self, number: int) -> None:
        with contextlib.suppress(EngineDiedError):  # the handoff has the error
            self._loop.call_soon(self._session.report_status, number)

    def trace(self, on: bool) -> None:
        with contextlib.suppress(EngineDiedError):  # the handoff has the error
            self._loop.call_soon(self._session.trace, on)

    def close(self) -> None:
        """Cancel the session without waiting for it, and close the handoff; thread-safe, idempotent."""
        if self._pid != os.getpid():
            return  # a fork: the engine's thread, which may have held the locks, does not exist here
        self._loop.forget(self._on_death)
        if self._loop.alive:
            with contextlib.suppress(EngineDiedError):  # since the check, and the session with it
                self._loop.call_soon(self._session.cancel)
        self.handoff.close()

    def _on_death(self, error: BaseException) -> None:
        died = EngineDiedError(why=repr(error))
        died.__cause__ = error
        self.handoff.end(died)


class EpochSession(SessionWrapper):
    """A session that owns its placement, which ends with it."""

    def __init__(self, config: EngineConfig, epoch: int, *, set_epoch: bool, start: SessionStart) -> None:
        self._placement = ThreadPlacement(config)
        try:
            super().__init__(self._placement.open(config, None, epoch, set_epoch=set_epoch, start=start))
        except BaseException:  # Ctrl-C too: nothing owns the placement yet
            self._placement.close()
            raise

    @property
    def handoff(self) -> BatchQueue:
        return self._queue  # without a call in between for each batch

    def close(self) -> None:
        """End the session, its workers and its thread."""
        super().close()
        self._placement.close()
