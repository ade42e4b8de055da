"""Event loop in a daemon thread.

The engine and the synchronous methods of datasets run on loops in threads. A training step blocks
the loop of the caller, so headrace never uses the caller's loop. A loop that already runs (a
notebook, an async program) does no harm.
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
from typing import Any, TypeVar

from headrace._base.descriptors import check_free
from headrace._eventloop.waiting import wait_done
from headrace.errors import DeadlockError, EngineDiedError

T = TypeVar("T")

EVENT_LOOP_VARIABLE = "HEADRACE_EVENT_LOOP"
# Descriptors of a first loop, on the main thread: uvloop 0.23 opens nine, asyncio five.
_DESCRIPTORS = 10


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of uvloop or asyncio.

    asyncio is used if uvloop is absent or ``HEADRACE_EVENT_LOOP=asyncio``.
    """
    # A half-constructed loop would print an error to standard error.
    check_free(_DESCRIPTORS)
    loop: asyncio.AbstractEventLoop = import_event_loop().new_event_loop()
    return loop


def import_event_loop() -> types.ModuleType:
    """Return the package of the event loops.

    Called before a fork of processes that have an event loop.
    """
    if os.environ.get(EVENT_LOOP_VARIABLE) != "asyncio":
        with suppress(ImportError):  # absent
            import uvloop

            return uvloop
    return asyncio


async def end_tasks(deadline: float) -> str:
    """End all other tasks of the running loop, and close async generators.

    Tasks are cancelled. A task in which the loop closes a dropped generator is not cancelled: the
    generator's `finally` runs there. Cancelled tasks close the loop's resources.

    Returns:
        Text about the tasks that have not ended after `deadline` seconds. Empty if all tasks have
        ended.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline
    seen: set[asyncio.Task[object] | None] = {asyncio.current_task()}
    await asyncio.sleep(0)  # a generator just dropped gets a task in the next iteration
    while new := asyncio.all_tasks() - seen:
        for task in new:
            if type(task.get_coro()).__name__ != "async_generator_athrow":
                task.cancel()
        _, late = await asyncio.wait(new, timeout=max(0.0, until - loop.time()))
        if late:
            return ", ".join(sorted(set(map(repr, late))))
        seen |= new
        # Generators of the ended tasks get tasks now. The iteration also processes late native
        # callbacks.
        await asyncio.sleep(0)
    # A generator's `finally` is user code. The loop is closed in any case.
    with suppress(TimeoutError):
        await asyncio.wait_for(loop.shutdown_asyncgens(), max(0.0, until - loop.time()))
    await asyncio.sleep(0)
    return ""


class LoopThread:
    """Event loop that runs in a daemon thread until `close`.

    The thread makes the loop, runs the loop, and closes the loop. The maker of the LoopThread owns
    the thread and calls `close`. All methods are thread-safe.

    Attributes:
        on_death: functions to call if the loop ends other than by `close`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closing = False
        self._running = threading.Event()
        self.on_death: set[Callable[[BaseException], None]] = set()
        self._died: BaseException | None = None
        self._uncancelled = ""
        # Loops hold tasks by weak references. A task that waits for an object may be the object's
        # only owner, and would be collected.
        self._started: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._running.wait()
        if self._died is not None:  # for example, no descriptors were left for the loop
            raise self._died

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    @property
    def alive(self) -> bool:
        """Whether the loop still accepts calls.

        False in a fork of the process. A fork must not call the loop.
        """
        return not self._closing and self._died is None and self._pid == os.getpid()

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function(*args)`` on the loop.

        Raises:
            EngineDiedError: the loop has ended.
        """
        try:
            # In a new context, without the caller's variables.
            self._loop.call_soon_threadsafe(
                function, *args, context=contextvars.Context()
            )
        except RuntimeError as error:
            raise self._ended_error() from self._died or error

    def _ended_error(self) -> EngineDiedError:
        return EngineDiedError(why=str(self._died or "it was closed"))

    def start(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        try:
            # In a new context, without the caller's variables.
            context = contextvars.Context()
            future = context.run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise self._ended_error() from self._died or error
        self._started.add(future)  # the future holds the task
        future.add_done_callback(self._started.discard)
        return future

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run `coroutine` on the loop and wait for the result.

        Ctrl-C interrupts the wait and cancels the coroutine.

        Raises:
            DeadlockError: the caller runs on the loop.
            EngineDiedError: the loop has ended.
        """
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
        """Cancel every task, stop the loop and join the thread.

        Wait up to `deadline` seconds for the tasks to end. A thread that user code blocks stays, as
        a daemon.

        Returns:
            Text about tasks or code that did not end in time, or None.
        """
        # A fork does not have the thread. Another thread may have held the lock at the fork.
        if self._pid != os.getpid():
            return None
        with self._lock:
            first = not self._closing
            self._closing = True
        if not self._thread.is_alive():
            return None
        if first:
            with suppress(RuntimeError):  # the loop has ended by itself, and is closed
                self._loop.call_soon_threadsafe(self._stop, deadline)
        if self.is_current:
            return None
        # The loop keeps the deadline. Another second for a loop delayed by a blocking call.
        self._thread.join(deadline + 1.0)
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is not None and self._thread.is_alive():
            place = traceback.extract_stack(frame)[-1]
            where = f"{place.name} ({place.filename}:{place.lineno})"
            return f"thread {self._name!r} is blocked in {where}"
        if self._uncancelled:
            return f"cancelled, and still running: {self._uncancelled}"
        return None

    # Makes the coroutine on the loop: a loop that has died would never run the coroutine.
    def _stop(self, deadline: float) -> None:
        self._stopper = self._loop.create_task(self._end(deadline))

    async def _end(self, deadline: float) -> None:
        try:
            self._uncancelled = await end_tasks(deadline)
        finally:
            self._loop.stop()

    def _run(self) -> None:
        try:
            loop = self._loop = new_event_loop()
        except BaseException as error:
            # Raised by the constructor, in the thread that waits.
            self._died = error
            self._running.set()
            return
        asyncio.set_event_loop(loop)
        loop.call_soon(self._running.set)
        try:
            loop.run_forever()
            if not self._closing:
                self._died = RuntimeError("something stopped the loop from outside")
        # SystemExit in a task of user code, for example: reported to the consumers.
        except BaseException as error:
            self._died = error
        finally:
            if self._died is not None:
                for callback in list(self.on_death):
                    callback(self._died)
            loop.call_soon_threadsafe = _refuse  # type: ignore[method-assign, assignment]
            loop.close()


def _refuse(callback: object, *args: object, context: object = None) -> None:
    """Refuse calls of `call_soon_threadsafe` after the loop's end.

    A result of obstore may come after the close. No task awaits the result, and an error would only
    print a traceback on standard error. So calls of obstore are ignored.
    """
    if type(callback).__name__ != "CheckedCompletor":
        raise RuntimeError("Event loop is closed")
