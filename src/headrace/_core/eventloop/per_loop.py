"""Resources that belong to one event loop: opened on it at first use, and closed on it when the loop ends.

A connection pool works on the loop that it was made on, and on no other. A dataset is used on
several: a loader's engine has one, and `dataset[i]` another.
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

from headrace._core.failure import as_exception

T = TypeVar("T")
L = TypeVar("L", bound=asyncio.Lock | asyncio.Semaphore | asyncio.Condition)

_Make = Callable[[], Any]
_Close = Callable[[Any], object] | None
_owners: dict[asyncio.AbstractEventLoop, list[Owner]] = {}
"""The owners of each loop, in the order in which their resources were opened."""


class Owner:
    """A task of the running loop that opens a resource, holds it, and closes it.

    One task does both, as task groups and cancel scopes require. It closes after `start_closing`,
    and when it is cancelled, as `asyncio.run` and headrace's own loops cancel all tasks at their
    end: then in the reverse order of opening.

    `what` names the resource in warnings; `on_end` is called when it is closed, or could not be
    opened.
    """

    def __init__(self, make: _Make, close: _Close, what: str, on_end: Callable[[], object]) -> None:
        self.loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Any] = self.loop.create_future()
        """The resource, or why it could not be opened. Wait for it by `asyncio.shield`."""
        self.opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._what = what
        self._on_end = on_end
        self._closing = asyncio.Event()
        # In a context of its own: it outlives the session that first needed the resource.
        self.task = self.loop.create_task(
            self._own(make, close), name=what, context=contextvars.Context()
        )

    def start_closing(self) -> None:
        """Close the resource soon; on the loop."""
        if self.opened.done():
            self._closing.set()
        else:
            self.task.cancel()

    async def _own(self, make: _Make, close: _Close) -> None:
        stack = contextlib.AsyncExitStack()
        try:
            try:
                resource = make()
                del make  # once opened, it and its object are not kept alive
                if inspect.isawaitable(resource) and (
                    close is not None or not hasattr(resource, "__aexit__")
                ):
                    resource = await resource
                if close is None and hasattr(resource, "__aexit__") and not _is_lock(resource):
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
                while (
                    self.task.uncancel()
                ):  # `asyncio.timeout` and task groups look at the count while it is closed
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
        getattr(resource, "aclose", None) or getattr(resource, "close", None) or (lambda: None)
    )
    closing = by_method() if close is None else close(resource)
    if inspect.isawaitable(closing):
        await closing


class PerLoop(Generic[T]):
    """A resource for each event loop; made by `per_loop`."""

    def __init__(
        self, make: Callable[[], object], close: Callable[[T], object] | None = None
    ) -> None:
        self._make = make
        self._close = close
        self._opened: dict[asyncio.AbstractEventLoop, Owner] = {}
        finalizer = weakref.finalize(self, _close_soon, self._opened, os.getpid())
        finalizer.atexit = False  # loops close their resources

    async def __call__(self) -> T:
        """The running loop's resource, opened at the first call; many calls at once open one.

        Raises:
            Exception: opening the resource failed; the next call tries again.
        """
        loop, opened = asyncio.get_running_loop(), self._opened
        owner = opened.get(loop)
        if owner is None:
            for dead in [
                each for each in opened if each.is_closed()
            ]:  # closed without cancelling its tasks
                del opened[dead]
                _owners.pop(dead, None)
            owner = opened[loop] = Owner(
                self._make, self._close, repr(self), lambda: opened.pop(loop, None)
            )
        resource: T = (
            owner.opened.result() if owner.opened.done() else await asyncio.shield(owner.opened)
        )
        return resource

    def __reduce__(self) -> tuple[object, ...]:
        return PerLoop, (self._make, self._close)  # a copy, in another process say, opens its own

    def __repr__(self) -> str:
        return f"per_loop({getattr(self._make, '__qualname__', self._make)})"


def _close_soon(opened: dict[asyncio.AbstractEventLoop, Owner], pid: int) -> None:
    if pid != os.getpid():
        return  # a fork: the loops are the parent's
    for loop, owner in list(opened.items()):
        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(owner.start_closing)


def _is_lock(resource: object) -> bool:
    """Whether user code enters `resource` for moments: a lock, a semaphore, a limiter; a pool can be closed."""
    named = functools.partial(hasattr, resource)
    return any(map(named, ("acquire", "wait"))) and not any(map(named, ("aclose", "close")))


@overload
def per_loop(make: Callable[[], L]) -> PerLoop[L]: ...
@overload
def per_loop(make: Callable[[], AbstractAsyncContextManager[T]]) -> PerLoop[T]: ...
@overload
def per_loop(make: Callable[[], Awaitable[AbstractAsyncContextManager[T]]]) -> PerLoop[T]: ...
@overload
def per_loop(
    make: Callable[[], Awaitable[T]], close: Callable[[T], object] | None = None
) -> PerLoop[T]: ...
@overload
def per_loop(make: Callable[[], T], close: Callable[[T], object] | None = None) -> PerLoop[T]: ...
def per_loop(make: Callable[[], object], close: Callable[[T], object] | None = None) -> PerLoop[T]:
    """A resource that is opened once on each event loop that uses it: a session, a pool of connections.

    Connections work on the loop that they were opened on. A dataset is read on several: each
    loader's, and the one of ``dataset[i]``. Await the result to get the running loop's resource. It
    is closed when its loop ends (a loader's when the loader is closed), the last opened first, or
    when the object that this returns is collected. A pickled copy has no open resources.

    Args:
        make: opens it; a plain or an async function without arguments, called on the loop. Where it
            gives an async context manager and there is no `close`, it is entered, and the resource
            is the result of entering. A lock, semaphore, condition or limiter (with `acquire` or
            `wait`, without `close`) is not entered: it is the resource.
        close: closes it; a plain or an async function of the resource. By default, an async context
            manager is left, and of anything else `aclose()` or `close()` is called where there is
            one.

    Raises:
        TypeError: one of the two cannot be called.

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


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end, even if this is cancelled; then the cancellation is raised."""
    pending = {task for task in tasks if task.cancel()}
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
