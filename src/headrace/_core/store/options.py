"""What differs between kinds of stores, in one table where a new scheme is one entry, and the options of a store."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, ObjectStore, S3Store

ALLOW_REDIRECTS = "allow_redirects"
PROFILE = "profile"
"""The names of headrace's own options among those of a store."""

BLACKHOLE_PROXY = "127.0.0.1:0"
"""Where no process can listen: port 0 stands for "any" when a socket is bound, and is no port itself."""

_CLIENT_OPTION = re.compile(
    r"allow_(http|invalid_certificates)|((connect|read|pool_idle)_)?timeout|default_(content_type|headers)"
    r"|http1_only|http2_(only|keep_alive_(interval|timeout|while_idle))|pool_max_idle_per_host"
    r"|proxy_(ca_certificate|excludes|url)|randomize_addresses|root_certificate|user_agent"
)
_NO_VARIABLES = ("default_headers", "root_certificate")  # which obstore does not read


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """What differs between kinds of stores."""

    schemes: tuple[str, ...]  # the schemes of their URLs
    backend: type[object]  # obstore's class for them, by which a ready store is recognised
    remote: bool = True  # whether they are reached over HTTP, with options of an HTTP client
    bucket: bool = True  # whether the root is a bucket, whose keys one store serves; else each directory is a store
    quoted: bool = False  # whether URLs have their keys percent-encoded
    prefix: str = ""  # what environment variables, and long names of options, begin with; empty for none
    endpoint_options: tuple[tuple[str, ...], ...] = ()  # options that give the endpoint: the first group with a value
    credential_options: tuple[str, ...] = ()  # any of which settles them; else the client asks other hosts
    web_server: bool = False  # whether it is one, which gets all requests itself, and rarely can list
    suffix_ranges: bool = True  # whether the last bytes of an object can be requested without knowing its size
    list_in_order: bool = False  # whether keys come sorted, and a listing may begin after any
    shared: bool = True  # whether other processes find the same objects


TRAITS = (
    StoreTraits(
        schemes=("s3", "s3a"),
        backend=S3Store,
        prefix="aws_",
        endpoint_options=(("endpoint_url_s3",), ("endpoint", "endpoint_url")),
        credential_options=("access_key_id", "skip_signature", "credential_provider"),
        list_in_order=True,
    ),
    StoreTraits(
        schemes=("gs",),
        backend=GCSStore,
        prefix="google_",
        endpoint_options=(("base_url",),),
        list_in_order=True,
    ),
    StoreTraits(
        schemes=("az", "adl", "azure", "abfs", "abfss"),
        backend=AzureStore,
        prefix="azure_",
        endpoint_options=(("endpoint", "storage_endpoint"),),
        suffix_ranges=False,
    ),
    StoreTraits(schemes=("http", "https"), backend=HTTPStore, bucket=False, quoted=True, web_server=True),
    StoreTraits(schemes=("file",), backend=LocalStore, remote=False, bucket=False, quoted=True),
    StoreTraits(schemes=("memory",), backend=MemoryStore, remote=False, bucket=False, shared=False),
)
_BY_SCHEME = {scheme: traits for traits in TRAITS for scheme in traits.schemes}
_OTHER = StoreTraits(schemes=(), backend=object, bucket=False)


def traits_of(url: str, backend: ObjectStore | None = None) -> StoreTraits:
    """The traits of a store, by its backend if it is open, else by its URL.

    Example:
        >>> traits_of("s3://bucket/train").list_in_order, traits_of("https://host").bucket
        (True, False)
    """
    if backend is not None:
        return next((traits for traits in TRAITS if isinstance(backend, traits.backend)), _OTHER)
    return _BY_SCHEME.get(urlsplit(url).scheme, _OTHER)


def merged_options(url: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options with all of the HTTP client's under ``client_options``, those of the environment among them.

    obstore reads them from the environment (``AWS_ALLOW_HTTP``, ``GOOGLE_PROXY_URL``, …) only if it is given none at
    all, and headrace always gives some. ``allow_http`` is on by default where the URL or the endpoint is ``http://``.

    Example:
        >>> merged_options("s3://bucket", {"endpoint": "http://10.0.0.7:9000", "timeout": "5s"})
        {'endpoint': 'http://10.0.0.7:9000', 'client_options': {'allow_http': True, 'timeout': '5s'}}
    """
    prefix = traits_of(url).prefix
    client: dict[str, object] = {}
    if (endpoint_of(url, options) or "").lower().startswith("http:"):
        client["allow_http"] = True
    if prefix:
        found = {_short(name, prefix): value for name, value in os.environ.items() if name.startswith(prefix.upper())}
        client |= {name: found[name] for name in sorted(found) if found[name] and _CLIENT_OPTION.fullmatch(name)}
        for name in _NO_VARIABLES:
            client.pop(name, None)
    own = {**nested_options(options, "config"), **options}
    own.pop("config", None)
    own.pop("client_options", None)
    for name in list(own):
        if _CLIENT_OPTION.fullmatch(_short(name, prefix)):
            client[_short(name, prefix)] = own.pop(name)
    client |= {str(name).lower(): value for name, value in nested_options(options, "client_options").items()}
    return {**own, "client_options": client}


def nested_options(options: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The value of an option that is a mapping, such as ``client_options``; empty if it is not set."""
    given = options.get(name) or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} of a store must be a mapping, but got a {type(given).__name__}")
    return given


def option(url: str, options: Mapping[str, object], *names: str) -> object:
    """The value of the first of `names` that is set, in `options` or else in the environment; None if none is.

    Names are without prefixes such as ``aws_``.
    """
    prefix = traits_of(url).prefix
    given = {**nested_options(options, "config"), **options}
    named = {_short(name, prefix): value for name, value in given.items()}
    found = [named.get(name) for name in names]
    if prefix:
        found += [_variable(prefix, name) for name in names]
    return next((value for value in found if value is not None), None)


def settles_credentials(url: str, options: Mapping[str, object]) -> bool:
    """Whether the options, or the environment, say all about credentials."""
    values = (option(url, options, name) for name in traits_of(url).credential_options)
    return any(value is not None and str(value).lower() not in ("", "0", "false", "no", "off") for value in values)


def endpoint_of(url: str, options: Mapping[str, object]) -> str | None:
    """The URL that requests of a store go to; None if the store's client determines it.

    Example:
        >>> endpoint_of("gs://bucket", {"base_url": "http://10.0.0.7:4443"})
        'http://10.0.0.7:4443'
    """
    traits = traits_of(url)
    if traits.web_server:
        return url
    found = (option(url, options, *names) for names in traits.endpoint_options)
    return next((str(value) for value in found if value), None)


def uses_proxy(url: str, options: Mapping[str, object]) -> bool:
    """Whether a store's requests go through a proxy, by merged options or the environment."""
    if nested_options(options, "client_options").get("proxy_url"):
        return True
    endpoint = urlsplit(endpoint_of(url, options) or "https:")
    if endpoint.hostname and urllib.request.proxy_bypass(endpoint.hostname):
        return False
    proxies = urllib.request.getproxies()
    return bool(proxies.get(endpoint.scheme) or proxies.get("all"))


def _variable(prefix: str, name: str) -> str | None:
    return os.environ.get((prefix + name).upper()) or None


def _short(name: str, prefix: str) -> str:
    return str(name).lower().removeprefix(prefix)
