"""Classification of the errors of HTTP clients and database drivers, by their attributes: no client is imported."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from headrace._core.store.errors import Cause, RequestFailure, cause_of_status
from headrace._core.store.retry_after import parse_retry_after
from headrace.errors import HeadraceError

# By package and class, of errors that are not Python's own TimeoutError or ConnectionError. The first in an error's
# method resolution order counts.
_CLASSES = {
    ("aiohttp", "ClientSSLError"): Cause.OTHER,
    ("aiohttp", "ClientConnectionError"): Cause.UNREACHABLE,
    ("aiohttp", "ClientPayloadError"): Cause.CUT,
    ("httpx", "TimeoutException"): Cause.TIMED_OUT,
    ("httpx", "NetworkError"): Cause.UNREACHABLE,
    ("httpx", "RemoteProtocolError"): Cause.CUT,
    ("requests", "SSLError"): Cause.OTHER,
    ("requests", "Timeout"): Cause.TIMED_OUT,
    ("requests", "ConnectionError"): Cause.UNREACHABLE,
    ("requests", "ChunkedEncodingError"): Cause.CUT,
    ("botocore", "ReadTimeoutError"): Cause.TIMED_OUT,
    ("botocore", "ConnectTimeoutError"): Cause.TIMED_OUT,
    ("botocore", "SSLError"): Cause.OTHER,
    ("botocore", "ConnectionError"): Cause.UNREACHABLE,
    ("botocore", "ConnectionClosedError"): Cause.UNREACHABLE,
    ("asyncpg", "TooManyConnectionsError"): Cause.THROTTLED,
    ("asyncpg", "CannotConnectNowError"): Cause.UNREACHABLE,
    ("asyncpg", "PostgresConnectionError"): Cause.UNREACHABLE,
    ("redis", "AuthenticationError"): Cause.REFUSED,
    ("redis", "BusyLoadingError"): Cause.UNREACHABLE,
    ("redis", "TimeoutError"): Cause.TIMED_OUT,
    ("redis", "ConnectionError"): Cause.UNREACHABLE,
}
# AWS's throttling codes, sent with status 400.
_THROTTLED_CODES = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)


def classify_driver_error(error: BaseException) -> RequestFailure:
    """Classify the error of a failed call.

    An HTTP status is looked for where aiohttp, httpx, requests, botocore, urllib and the clients of Google and OpenAI
    have it; without one, the error's class decides. An exception with an attribute `retry_after` is a refusal for a
    while. What headrace raises has been tried again already.

    Example:
        >>> error = OSError("slow down")
        >>> error.status = 429
        >>> classify_driver_error(error).cause.is_transient, classify_driver_error(KeyError("id")).cause.is_transient
        (True, False)
    """
    if isinstance(error, HeadraceError):
        return RequestFailure(Cause.OTHER)
    status = _status_of(error)
    if _aws_code(error) in _THROTTLED_CODES:
        return RequestFailure(Cause.THROTTLED, status)
    if status is not None:
        return RequestFailure(cause_of_status(status), status)
    if getattr(error, "retry_after", None) is not None:
        return RequestFailure(Cause.THROTTLED)
    if isinstance(error, TimeoutError):
        return RequestFailure(Cause.TIMED_OUT)
    for cls in type(error).__mro__:
        cause = _CLASSES.get((cls.__module__.partition(".")[0], cls.__name__))
        if cause is not None:
            return RequestFailure(cause)
    if isinstance(error, ConnectionError | socket.gaierror):
        return RequestFailure(Cause.UNREACHABLE)
    return RequestFailure(Cause.OTHER)


def retry_after_of(error: BaseException) -> float | None:
    """The seconds to wait, by the error's `retry_after` or its `Retry-After` header."""
    given = getattr(error, "retry_after", None)
    if isinstance(given, timedelta):
        return max(0.0, given.total_seconds())
    if isinstance(given, int | float) and not isinstance(given, bool):
        return max(0.0, float(given))
    value = _header(error, "Retry-After")
    return None if value is None else parse_retry_after(value, time.time())


def _status_of(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    for holder, name in (
        (error, "status"),  # aiohttp
        (error, "status_code"),  # OpenAI, Azure
        (response, "status_code"),  # httpx, requests
        (response, "status"),
        (error, "code"),  # urllib, Google
    ):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
            return value
    status = _aws(error, "ResponseMetadata").get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _header(error: BaseException, name: str) -> str | None:
    response = getattr(error, "response", None)
    for headers in (
        getattr(error, "headers", None),  # aiohttp, urllib
        getattr(response, "headers", None),  # httpx, requests
        _aws(error, "ResponseMetadata").get("HTTPHeaders"),
    ):
        get = getattr(headers, "get", None)
        value = None if get is None else get(name, None) or get(name.lower(), None)
        if value is not None:
            return str(value)
    return None


def _aws(error: BaseException, part: str) -> Mapping[str, object]:
    response = getattr(error, "response", None)
    found = response.get(part) if isinstance(response, dict) else None
    return found if isinstance(found, dict) else {}


def _aws_code(error: BaseException) -> object:
    return _aws(error, "Error").get("Code")
