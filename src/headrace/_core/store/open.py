"""Opening an object store by URL, and turning what goes wrong in one into errors that say where and hide secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore.store
from obstore.exceptions import BaseError

from headrace._core.store.errors import Cause, RequestFailure
from headrace._core.store.profiles import PROFILE, has_unused_profiles, profile_of, profile_provider
from headrace._core.store.redaction import redact_text, redact_url, secrets_in
from headrace._core.store.redirects import ALLOW, proxy_for, restrict_redirects
from headrace._core.store.store_options import merged_options
from headrace.errors import (
    ChecksumError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

NATIVE_ERRORS = (BaseError, OSError)
"""What obstore raises when a store refuses or fails."""

NEVER = timedelta(days=1)  # for a time-out that the client cannot be told to leave out
LONGEST_CAUSE = 400  # characters; a server may answer an error with a page
CONNECTION_REMEDIES = {
    Cause.UNREACHABLE: "Check the endpoint and its port, and that the server runs",
    Cause.UNRESOLVED: "Check the URL, and the endpoint and region in the store's options or in the environment",
    Cause.UNTRUSTED: (
        "For a certificate of a private authority, pass the authority's: options={'client_options': "
        "{'root_certificate': Path('ca.pem').read_bytes()}}, or SSL_CERT_FILE in the environment"
    ),
    Cause.NOT_TLS: "If it is a server without TLS, write http:// in place of https://",
    Cause.PLAIN_HTTP: "Write options={'client_options': {'allow_http': True}}",
}
CREDENTIAL_HOST = "169.254.169.254"  # where AWS, GCP and Azure machines are asked for credentials


def check_named(url: str) -> None:
    """Raise `ValueError` for a URL that a new and empty store would be opened for, where no ready one is given."""
    if url.startswith("memory:"):
        raise ValueError("a memory:// URL names no store: give the MemoryStore itself, Store(url, backend=...)")


def check_options(url: str, options: Mapping[str, Any]) -> None:
    """Check a store's options, without opening it.

    Raises:
        ValueError: they name a header that a redirect could take to another host, or credentials twice.
    """
    profile_of(url, options)
    restrict_redirects(url, merged_options(url, options))


def open_store(url: str, options: Mapping[str, Any], *, timeout: float) -> ObjectStore:
    """A store for `url`, with time-outs of ours and no retries of its own unless `options` has them.

    The client's retries know nothing of other fetchers, of `Retry-After` or of a body that is cut short where there is
    no entity tag; `headrace._core.store.reader` retries above it.

    Args:
        url: any URL of obstore's: ``s3://``, ``gs://``, ``az://``, ``http(s)://``, ``file://``.
        options: for `obstore.store.from_url`, with options of the client under ``client_options`` or beside it; and
            ``allow_redirects``, of `redirects`, and ``profile``, of `profiles`.
        timeout: seconds without a byte after which a request has failed, however long it takes in all.

    Raises:
        ValueError: the URL or the options are not ones that obstore understands, or there is no such profile.
        MissingExtraError: credentials are those of an AWS profile, and boto3 is not installed.
        ObjectNotFoundError: the directory of a ``file://`` URL does not exist.
    """
    chosen = {name: value for name, value in options.items() if name not in (ALLOW, PROFILE)}
    if not url.startswith(("file:", "memory:")):
        chosen = _remote(url, options, chosen, timeout)
    try:
        # Behind a slash at the end of a path, obstore would put another one.
        return obstore.store.from_url(url.rstrip("/") if url.startswith("http") else url, **chosen)
    except (BaseError, ValueError, TypeError) as error:
        cause, safe = describe_error(error, secrets_in(options)), redact_url(url)
        if "Unable to canonicalize filesystem root" in cause:
            failure: Exception = ObjectNotFoundError("there is no such directory", url=safe)
        elif "Unable to recognise URL" in cause:
            failure = ValueError(f"{safe} is of no store that is known: s3://, gs://, az://, http(s)://, or a path")
        else:
            failure = ValueError(f"cannot open a store for {safe}: {cause}")
    raise failure  # here, so that the original, which may name secrets, is not its context


def _remote(url: str, options: Mapping[str, Any], chosen: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The arguments of `from_url` for a store that is reached over HTTP."""
    merged = merged_options(url, chosen)
    seconds = timedelta(seconds=timeout)
    client = {
        "timeout": NEVER,  # the stock one, 30 s, covers the whole body, and progress does not extend it
        "read_timeout": seconds,
        "connect_timeout": min(seconds / 3, timedelta(seconds=5)),
        **merged["client_options"],
    }
    merged["client_options"] = {**client, **restrict_redirects(url, {**options, **merged})}
    merged["retry_config"] = {"max_retries": 0, **merged.get("retry_config", {})}
    profile = profile_of(url, options)
    if profile is not None:
        merged["credential_provider"] = profile_provider(profile)
    return merged


