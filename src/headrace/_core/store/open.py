"""Opening an object store by its URL, and naming it in a cache."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore.store
from obstore.exceptions import BaseError

from headrace._core.store.errors import describe_error
from headrace._core.store.options import (
    ALLOW_REDIRECTS,
    BLACKHOLE_PROXY,
    PROFILE,
    endpoint_of,
    merged_options,
    nested_options,
    option,
    settles_credentials,
    traits_of,
    uses_proxy,
)
from headrace._core.store.redaction import is_secret, redact_url, secrets_in
from headrace.errors import MissingExtraError, ObjectNotFoundError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_NEVER = timedelta(days=1)  # the client has no option for no time-out
# Options of connections, which do not identify the store.
_CONNECTION_OPTIONS = frozenset(
    {"client_options", "retry_config", "credential_provider", "user-agent", ALLOW_REDIRECTS, PROFILE}
)
# Environment variables that name a place, after the prefix of the kind of store.
_PLACES = r".*(ENDPOINT|ACCOUNT_NAME|BASE_URL|EMULATOR|CONTAINER|BUCKET)"


def check_shared(url: str) -> None:
    """Raise `ValueError` for a URL that a new and empty store would be opened for."""
    if not traits_of(url).shared:
        raise ValueError("a memory:// URL names no store: give the MemoryStore itself, Store(url, backend=...)")


def open_store(url: str, options: Mapping[str, object], *, timeout: float) -> ObjectStore:
    """Open a store, with headrace's time-outs, and without retries of its own unless `options` has them.

    The client's retries do not take account of other fetchers, of `Retry-After` or of a body that is cut short where
    there is no entity tag; `Store` retries above it. For the arguments see `Store`.

    Raises:
        ValueError: the URL or the options are not ones that obstore understands.
        MissingExtraError: credentials are those of an AWS profile, and boto3 is not installed.
        ObjectNotFoundError: the directory of a ``file://`` URL does not exist.
    """
    traits = traits_of(url)
    own = (ALLOW_REDIRECTS, PROFILE) if traits.prefix == "aws_" else (ALLOW_REDIRECTS,)
    chosen = {name: value for name, value in options.items() if name not in own}
    if traits.remote:
        chosen = merged_options(url, chosen)
        seconds = timedelta(seconds=timeout)
        chosen["client_options"] = {
            "timeout": _NEVER,  # the default, 30 s, covers the whole body, and progress does not extend it
            "read_timeout": seconds,
            "connect_timeout": min(seconds / 3, timedelta(seconds=5)),
            **nested_options(chosen, "client_options"),
            **_kept_to_one_host(url, {**options, **chosen}),
        }
        chosen["retry_config"] = {"max_retries": 0, **nested_options(chosen, "retry_config")}
        profile = option(url, options, PROFILE)  # or AWS_PROFILE
        if traits.prefix == "aws_" and profile and (PROFILE in options or not settles_credentials(url, options)):
            chosen["credential_provider"] = _profile_provider(str(profile))
    try:
        # obstore would append another slash to one at the end of an HTTP URL.
        store: ObjectStore = obstore.store.from_url(url if traits.bucket else url.rstrip("/") or url, **chosen)  # type: ignore[call-overload]
        return store
    except (BaseError, ValueError, TypeError) as error:
        cause, safe = describe_error(error, secrets_in(options)), redact_url(url)
        if "Unable to canonicalize filesystem root" in cause:
            failure: Exception = ObjectNotFoundError("there is no such directory", url=safe)
        else:
            failure = ValueError(f"cannot open a store for {safe}: {cause}")
    raise failure  # here, so that the original, which may have secrets, is not its context


def _kept_to_one_host(url: str, options: Mapping[str, object]) -> dict[str, object]:
    """Options of a store's client that keep its requests to the store's host; none where they cannot, or may not.

    The client follows redirects wherever they lead, with its default headers, such as an ``x-api-key``, and has no
    option against that. But what is not for the store's host can be sent by way of a proxy at port 0, where nothing can
    listen: a redirect fails before a byte is sent. Where the client also asks other hosts for credentials, or a proxy
    is in use, redirects are followed.
    """
    host = urlsplit(endpoint_of(url, options) or "").hostname
    single = traits_of(url).web_server or option(url, options, PROFILE) or settles_credentials(url, options)
    if host is None or not single or options.get(ALLOW_REDIRECTS) or uses_proxy(url, options):
        return {}
    return {"proxy_url": f"http://{BLACKHOLE_PROXY}", "proxy_excludes": host}


def _profile_provider(profile: str) -> object:
    """Obstore's credential provider for an AWS profile, which boto3 reads (``~/.aws``, SSO, roles)."""
    try:
        import boto3.session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        what = f"reading the AWS profile {profile!r} (AWS_PROFILE, or the option profile=)"
        raise MissingExtraError(what=what, package=error.name or "boto3", extra="aws") from None
    return Boto3CredentialProvider(boto3.session.Session(profile_name=profile))


def store_id(url: str, options: Mapping[str, object], store: ObjectStore | None) -> str | None:
    """A text that is equal for the same store in every process; None for a store in the memory of this process.

    It has the URL, without secrets, and a hash of all options and default headers that are neither secrets nor about
    connections, and of environment variables that name a place: a bucket at two endpoints is two stores. `store` is a
    ready one, in place of `options`.
    """
    traits = traits_of(url, store)
    if not traits.shared:
        return None
    where = redact_url(url)
    given: Mapping[str, object] = merged_options(url, options)
    client = nested_options(given, "client_options")
    if store is not None:
        names = {name: redact_url(str(getattr(store, name, ""))) for name in ("url", "prefix")}
        given = {**(getattr(store, "config", None) or {}), **names}
        client = getattr(store, "client_options", None) or {}
        where += f" {type(store).__name__}"
    headers = {name.lower(): value for name, value in nested_options(client, "default_headers").items()}
    settings = [
        (name, value.decode("latin-1") if isinstance(value, bytes) else str(value))
        for name, value in (*given.items(), *headers.items())
        if name not in _CONNECTION_OPTIONS and not is_secret(name)
    ]
    if traits.prefix:
        place = re.compile(traits.prefix + _PLACES, re.IGNORECASE)
        settings.extend((name, value) for name, value in os.environ.items() if place.fullmatch(name))
    digest = hashlib.sha256(ascii(sorted(settings)).encode()).hexdigest()
    return f"{where} {digest[:32]}" if settings else where
