"""An event loop in a daemon thread: the engine runs on one, and the synchronous methods of datasets.

A training step blocks the loop it is on, so headrace never uses the caller's loop; a loop that
already runs (a notebook, an async program) does not matter.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from headrace._core.descriptors import check_free
from headrace._core.eventloop.waiting import wait_done
from headrace.errors import DeadlockError, EngineDiedError

T = TypeVar("T")

EVENT_LOOP_VARIABLE = "HEADRACE_EVENT_LOOP"
_DESCRIPTORS = (
    10  # of a first loop, on the main thread: uvloop 0.23 opens nine; asyncio's needs five
)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new uvloop loop, or asyncio's own if uvloop is absent or ``HEADRACE_EVENT_LOOP=asyncio``."""
    check_free(_DESCRIPTORS)  # a half-constructed loop would print an error to standard error
    loop: asyncio.AbstractEventLoop = import_event_loop().new_event_loop()
    return loop


def import_event_loop() -> types.ModuleType:
    """The package of the event loops; called before a fork of processes that have one."""
    if os.environ.get(EVENT_LOOP_VARIABLE) != "asyncio":
        with suppress(ImportError):  # absent
            import uvloop

            return uvloop
    return asyncio


async def end_tasks(deadline: float) -> str:
    """End the other tasks of the running loop, which closes its resources, and close its remaining async generators.

    Tasks are cancelled, except those by which the loop closes a dropped generator: its `finally`
    runs there. Returns where those wait that have not ended in so many seconds, empty if all have.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline
    seen: set[asyncio.Task[object] | None] = {asyncio.current_task()}
    await asyncio.sleep(0)  # a generator that was just dropped gets its task in the next iteration
    while new := asyncio.all_tasks() - seen:
        for task in new:
            if type(task.get_coro()).__name__ != "async_generator_athrow":
                task.cancel()
        _, late = await asyncio.wait(new, timeout=max(0.0, until - loop.time()))
        if late:
            return ", ".join(sorted(set(map(repr, late))))
        seen |= new
        # Their generators get tasks now; one more iteration so that late native callbacks are
        # processed.
        await asyncio.sleep(0)
    with suppress(
        TimeoutError
    ):  # user code in a generator's `finally`; the loop is closed all the same
        await asyncio.wait_for(loop.shutdown_asyncgens(), max(0.0, until - loop.time()))
    await asyncio.sleep(0)
    return ""


carried: ContextVar[object] = ContextVar("headrace_carried", default=None)
"""A value of the caller's context that the code that runs on the loop sees, too."""


class LoopThread:
    """An event loop that runs in a daemon thread until `close`.

    The thread makes the loop, runs it, and closes it. The maker of the LoopThread owns the thread
    and calls `close`. All methods are thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closing = False
        self._running = threading.Event()
        self.on_death: set[Callable[[BaseException], None]] = (
            set()
        )  # called if it ends other than by `close`
        self._died: BaseException | None = None
        self._uncancelled = ""
        # Loops hold tasks by weak references: a task that waits for an object that only it refers
        # to is collected.
        self._started: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._running.wait()
        if self._died is not None:  # it could not be made: no descriptors are left, for example
            raise self._died

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    @property
    def alive(self) -> bool:
        """Whether the loop still accepts calls; in a fork of its process it does not, and must not be given any."""
        return not self._closing and self._died is None and self._pid == os.getpid()

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function(*args)`` on the loop; raises `EngineDiedError` if the loop has ended."""
        try:
            # In a context of its own, without the caller's variables.
            self._loop.call_soon_threadsafe(function, *args, context=contextvars.Context())
        except RuntimeError as error:  # the loop is closed
            raise EngineDiedError(why=str(self._died or "it was closed")) from self._died or error

    def start(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        try:
            context = contextvars.Context()
            context.run(carried.set, carried.get())
            future = context.run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise EngineDiedError(why=str(self._died or "it was closed")) from self._died or error
        self._started.add(future)  # it holds the task
        future.add_done_callback(self._started.discard)
        return future

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run `coroutine` on the loop and wait for it; Ctrl-C interrupts the wait and cancels the coroutine."""
        if self.is_current:
            coroutine.close()
            raise DeadlockError(what="a blocking method")
        future = self.start(coroutine)
        try:
            wait_done(future)
            return future.result()
        except BaseException:  # Ctrl-C too: the coroutine does not outlive its caller
            future.cancel()
            raise

    def close(self, deadline: float) -> str | None:
        """Cancel every task, wait up to `deadline` seconds for them to end, stop the loop and join the thread.

        Returns what did not end in time, in words. A thread that user code blocks stays, as a
        daemon.
        """
        if (
            self._pid != os.getpid()
        ):  # a fork has no such thread, and another thread may have held the lock
            return None
        with self._lock:
            first = not self._closing
            self._closing = True
        if not self._thread.is_alive():
            return None
        if first:
            with suppress(RuntimeError):  # it has ended by itself, and is closed
                self._loop.call_soon_threadsafe(self._stop, deadline)
        if self.is_current:
            return None
        # The loop keeps the deadline itself; one more second for a loop that a blocking call
        # delays.
        self._thread.join(deadline + 1.0)
        if self._thread.is_alive():
            return self.blocked_in()
        return f"cancelled, and still running: {self._uncancelled}" if self._uncancelled else None

    def blocked_in(self) -> str:
        """The current location of the thread as text: where a loop that does not respond is blocked."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        place = (
            f"{stack[-1].name} ({stack[-1].filename}:{stack[-1].lineno})"
            if stack
            else "an unknown place"
        )
        return f"thread {self._name!r} is blocked in {place}"

    def _stop(
        self, deadline: float
    ) -> None:  # makes the coroutine on the loop: one that has died never would run it
        self._stopper = self._loop.create_task(self._end(deadline))

    async def _end(self, deadline: float) -> None:
        try:
            self._uncancelled = await end_tasks(deadline)
        finally:
            self._loop.stop()

    def _run(self) -> None:
        try:
            loop = self._loop = new_event_loop()
        except BaseException as error:  # raised in the threads that wait for this loop
            self._died = error
            self._running.set()
            return
        asyncio.set_event_loop(loop)
        loop.call_soon(self._running.set)
        try:
            loop.run_forever()
            if not self._closing:
                self._died = RuntimeError("something stopped the loop from outside")
        except (
            BaseException
        ) as error:  # SystemExit of a task of user code: reported to the consumers
            self._died = error
        finally:
            if self._died is not None:
                for callback in list(self.on_death):
                    callback(self._died)
            loop.call_soon_threadsafe = _refuse  # type: ignore[method-assign, assignment]
            loop.close()


def _refuse(callback: object, *args: object, context: object = None) -> None:
    """`call_soon_threadsafe` of a loop that has ended; without an error for results of obstore, which no task awaits.

    One that it is about to hand over may come after the close; it would print a traceback on
    standard error.
    """
    if type(callback).__name__ != "CheckedCompletor":
        raise RuntimeError("Event loop is closed")
