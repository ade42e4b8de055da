"""Opening an object store by URL, and turning what goes wrong in one into errors that say where and hide secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore.store
from obstore.exceptions import BaseError

from headrace.errors import (
    DamagedObjectError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    StoreUnreachableError,
)
from headrace.io.redirects import ALLOW, fenced
from headrace.io.urls import redact_text, redact_url, secrets_in
from headrace.io.verdicts import Cause, Verdict

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["NATIVE_ERRORS", "check_named", "check_settings", "describe_error", "open_store", "store_error"]

NATIVE_ERRORS = (BaseError, OSError)
"""What obstore raises when a store refuses or fails."""

NEVER = timedelta(days=1)  # for a time-out that the client cannot be told to leave out
LONGEST_CAUSE = 400  # characters; a server may answer an error with a page
CREDENTIAL_HOST = "169.254.169.254"  # where AWS, GCP and Azure machines are asked for credentials


def check_settings(store: ObjectStore | None, options: Mapping[str, Any] | None, timeout: float) -> None:
    """Raise `ValueError` where what a dataset was told of its store does not go together.

    Args:
        store: a ready one.
        options: for opening one.
        timeout: seconds.
    """
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r} must be more than zero seconds")
    if store is not None and options is not None:
        raise ValueError("store= is ready for use; store_options= would be ignored. Give one of the two")


def check_named(url: str) -> None:
    """Raise `ValueError` for a URL that a new and empty store would be opened for, where no ready one is given."""
    if url.startswith("memory:"):
        raise ValueError("a memory:// URL names no store that exists: give the MemoryStore itself as store=")


def open_store(url: str, options: Mapping[str, Any], *, timeout: float) -> ObjectStore:
    """A store for `url`, with time-outs of ours and no retries of its own unless `options` has them.

    The client's retries know nothing of other fetchers, of `Retry-After` or of a body that is cut short where there is
    no entity tag; `headrace.io.reader` retries above it.

    Args:
        url: any URL of obstore's: ``s3://``, ``gs://``, ``az://``, ``http(s)://``, ``file://``.
        options: for `obstore.store.from_url`; and ``allow_redirects``, of `headrace.io.redirects`.
        timeout: seconds without a byte after which a request has failed, however long it takes in all.

    Raises:
        ValueError: the URL or the options are not ones that obstore understands.
        ObjectNotFoundError: the directory of a ``file://`` URL does not exist.
    """
    chosen = {name: value for name, value in options.items() if name != ALLOW}
    if not url.startswith(("file:", "memory:")):
        seconds = timedelta(seconds=timeout)
        client: dict[str, Any] = {
            "timeout": NEVER,  # the stock one, 30 s, covers the whole body, and progress does not extend it
            "read_timeout": seconds,
            "connect_timeout": min(seconds / 3, timedelta(seconds=5)),
        }
        if url.startswith("http:"):
            client["allow_http"] = True
        chosen["client_options"] = {**client, **chosen.get("client_options", {}), **fenced(url, options)}
        chosen["retry_config"] = {"max_retries": 0, **chosen.get("retry_config", {})}
    try:
        # Behind a slash at the end of a path, obstore would put another one.
        return obstore.store.from_url(url.rstrip("/") if url.startswith("http") else url, **chosen)
    except (BaseError, ValueError, TypeError) as error:
        cause, safe = describe_error(error, secrets_in(options)), redact_url(url)
        if "Unable to canonicalize filesystem root" in cause:
            failure: Exception = ObjectNotFoundError("there is no such directory", url=safe)
        else:
            failure = ValueError(f"cannot open a store for {safe}: {cause}")
    raise failure  # here, so that the original, which may name secrets, is not its context


def store_error(
    verdict: Verdict,
    *,
    doing: str,
    detail: str | None,
    url: str,
    key: str | None,
    index: Any,
    attempts: int,
    elapsed: float,
) -> StoreError:
    """The error to raise, outside the handler of obstore's, whose text may have secrets.

    Args:
        verdict: on the last attempt.
        doing: what failed, e.g. ``"reading object 'a.bin' (index 3)"``.
        detail: what obstore said, as `describe_error` gives it; None where it said nothing was wrong.
        url: the store's URL, redacted.
        key: the object's key.
        index: the sample's index.
        attempts: how many there were.
        elapsed: seconds they took.
    """
    cause, said = verdict.cause, detail or verdict.said or verdict.cause.value
    kind: type[StoreError] = StoreError
    if cause is Cause.NOT_FOUND:
        kind, message = ObjectNotFoundError, f"{doing}: not found: {said.rpartition(' - ')[2]}"
    elif CREDENTIAL_HOST in said:
        kind = StoreUnreachableError
        message = (
            f"{doing}: no credentials were given, and this machine has no service that gives them. Set them in the "
            f"environment or in store_options, or store_options={{'skip_signature': True}} for a public bucket"
        )
    elif cause in (Cause.UNREACHABLE, Cause.TIMED_OUT):
        heard = cause.value if said == cause.value else f"{cause.value}: {said}"
        kind, message = StoreUnreachableError, f"{doing}: no answer from the store: {heard}"
    elif cause is Cause.REDIRECTED:
        message = (
            f"{doing}: {cause.value}, where it was not followed. If that host can be trusted with what is sent to this "
            f"one, say store_options={{{ALLOW!r}: True, ...}}"
        )
    elif cause in (Cause.REFUSED, Cause.EXPIRED):
        message = f"{doing}: {cause.value}; check the credentials in store_options: {said}"
    elif cause is Cause.CHANGED:
        kind, message = (
            ObjectChangedError,
            f"{doing}: {cause.value} since it was listed, or while it was read. Make the dataset anew",
        )
    elif cause is Cause.WRONG_LENGTH:
        kind, message = ObjectChangedError, f"{doing}: {said}: it changed since. Make the dataset anew"
    elif cause is Cause.DAMAGED:
        kind, message = DamagedObjectError, f"{doing}: {said}; the object itself may be damaged"
    elif cause is Cause.OTHER:
        message = f"{doing} failed: {said}"
    else:
        message = f"{doing} failed: {cause.value}: {said}"
    return kind(message, url=url, key=key, index=index, attempts=attempts, elapsed=elapsed, status=verdict.status)


def describe_error(error: BaseException, secrets: tuple[str, ...] = ()) -> str:
    """What an error of obstore says, on one line, without its debug dump and without secrets."""
    text = str(error).partition("\n\nDebug source:")[0]
    # A body of XML repeats the request, down to the signed headers; its code and message say why.
    told = re.findall(r"<(?:Code|Message)>([^<]*)<", text)
    if "<" in text:
        text = text.partition("<")[0] + ": ".join(told)
    text = " ".join(redact_text(text, secrets).split()).rstrip(" :")
    return text if len(text) <= LONGEST_CAUSE else text[:LONGEST_CAUSE] + " …"
