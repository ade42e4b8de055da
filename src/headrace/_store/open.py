"""Open an object store by URL and options, and identify the store.

`StoreTraits` says how kinds of stores differ. `store_id` names a store in a cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from urllib.parse import urlsplit

import obstore.store
from obstore.exceptions import BaseError
from obstore.store import (
    AzureStore,
    GCSStore,
    HTTPStore,
    LocalStore,
    MemoryStore,
    ObjectStore,
    S3Store,
)

from headrace._extras import require
from headrace._store.errors import (
    ALLOW_REDIRECTS,
    BLACKHOLE_PROXY,
    PROFILE,
    describe_error,
)
from headrace._store.redaction import is_secret, redact_url, secrets_in
from headrace.errors import ObjectNotFoundError

Options = Mapping[str, object]

_CLIENT_OPTION = re.compile(
    r"allow_(http|invalid_certificates)|((connect|read|pool_idle)_)?timeout"
    r"|default_(content_type|headers)"
    r"|http1_only|http2_(only|keep_alive_(interval|timeout|while_idle))|pool_max_idle_per_host"
    r"|proxy_(ca_certificate|excludes|url)|randomize_addresses|root_certificate|user_agent"
)
# Options of connections, left out of the identity of a store.
_CONNECTION_OPTIONS = {
    "client_options",
    "retry_config",
    "credential_provider",
    "user-agent",
    ALLOW_REDIRECTS,
    PROFILE,
}
# Headers that the client itself never sends to another host or port.
_KEPT_TO_ORIGIN = {"authorization", "cookie"}
# Environment variables for places, after the prefix of the store's kind.
_PLACES = r".*(ENDPOINT|ACCOUNT_NAME|BASE_URL|EMULATOR|CONTAINER|BUCKET)"


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """Properties of a kind of store."""

    schemes: tuple[str, ...]  # schemes of the URLs
    backend: type[object]  # class of obstore
    remote: bool = True  # reached over HTTP, with options of an HTTP client
    # True if a URL's root is a bucket: a single store serves all keys of the bucket. False if each
    # directory is a store.
    bucket: bool = True
    quoted: bool = False  # URLs have percent-encoded keys
    # Prefix of environment variables and of long option names; empty for none.
    prefix: str = ""
    # Options for the endpoint. The first group with a value counts.
    endpoint_options: tuple[tuple[str, ...], ...] = ()
    # Options for credentials. If none is set, the client asks other hosts for credentials.
    credential_options: tuple[str, ...] = ()
    # A web server: receives all requests itself, and rarely can list.
    web_server: bool = False
    # The last bytes of an object can be requested without the size of the object.
    suffix_ranges: bool = True
    # The URL names a commit of the Hugging Face Hub, so objects never change.
    commit: bool = False
    shared: bool = True  # other processes find the same objects


TRAITS = (
    StoreTraits(
        ("s3", "s3a"),
        S3Store,
        prefix="aws_",
        endpoint_options=(("endpoint_url_s3",), ("endpoint", "endpoint_url")),
        credential_options=("access_key_id", "skip_signature", "credential_provider"),
    ),
    StoreTraits(("gs",), GCSStore, prefix="google_", endpoint_options=(("base_url",),)),
    StoreTraits(
        ("az", "adl", "azure", "abfs", "abfss"),
        AzureStore,
        prefix="azure_",
        endpoint_options=(("endpoint", "storage_endpoint"),),
        suffix_ranges=False,
    ),
    StoreTraits(("http", "https"), HTTPStore, bucket=False, quoted=True, web_server=True),
    StoreTraits(("file",), LocalStore, remote=False, bucket=False, quoted=True),
    StoreTraits(("memory",), MemoryStore, remote=False, bucket=False, shared=False),
)
_BY_SCHEME = {scheme: traits for traits in TRAITS for scheme in traits.schemes}
# Hosts of https:// URLs that obstore opens as a bucket of S3 (the first group) or as a container of
# Azure.
_CLOUD_HOST = re.compile(
    r".*(amazonaws|cloudflarestorage)\.com|.*\.(core\.windows\.net|fabric\.microsoft\.com)"
)
_COMMIT = re.compile(r"/resolve/[0-9a-f]{40}(/|$)")
_OTHER = StoreTraits((), object, bucket=False)


def traits_of(url: str, backend: ObjectStore | None = None) -> StoreTraits:
    """Return the traits of a store, by backend or by URL."""
    if backend is not None:
        return next(
            (traits for traits in TRAITS if isinstance(backend, traits.backend)), _OTHER
        )
    parts = urlsplit(url)
    if parts.scheme == "https" and (cloud := _CLOUD_HOST.fullmatch(parts.hostname or "")):
        return replace(_BY_SCHEME["s3" if cloud[1] else "az"], bucket=False, quoted=True)
    traits = _BY_SCHEME.get(parts.scheme, _OTHER)
    if traits.web_server and _COMMIT.search(parts.path):
        return replace(traits, commit=True)
    return traits


class StoreOptions:
    """The options of a store, with lower-case names without prefix.

    A prefix such as ``aws_`` is removed from the names.

    Attributes:
        traits: traits of the store.
        client: options of the HTTP client, given at the top level or in ``client_options``.
            ``allow_http`` is on by default if the URL or the endpoint is ``http://``.
        others: all other options.
    """

    def __init__(self, url: str, options: Options) -> None:
        self._url, self.traits = url, traits_of(url)
        given = {**nested_options(options, "config"), **options}
        self.others = {
            str(name).lower().removeprefix(self.traits.prefix): value
            for name, value in given.items()
        }
        for name in ("config", "client_options"):
            self.others.pop(name, None)
        self.client: dict[str, object] = {}
        if (self.endpoint or "").lower().startswith("http:"):
            self.client["allow_http"] = True
        for name in filter(_CLIENT_OPTION.fullmatch, list(self.others)):
            self.client[name] = self.others.pop(name)
        nested = nested_options(options, "client_options")
        self.client |= {str(name).lower(): value for name, value in nested.items()}

    def get(self, *names: str) -> object:
        """Return the first set option among `names`, or None.

        The options come first, then the environment.
        """
        found = [self.others.get(name) for name in names]
        if prefix := self.traits.prefix:
            found += [os.environ.get((prefix + name).upper()) or None for name in names]
        return next((value for value in found if value is not None), None)

    @property
    def endpoint(self) -> str | None:
        """URL that receives requests; None if obstore determines the URL."""
        if self.traits.web_server:
            return self._url
        found = (self.get(*names) for names in self.traits.endpoint_options)
        return next((str(value) for value in found if value is not None), None)

    @property
    def settle_credentials(self) -> bool:
        """True if options or environment say everything about credentials."""
        values = map(self.get, self.traits.credential_options)
        return any(
            value is not None
            and str(value).lower() not in ("", "0", "false", "no", "off")
            for value in values
        )

    @property
    def use_proxy(self) -> bool:
        """True if options or environment set a proxy for requests."""
        if self.client.get("proxy_url"):
            return True
        endpoint = urlsplit(self.endpoint or "https:")
        if endpoint.hostname and urllib.request.proxy_bypass(endpoint.hostname):
            return False
        proxies = urllib.request.getproxies()
        return bool(proxies.get(endpoint.scheme) or proxies.get("all"))

    def kept_to_one_host(self) -> dict[str, object]:
        """Return client options that refuse redirects to other hosts.

        The client follows redirects to any host and sends default headers there, such as an
        ``x-api-key``. No option of the client forbids redirects. But a proxy can be set for all
        other hosts. Nothing can listen at the proxy's port 0: a redirect fails before a byte is
        sent.

        Returns no options, so redirects are followed, if `allow_redirects` is set, the endpoint is
        unknown, the client also asks other hosts for credentials, or a proxy is in use.
        """
        host = urlsplit(self.endpoint or "").hostname
        single = self.traits.web_server or self.get(PROFILE) or self.settle_credentials
        if (
            host is None
            or not single
            or self.others.get(ALLOW_REDIRECTS)
            or self.use_proxy
        ):
            return {}
        return {"proxy_url": f"http://{BLACKHOLE_PROXY}", "proxy_excludes": host}


def nested_options(options: Options, name: str) -> Options:
    """Return an option that is a mapping, such as ``client_options``.

    Returns an empty mapping if the option is not set. Raises `TypeError` for another type.
    """
    given = options.get(name) or {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name} of a store must be a mapping, but got a {type(given).__name__}"
        )
    return given


def check_shared(url: str) -> None:
    """Raise `ValueError` for a URL that would open a new, empty store."""
    if not traits_of(url).shared:
        raise ValueError(
            "a memory:// URL names no store: give the MemoryStore itself, Store(url, backend=...)"
        )


def open_store(url: str, options: Options, *, timeout: float) -> ObjectStore:
    """Open a store with headrace's time-outs, without the client's retries.

    `Store` retries instead: the client's retries ignore other fetchers, and ignore a body that is
    cut short if there is no entity tag. An explicit ``retry_config`` in `options` is kept. For the
    arguments see `Store`.
    """
    settings = StoreOptions(url, options)
    traits = settings.traits
    # Obstore appends another slash.
    place = url if traits.bucket else url.rstrip("/") or url
    own = (ALLOW_REDIRECTS, PROFILE) if traits.prefix == "aws_" else (ALLOW_REDIRECTS,)
    given = settings.others if traits.remote else options
    chosen = {name: value for name, value in given.items() if name not in own}
    if traits.remote:
        if (endpoint := settings.endpoint) is not None and not re.match(
            "https?://", endpoint, re.IGNORECASE
        ):
            raise ValueError(
                f"cannot open {redact_url(url)}: its endpoint must begin with http:// or https://"
            )
        seconds = timedelta(seconds=timeout)
        chosen["client_options"] = {
            # The default of 30 s covers the whole body, and progress does not extend the time-out.
            # No option turns the time-out off.
            "timeout": timedelta(days=1),
            "read_timeout": seconds,
            "connect_timeout": min(seconds / 3, timedelta(seconds=5)),
            **settings.client,
            **settings.kept_to_one_host(),
        }
        headers = nested_options(settings.client, "default_headers")
        others = {str(name).lower() for name in headers} - _KEPT_TO_ORIGIN
        if traits.web_server and others and not settings.others.get(ALLOW_REDIRECTS):
            # The client has no option against redirects. But the client follows no redirect from a
            # URL with a query that RFC 3986 forbids. Servers ignore the query (docs/design/0010).
            place = f"{place}{'&' if '?' in place else '?'}["
        chosen["retry_config"] = {
            "max_retries": 0,
            **nested_options(chosen, "retry_config"),
        }
        profile = settings.get(PROFILE)  # or AWS_PROFILE
        if (
            traits.prefix == "aws_"
            and profile
            and (PROFILE in settings.others or not settings.settle_credentials)
        ):
            chosen["credential_provider"] = _profile_provider(str(profile))
    try:
        return obstore.store.from_url(place, **chosen)  # type: ignore[call-overload, no-any-return]
    except (BaseError, ValueError, TypeError) as error:
        cause, safe = describe_error(error, secrets_in(options)), redact_url(url)
        if "Unable to canonicalize filesystem root" in cause:
            failure: Exception = ObjectNotFoundError(
                "there is no such directory", url=safe
            )
        else:
            if url.startswith("hf://"):
                cause = (
                    "files of the Hugging Face Hub are listed by "
                    "hr.hub('datasets/owner/name', '*.parquet')"
                )
            elif "recognise URL" in cause:
                cause += f". It must begin with {', '.join(_BY_SCHEME)}://"
            failure = ValueError(f"cannot open a store for {safe}: {cause}")
    # Outside of `except`: obstore's error may have secrets and is no context.
    raise failure


def _profile_provider(profile: str) -> object:
    """Return obstore's credential provider for an AWS profile.

    boto3 reads the profile (``~/.aws``, SSO, roles).
    """
    what = f"reading the AWS profile {profile!r} (AWS_PROFILE, or the option profile=)"
    boto3 = require("boto3.session", what, "boto3", "aws")
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(boto3.Session(profile_name=profile))


def store_id(url: str, options: Options, store: ObjectStore | None) -> str | None:
    """Return the identity of a store, equal in every process.

    The identity is a text of the URL, without secrets, and a hash. The hash covers options, default
    headers, and environment variables that name a place: a bucket at two endpoints is two stores.
    Secrets and options of connections are left out.

    Args:
        url: URL of the store.
        options: options of the store.
        store: a ready store, in place of `options`; or None.

    Returns:
        The identity, or None for a store in the memory of this process.
    """
    traits = traits_of(url, store)
    if not traits.shared:
        return None
    where = redact_url(url)
    settings = StoreOptions(url, options)
    given: Options = settings.others
    client: Options = settings.client
    if store is not None:
        names = {
            name: redact_url(str(getattr(store, name, ""))) for name in ("url", "prefix")
        }
        given = {**(getattr(store, "config", None) or {}), **names}
        client = getattr(store, "client_options", None) or {}
        where += f" {type(store).__name__}"
    headers = {
        name.lower(): value
        for name, value in nested_options(client, "default_headers").items()
    }
    said = [
        (name, value.decode("latin-1") if isinstance(value, bytes) else str(value))
        for name, value in (*given.items(), *headers.items())
        if name not in _CONNECTION_OPTIONS and not is_secret(name)
    ]
    if traits.prefix:
        place = re.compile(traits.prefix + _PLACES, re.IGNORECASE)
        said.extend(
            (name, value) for name, value in os.environ.items() if place.fullmatch(name)
        )
    digest = hashlib.sha256(ascii(sorted(said)).encode()).hexdigest()
    return f"{where} {digest[:32]}" if said else where
