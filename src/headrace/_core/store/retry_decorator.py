"""Retries for a user's own async functions, with the policy and budget of object stores."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, overload

from headrace._core.notes import add_note
from headrace._core.retry_policy import RetryPolicy, as_policy
from headrace._core.store.backoff import RetryGate, Tries, count_refusal
from headrace._core.store.driver_errors import classify_driver_error, retry_after_of
from headrace._core.store.errors import Cause, RequestFailure
from headrace._core.store.request_stats import RequestStats, session_stats

P = ParamSpec("P")
T = TypeVar("T")
Errors = type[Exception] | tuple[type[Exception], ...]


@overload
def retrying(policy: Callable[P, Awaitable[T]], /) -> Callable[P, Coroutine[Any, Any, T]]: ...
@overload
def retrying(
    policy: RetryPolicy | int | None = None, /, *, on: Errors = (), retry_if: Callable[[Exception], bool] | None = None
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]: ...
def retrying(
    policy: Callable[P, Awaitable[T]] | RetryPolicy | int | None = None,
    /,
    *,
    on: Errors = (),
    retry_if: Callable[[Exception], bool] | None = None,
) -> object:
    """Decorate an async function, such as `aget`, so that calls with transient errors are retried.

    What is tried again by itself: HTTP status 408, 425, 429 and 5xx, as the errors of aiohttp, httpx, requests,
    botocore and others have it; time-outs; broken and refused connections. Waits grow exponentially with jitter.
    ``Retry-After``, or an attribute `retry_after` of the exception, in seconds, is kept to by all calls of the
    function, which also share a budget of retries. A refusal (429, 503) is reported, as `report_throttled` does. After
    the last attempt the error is raised as it is, with a note.

    Args:
        policy: a `RetryPolicy`, or a number of attempts. By default the loader's `retry=`, and
            without a loader ``RetryPolicy()``. ``@retrying`` without parentheses is the same.
        on: further types of exceptions that are retried.
        retry_if: a predicate of the exception that decides instead whether the call is retried.

    Returns:
        The function with retries; without a function, the decorator.

    Raises:
        TypeError: the decorated object is not an async function, or an argument has the wrong type.

    Example:
        >>> import asyncio
        >>> answers = [ConnectionResetError(), "a page"]
        >>> @retrying(RetryPolicy(max_attempts=3, initial_backoff=0.01))
        ... async def fetch():
        ...     answer = answers.pop(0)
        ...     if isinstance(answer, Exception): raise answer
        ...     return answer
        >>> asyncio.run(fetch())
        'a page'
    """
    if callable(policy):
        return _decorated(policy, _Calls(None, on, retry_if))
    types = on if isinstance(on, tuple) else (on,)
    if not all(isinstance(each, type) and issubclass(each, Exception) for each in types):
        raise TypeError(f"on must be an exception type or a tuple of them, but got {on!r}")
    if retry_if is not None and not callable(retry_if):
        raise TypeError(f"retry_if must be a function of an exception, but got {retry_if!r}")
    chosen = None if policy is None else as_policy(policy)
    # One gate for each function: requests to one service should go through one function.
    return lambda function: _decorated(function, _Calls(chosen, types, retry_if))


def _decorated(function: Callable[P, Awaitable[T]], calls: _Calls) -> Callable[P, Awaitable[T]]:
    if not callable(function) or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(f"retrying is for async functions that return a result, but got {function!r}")

    @functools.wraps(function)
    async def tried_again(*args: P.args, **kwargs: P.kwargs) -> T:
        return await calls.call(lambda: function(*args, **kwargs))

    return tried_again


class _Calls:
    """The calls of one decorated function."""

    def __init__(
        self,
        policy: RetryPolicy | None,
        on: Errors,
        retry_if: Callable[[Exception], bool] | None,
    ) -> None:
        self._policy = policy
        self._on = on
        self._retry_if = retry_if
        self._gate = RetryGate()
        self._alone = RequestStats()  # where calls outside a loader are counted

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        here = session_stats.get(self._alone)
        tries = Tries(self._policy or here.retry or RetryPolicy())
        gate = self._gate
        await gate.wait_open(tries)
        while True:
            here.requests += 1
            here.retries += bool(tries.attempts)
            try:
                result = await make()
            except Exception as error:  # user code
                tries.attempts += 1
                failure = self._classify(error)
                if not failure.cause.is_transient:
                    raise
                count_refusal(failure, here)
                if seconds := retry_after_of(error):
                    gate.hold_back(seconds)
                if not await gate.may_try_again(failure, tries):
                    _note_attempts(error, tries, failure)
                    raise
            else:
                gate.successes += 1
                return result

    def _classify(self, error: Exception) -> RequestFailure:
        failure = classify_driver_error(error)
        if self._retry_if is None:
            wanted = failure.cause.is_transient or isinstance(error, self._on)
        else:
            wanted = self._retry_if(error)
        if wanted == failure.cause.is_transient:
            return failure
        return RequestFailure(Cause.SERVER if wanted else Cause.OTHER, failure.status)


def _note_attempts(error: Exception, tries: Tries, failure: RequestFailure) -> None:
    status = "" if failure.status is None else f", the last time with HTTP status {failure.status}"
    add_note(error, f"headrace: failed {tries.attempts} times in {tries.elapsed:.1f} s{status}")
