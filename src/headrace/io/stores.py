"""Opening an object store by URL, and turning what goes wrong in one into errors that say where and hide secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore.store
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from headrace.errors import ObjectNotFoundError, StoreError, StoreUnreachableError
from headrace.io.urls import redact_text, redact_url, secrets_in

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["NATIVE_ERRORS", "describe_error", "open_store", "store_error"]

NATIVE_ERRORS = (BaseError, OSError)
"""What obstore raises when a store refuses or fails."""

LONGEST_CAUSE = 400  # characters; a server may answer an error with a page
CREDENTIAL_HOST = "169.254.169.254"  # where AWS, GCP and Azure machines are asked for credentials


def open_store(url: str, options: Mapping[str, Any], *, timeout: float) -> ObjectStore:
    """A store for `url`, with retries and time-outs that fit in `timeout` unless `options` has its own.

    obstore's stock options retry ten times over three minutes; a wrong URL is better reported while someone still
    looks.

    Args:
        url: any URL of obstore's: ``s3://``, ``gs://``, ``az://``, ``http(s)://``, ``file://``.
        options: for `obstore.store.from_url`.
        timeout: seconds for one request; no retry starts later than that after the first try.

    Raises:
        ValueError: the URL or the options are not ones that obstore understands.
        ObjectNotFoundError: the directory of a ``file://`` URL does not exist.
    """
    chosen = dict(options)
    if not url.startswith(("file:", "memory:")):
        seconds = timedelta(seconds=timeout)
        client: dict[str, Any] = {"timeout": seconds, "connect_timeout": min(seconds / 3, timedelta(seconds=5))}
        if url.startswith("http:"):
            client["allow_http"] = True
        retry = {"max_retries": 3, "retry_timeout": seconds}
        chosen["client_options"] = {**client, **chosen.get("client_options", {})}
        chosen["retry_config"] = {**retry, **chosen.get("retry_config", {})}
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


def store_error(error: BaseException, *, doing: str, url: str, secrets: tuple[str, ...] = ()) -> StoreError:
    """The error to raise, ``from None``, in place of one of obstore's.

    Args:
        error: what obstore raised; its text may have secrets, the result has none.
        doing: what failed, e.g. ``"reading object 'a.bin' (index 3)"``.
        url: the store's URL; redacted here.
        secrets: values to mask in the text.
    """
    safe, cause = redact_url(url), describe_error(error, secrets)
    if isinstance(error, FileNotFoundError) or "404 Not Found" in cause:
        return ObjectNotFoundError(f"{doing}: not found: {cause.rpartition(' - ')[2]}", url=safe)
    if CREDENTIAL_HOST in cause:
        return StoreUnreachableError(
            f"{doing}: no credentials were given, and this machine has no service that gives them. Set them in the "
            f"environment or in store_options, or store_options={{'skip_signature': True}} for a public bucket",
            url=safe,
        )
    if "HTTP error: error sending request" in cause or isinstance(error, TimeoutError):
        return StoreUnreachableError(f"{doing}: no answer from the store: {cause}", url=safe)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return StoreError(f"{doing}: refused; check the credentials in store_options: {cause}", url=safe)
    return StoreError(f"{doing} failed: {cause}", url=safe)


def describe_error(error: BaseException, secrets: tuple[str, ...] = ()) -> str:
    """What an error of obstore says, on one line, without its debug dump and without secrets."""
    text = str(error).partition("\n\nDebug source:")[0]
    # A body of XML repeats the request, down to the signed headers; its code and message say why.
    told = re.findall(r"<(?:Code|Message)>([^<]*)<", text)
    if "<" in text:
        text = text.partition("<")[0] + ": ".join(told)
    text = " ".join(redact_text(text, secrets).split()).rstrip(" :")
    return text if len(text) <= LONGEST_CAUSE else text[:LONGEST_CAUSE] + " …"
