"""Opening an object store by its URL."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError

from headrace._core.store.errors import describe_error
from headrace._core.store.profiles import PROFILE, profile_of, profile_provider
from headrace._core.store.redaction import redact_url, secrets_in
from headrace._core.store.redirects import ALLOW, restrict_redirects
from headrace._core.store.schemes import TRAITS, traits_of
from headrace._core.store.store_options import merged_options, nested_options
from headrace.errors import ObjectNotFoundError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_NEVER = timedelta(days=1)  # the client has no option for no time-out


def check_shared(url: str) -> None:
    """Raise `ValueError` for a URL that a new and empty store would be opened for."""
    if not traits_of(url).shared:
        raise ValueError("a memory:// URL names no store: give the MemoryStore itself, Store(url, backend=...)")


def check_options(url: str, options: Mapping[str, object]) -> None:
    """Check a store's options, without opening it.

    Raises:
        ValueError: they name a header that a redirect could take to another host, or credentials twice.
    """
    profile_of(url, options)
    restrict_redirects(url, merged_options(url, options))


def open_store(url: str, options: Mapping[str, object], *, timeout: float) -> ObjectStore:
    """Open a store, with headrace's time-outs, and without retries of its own unless `options` has them.

    The client's retries do not take account of other fetchers, of `Retry-After` or of a body that is cut short where
    there is no entity tag; `StoreRequests` retries above it.

    Args:
        url: of any scheme in `schemes.TRAITS`.
        options: for `obstore.store.from_url`, with options of the client under ``client_options`` or beside it; and
            ``allow_redirects``, of `redirects`, and ``profile``, of `profiles`.
        timeout: seconds without a byte after which a request has failed, however long it takes in all.

    Raises:
        ValueError: the URL or the options are not ones that obstore understands, or there is no such profile.
        MissingExtraError: credentials are those of an AWS profile, and boto3 is not installed.
        ObjectNotFoundError: the directory of a ``file://`` URL does not exist.
    """
    traits = traits_of(url)
    chosen = {name: value for name, value in options.items() if name not in (ALLOW, PROFILE)}
    if traits.remote:
        chosen = _remote_options(url, options, chosen, timeout)
    try:
        # obstore would append another slash to one at the end of an HTTP URL.
        return traits.open(url if traits.bucket else url.rstrip("/") or url, **chosen)
    except (BaseError, ValueError, TypeError) as error:
        cause, safe = describe_error(error, secrets_in(options)), redact_url(url)
        if "Unable to canonicalize filesystem root" in cause:
            failure: Exception = ObjectNotFoundError("there is no such directory", url=safe)
        elif "Unable to recognise URL" in cause:
            known = ", ".join(f"{traits.schemes[0]}://" for traits in TRAITS if traits.shared)
            failure = ValueError(f"{safe} has an unknown scheme: use one of {known}, or a path")
        else:
            failure = ValueError(f"cannot open a store for {safe}: {cause}")
    raise failure  # here, so that the original, which may have secrets, is not its context


def _remote_options(
    url: str, options: Mapping[str, object], chosen: Mapping[str, object], timeout: float
) -> dict[str, object]:
    merged = merged_options(url, chosen)
    seconds = timedelta(seconds=timeout)
    client = {
        "timeout": _NEVER,  # the default, 30 s, covers the whole body, and progress does not extend it
        "read_timeout": seconds,
        "connect_timeout": min(seconds / 3, timedelta(seconds=5)),
        **nested_options(merged, "client_options"),
    }
    merged["client_options"] = {**client, **restrict_redirects(url, {**options, **merged})}
    merged["retry_config"] = {"max_retries": 0, **nested_options(merged, "retry_config")}
    profile = profile_of(url, options)
    if profile is not None:
        merged["credential_provider"] = profile_provider(profile)
    return merged
