"""The thread placement: the engine in a daemon thread.

The thread belongs to the caller's process, and runs an event loop.
"""

from __future__ import annotations

import socket
import threading
import warnings
from collections import deque
from contextlib import suppress
from typing import Any

from headrace._engine.config import EngineConfig
from headrace._engine.engine import Engine, EngineSession
from headrace._engine.executors import ProcessExecutor
from headrace._engine.sample_functions import apply_on_consumers_thread
from headrace._eventloop.loop_thread import LoopThread
from headrace._eventloop.waiting import Waker
from headrace._links.inline import WorkOnConsumersThread
from headrace._links.placement import CLOSE_DEADLINE, Placement
from headrace._links.session import Session
from headrace._pool.supervisor import WORK_DEADLINE
from headrace._records.batches import SessionStart
from headrace._records.messages import EngineRequest, Link, SessionEnd
from headrace._transport.shared_pickle import SharedPickle
from headrace.errors import EngineDiedError


class Mailbox(Link):
    """A link with messages from an event loop in another thread.

    Nothing polls. A byte is written to a socket pair only if the consumer waits. The mailbox needs
    no limit, because there are no more batches than outstanding plans.
    """

    source: socket.socket

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self.messages = deque()
        # Reentrant: the garbage collector may close an abandoned iterator inside `put`, on the
        # thread of the engine.
        self._lock = threading.RLock()
        self._waiting = False
        self._closed = False
        self._waker = Waker()
        self.source = self._waker.source
        loop.on_death.add(self._on_death)

    def _on_death(self, error: BaseException) -> None:
        died = EngineDiedError(why=repr(error))
        died.__cause__ = error
        self.put(SessionEnd(died))

    def put(self, message: Any) -> None:
        """Hand over a message, from any thread.

        If the consumer has left, the message is dropped.
        """
        with self._lock:
            if not self._closed:
                self.messages.append(message)
                if self._waiting:
                    self.wake()

    def must_wait(self) -> bool:
        with self._lock:
            if self.messages or self._closed:
                return False
            self._waker.drain()
            self._waiting = True
            return True

    def wake(self) -> None:
        with self._lock:
            self._waiting = False
            self._waker.wake()

    def leave(self) -> None:
        self._loop.on_death.discard(self._on_death)
        self.wake()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.messages.clear()
            self._waker.close()


class ThreadPlacement(Placement):
    """An engine on an event loop in a thread of this process."""

    name = "thread"
    has_copy = False

    def __init__(
        self,
        config: EngineConfig,
        work: SharedPickle | None = None,
        *,
        for_one_session: bool = False,
    ) -> None:
        super().__init__()
        self._engine = engine = Engine(config, work if config.context is None else None)
        if isinstance(engine.executor, ProcessExecutor):
            engine.executor.call = engine.call_on_consumers_thread
        self._for_one_session = for_one_session
        try:
            self._loop = LoopThread("headrace-engine")
        except BaseException:
            # No thread could be started, or Ctrl-C; the engine has workers.
            engine.executor.release()
            raise
        self._ended = False

    @property
    def alive(self) -> bool:
        return self._loop.alive and self._engine.executor.broken is None

    @property
    def is_current(self) -> bool:  # type: ignore[override]
        return self._loop.is_current

    def _open(
        self, config: EngineConfig, work: SharedPickle | None, start: SessionStart
    ) -> Session:
        link = ThreadLink(self._loop)
        shipped = work if config.context is None else None
        apply = None
        if config.functions_on_consumers_thread:
            apply = apply_on_consumers_thread(link.put)
        functions = shipped if config.has_processes else config.assembler
        session = EngineSession(self._engine, link.put, functions, start, apply)
        link.session = session
        self._loop.call_soon(self._engine.start, session)
        return Session(
            link,
            work=WorkOnConsumersThread(config)
            if config.deferred or apply is not None
            else None,
            on_close=self.close if self._for_one_session else None,
        )

    def _end(self) -> None:
        """End the workers, then the thread.

        If user code does not end, a warning is given.
        """
        if self._ended:
            return
        self._ended = True
        if self._loop.is_current:
            # The last reference was dropped on the engine's thread. This thread cannot wait for
            # itself.
            self._loop.start(self._end_on_loop())
            return
        # Remaining processes are killed below.
        with suppress(TimeoutError, EngineDiedError):
            closing = self._loop.start(self._engine.close(CLOSE_DEADLINE))
            closing.result(timeout=5 * CLOSE_DEADLINE + WORK_DEADLINE)
        self._engine.executor.kill()
        left = self._loop.close(CLOSE_DEADLINE)
        self._engine.watch.close()
        if left is None:
            self._engine.executor.release()
        else:
            warnings.warn(
                f"the loader did not end within its deadline: {left}. In aget and __aiter__, let "
                "CancelledError pass, and move what blocks to a thread with "
                "anyio.to_thread.run_sync.",
                RuntimeWarning,
                stacklevel=2,
            )

    async def _end_on_loop(self) -> None:
        await self._engine.close(CLOSE_DEADLINE)
        self._engine.executor.kill()
        self._engine.watch.close()
        self._loop.close(CLOSE_DEADLINE)


class ThreadLink(Mailbox):
    """A link to an engine's session in a thread of this process."""

    session: EngineSession

    @property
    def is_current(self) -> bool:  # type: ignore[override]
        return self._loop.is_current

    def send(self, message: EngineRequest) -> None:
        with suppress(EngineDiedError):  # a `SessionEnd` has the reason
            self._loop.call_soon(self.session.handle, message)

    def leave(self) -> None:
        if self._loop.alive:
            with suppress(EngineDiedError):  # the engine has died since the check
                self._loop.call_soon(self.session.leave)
        super().leave()