def store_error(
    verdict: RequestFailure,
    *,
    doing: str,
    detail: str | None,
    url: str,
    key: str | None,
    index: Any,
    attempts: int,
    elapsed: float,
    hint: str = "",
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
        hint: a further remedy where there was no connection; see `connection_hint`.
    """
    cause, said = verdict.cause, detail or verdict.said or verdict.cause.value
    kind: type[StoreError] = StoreError
    if cause is Cause.NOT_FOUND:
        kind, message = ObjectNotFoundError, f"{doing}: not found: {said.rpartition(' - ')[2]}"
    elif CREDENTIAL_HOST in said:
        kind = StoreUnreachableError
        message = (
            f"{doing}: no credentials were given, and this machine has no service that gives them. Set them in the "
            f"environment or in the store's options, or options={{'skip_signature': True}} for a public bucket"
        )
        if has_unused_profiles(url):
            message += f". AWS profiles are read if one is named: AWS_PROFILE=default, or options={{{PROFILE!r}: …}}"
    elif cause in CONNECTION_REMEDIES:
        kind = StoreUnreachableError
        why = f": {verdict.said}" if verdict.said else ""
        message = f"{doing}: {_request_in(said)}{cause.value}{why}. {CONNECTION_REMEDIES[cause]}{hint}"
    elif cause is Cause.TIMED_OUT:
        heard = cause.value if said == cause.value else f"{cause.value}: {said}"
        kind, message = StoreUnreachableError, f"{doing}: no answer from the store: {heard}"
    elif cause is Cause.REDIRECTED:
        message = (
            f"{doing}: {cause.value}, where it was not followed. If that host can be trusted with what is sent to this "
            f"one, say options={{{ALLOW!r}: True, ...}}"
        )
    elif cause is Cause.WRONG_REGION:
        message = (
            f"{doing}: {cause.value} than the region in the store's options or AWS_REGION (us-east-1 by default). The "
            f"answer to curl -I https://BUCKET.s3.amazonaws.com names it, as x-amz-bucket-region"
        )
    elif cause in (Cause.REFUSED, Cause.EXPIRED):
        message = f"{doing}: {cause.value}; check the credentials in the store's options or in the environment: {said}"
    elif cause is Cause.CHANGED:
        kind, message = (
            ObjectChangedError,
            f"{doing}: {cause.value} since it was listed, or while it was read. Make the dataset anew",
        )
    elif cause is Cause.WRONG_LENGTH:
        kind, message = ObjectChangedError, f"{doing}: {said}: it changed since. Make the dataset anew"
    elif cause is Cause.DAMAGED:
        kind, message = ChecksumError, f"{doing}: {said}; the object itself may be damaged"
    elif cause is Cause.OTHER:
        message = f"{doing} failed: {said}"
    else:
        message = f"{doing} failed: {cause.value}: {said}"
    return kind(message, url=url, key=key, index=index, attempts=attempts, elapsed=elapsed, status=verdict.status)


def connection_hint(url: str, options: Mapping[str, Any]) -> str:
    """A remedy where a store cannot be reached: the proxy that requests go through, without secrets.

    Args:
        url: of the store.
        options: as the user gave them.
    """
    proxy = proxy_for(url, merged_options(url, options))
    if proxy is None:
        return ""
    return f". Requests go through the proxy {redact_url(proxy)}; NO_PROXY names hosts that are connected to directly"


def _request_in(said: str) -> str:
    """The request that an error of obstore names, e.g. ``"GET https://host/key: "``."""
    found = re.search(r"Error performing (\w+ \S+) in ", said)
    return f"{found[1]}: " if found is not None else ""


def describe_error(error: BaseException, secrets: tuple[str, ...] = ()) -> str:
    """What an error of obstore says, on one line, without its debug dump and without secrets."""
    text = str(error).partition("\n\nDebug source:")[0]
    # A body of XML repeats the request, down to the signed headers; its code and message say why.
    told = re.findall(r"<(?:Code|Message)>([^<]*)<", text)
    if "<" in text:
        text = text.partition("<")[0] + ": ".join(told)
    text = " ".join(redact_text(text, secrets).split()).rstrip(" :")
    return text if len(text) <= LONGEST_CAUSE else text[:LONGEST_CAUSE] + " …"
