"""Resources of an event loop.

A resource is opened on a loop at first use, and closed on the loop when the loop ends. A connection
pool works only on the loop that made the pool. A dataset is used on several loops: a loader's
engine has a loop, and `dataset[i]` another.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar, overload

from headrace._records.failure import as_exception

T = TypeVar("T")
L = TypeVar("L", bound=asyncio.Lock | asyncio.Semaphore | asyncio.Condition)

_Make = Callable[[], Any]
_Close = Callable[[Any], object] | None
_owners: dict[asyncio.AbstractEventLoop, list[Owner]] = {}
"""The owners of each loop, in the order of opening."""


class Owner:
    """Task that opens a resource, holds the resource, and closes the resource.

    The task runs on the running loop. Task groups and cancel scopes require opening and closing in
    the same task. The task closes the resource after `start_closing`, and when the task is
    cancelled. `asyncio.run` and headrace's own loops cancel all tasks at their end. Then resources
    are closed in the reverse order of opening.

    `what` names the resource in warnings. `on_end` is called when the resource is closed, or could
    not be opened.

    Attributes:
        opened: the resource, or the error of opening. Wait by `asyncio.shield`.
    """

    def __init__(
        self, make: _Make, close: _Close, what: str, on_end: Callable[[], object]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Any] = self.loop.create_future()
        self.opened.add_done_callback(
            lambda opened: opened.cancelled() or opened.exception()
        )
        self._what = what
        self._on_end = on_end
        self._closing = asyncio.Event()
        # In a new context: the owner outlives the session that first needed the resource.
        self.task = self.loop.create_task(
            self._own(make, close), name=what, context=contextvars.Context()
        )

    def start_closing(self) -> None:
        """Close the resource soon. Call on the loop."""
        if self.opened.done():
            self._closing.set()
        else:
            self.task.cancel()

    async def _own(self, make: _Make, close: _Close) -> None:
        stack = contextlib.AsyncExitStack()
        try:
            try:
                resource = make()
                # An open resource does not keep `make` and the object of `make` alive.
                del make
                if inspect.isawaitable(resource) and (
                    close is not None or not hasattr(resource, "__aexit__")
                ):
                    resource = await resource
                if (
                    close is None
                    and hasattr(resource, "__aexit__")
                    and not _is_lock(resource)
                ):
                    resource = await stack.enter_async_context(resource)
                else:
                    stack.push_async_callback(_end, resource, close)
            except BaseException as error:
                if self.task.cancelling():
                    self.opened.cancel()
                    raise
                self.opened.set_exception(as_exception(error))
                return
            peers = _owners.setdefault(self.loop, [])
            peers.append(self)
            self.opened.set_result(resource)
            try:
                await self._closing.wait()
            except asyncio.CancelledError:
                # `asyncio.timeout` and task groups look at the count during the close.
                while self.task.uncancel():
                    pass
                if later := [owner.task for owner in peers[peers.index(self) + 1 :]]:
                    await asyncio.wait(later)
            try:
                await stack.aclose()
            except BaseException as error:  # user code
                if self.task.cancelling():
                    raise
                text = f"closing {self._what} failed: {type(error).__name__}: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        finally:
            peers = _owners.get(self.loop, [])
            if self in peers:
                peers.remove(self)
                if not peers:
                    del _owners[self.loop]
            self._on_end()


async def _end(resource: Any, close: _Close) -> None:
    by_method = (
        getattr(resource, "aclose", None)
        or getattr(resource, "close", None)
        or (lambda: None)
    )
    closing = by_method() if close is None else close(resource)
    if inspect.isawaitable(closing):
        await closing


class PerLoop(Generic[T]):
    """Resource for each event loop; made by `per_loop`."""

    def __init__(
        self, make: Callable[[], object], close: Callable[[T], object] | None = None
    ) -> None:
        self._make = make
        self._close = close
        self._opened: dict[asyncio.AbstractEventLoop, Owner] = {}
        finalizer = weakref.finalize(self, _close_soon, self._opened, os.getpid())
        finalizer.atexit = False  # loops close their resources

    async def __call__(self) -> T:
        """Return the running loop's resource, opened at the first call.

        Simultaneous first calls open a single resource.

        Raises:
            Exception: opening the resource failed; the next call tries again.
        """
        loop, opened = asyncio.get_running_loop(), self._opened
        owner = opened.get(loop)
        if owner is None:
            # Loops closed without a cancellation of the tasks.
            for dead in [each for each in opened if each.is_closed()]:
                del opened[dead]
                _owners.pop(dead, None)
            owner = opened[loop] = Owner(
                self._make, self._close, repr(self), lambda: opened.pop(loop, None)
            )
        resource: T = (
            owner.opened.result()
            if owner.opened.done()
            else await asyncio.shield(owner.opened)
        )
        return resource

    def __reduce__(self) -> tuple[object, ...]:
        # A copy, for example in another process, opens new resources.
        return PerLoop, (self._make, self._close)

    def __repr__(self) -> str:
        return f"per_loop({getattr(self._make, '__qualname__', self._make)})"


def _close_soon(opened: dict[asyncio.AbstractEventLoop, Owner], pid: int) -> None:
    if pid != os.getpid():
        return  # a fork: the loops are the parent's
    for loop, owner in list(opened.items()):
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(owner.start_closing)


def _is_lock(resource: object) -> bool:
    """Whether user code enters `resource` for moments.

    Examples are locks, semaphores and limiters. In contrast, a pool has a method to close the pool.
    """
    named = functools.partial(hasattr, resource)
    return any(map(named, ("acquire", "wait"))) and not any(
        map(named, ("aclose", "close"))
    )


@overload
def per_loop(make: Callable[[], L]) -> PerLoop[L]: ...
@overload
def per_loop(make: Callable[[], AbstractAsyncContextManager[T]]) -> PerLoop[T]: ...
@overload
def per_loop(
    make: Callable[[], Awaitable[AbstractAsyncContextManager[T]]],
) -> PerLoop[T]: ...
@overload
def per_loop(
    make: Callable[[], Awaitable[T]], close: Callable[[T], object] | None = None
) -> PerLoop[T]: ...
@overload
def per_loop(
    make: Callable[[], T], close: Callable[[T], object] | None = None
) -> PerLoop[T]: ...
def per_loop(
    make: Callable[[], object], close: Callable[[T], object] | None = None
) -> PerLoop[T]:
    """Return a resource that is opened once on each event loop.

    A typical resource is a session or a pool of connections. Connections work only on the loop that
    opened the connections. A dataset is read on several loops: on the loop of each loader, and on
    the loop of ``dataset[i]``. Await the result to get the running loop's resource.

    The resource is closed when the loop ends, or when the object returned by `per_loop` is
    collected. A loader's loop ends when the loader is closed. The last opened resource is closed
    first. A pickled copy has no open resources.

    Args:
        make: opens the resource. A plain or an async function without arguments, called on the
            loop. If `make` gives an async context manager and there is no `close`, the context
            manager is entered, and the result of entering is the resource. A lock, semaphore,
            condition or limiter (with `acquire` or `wait`, without `close`) is not entered: the
            lock is the resource.
        close: closes the resource. A plain or an async function of the resource. By default, an
            async context manager is left. Of any other resource, `aclose()` or `close()` is called,
            if present.

    Raises:
        TypeError: `make` or `close` cannot be called.

    Example:
        >>> from headrace import AsyncDataset
        >>> async def connect(): return ["a connection"]
        >>> connection = per_loop(connect, close=list.clear)
        >>> class Rows(AsyncDataset):
        ...     def __len__(self): return 2
        ...     async def aget(self, index): return index, *await connection()
        >>> Rows()[1]
        (1, 'a connection')
    """
    for name, function in (("make", make), ("close", close)):
        if not callable(function) and (name, function) != ("close", None):
            raise TypeError(f"{name} must be a function, but got {function!r}")
    return PerLoop(make, close)


def cancel_once(future: asyncio.Future[Any]) -> None:
    """Cancel a future, or a task that is not being cancelled.

    Another cancellation would interrupt the cleanup of user code.
    """
    if not (isinstance(future, asyncio.Task) and future.cancelling()):
        future.cancel()


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until all tasks have ended.

    If the waiting task is cancelled, the cancellation is raised after all tasks have ended.
    """
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        cancel_once(task)
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
