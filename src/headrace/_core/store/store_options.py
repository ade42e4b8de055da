"""Options of a store, merged from the endpoint, the environment and the user; the later takes precedence.

obstore reads client options from the environment (``AWS_ALLOW_HTTP``, ``GOOGLE_PROXY_URL``, …) only if it is given none
at all, and headrace always gives some. It also takes options of the HTTP client in one place only, under
``client_options``. Here they may stand beside the store's own, as users of other libraries write them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from headrace._core.store.schemes import traits_of

_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
_VARIABLES = _CLIENT_OPTIONS - {"default_headers", "root_certificate"}  # which obstore does not read


def merged_options(url: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options with all of the HTTP client's under ``client_options``, those of the environment among them.

    ``allow_http`` is true by default where the URL or the endpoint begins with ``http://``: it says so itself.

    Example:
        >>> merged_options("s3://bucket", {"endpoint": "http://10.0.0.7:9000", "timeout": "5s"})
        {'endpoint': 'http://10.0.0.7:9000', 'client_options': {'allow_http': True, 'timeout': '5s'}}
    """
    prefix = traits_of(url).prefix
    client: dict[str, object] = {}
    if (endpoint_of(url, options) or "").lower().startswith("http:"):
        client["allow_http"] = True
    if prefix:
        client |= {name: found for name in sorted(_VARIABLES) if (found := _variable(prefix, name))}
    own: dict[str, object] = {}
    for name, value in options.items():
        if name == "client_options":
            continue
        if name == "config" and isinstance(value, Mapping):
            client |= {_short(key, prefix): inner for key, inner in value.items() if is_client_option(url, key)}
            own[name] = {key: inner for key, inner in value.items() if not is_client_option(url, key)}
        elif is_client_option(url, name):
            client[_short(name, prefix)] = value
        else:
            own[name] = value
    client |= {str(name).lower(): value for name, value in nested_options(options, "client_options").items()}
    return {**own, "client_options": client}


def nested_options(options: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The value of an option that is a mapping, such as ``client_options``; empty if it is not set."""
    given = options.get(name) or {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} of a store must be a mapping, but got a {type(given).__name__}")
    return given


def endpoint_of(url: str, options: Mapping[str, object]) -> str | None:
    """The URL that requests of a store go to; None if the store's client determines it.

    Example:
        >>> endpoint_of("gs://bucket", {"base_url": "http://10.0.0.7:4443"})
        'http://10.0.0.7:4443'
    """
    traits = traits_of(url)
    if traits.single_host == "always":
        return url
    found = (option(url, options, *names) for names in traits.endpoint_options)
    return next((str(value) for value in found if value), None)


def option(url: str, options: Mapping[str, object], *names: str) -> object:
    """The value of the first of `names` that is set, in `options` or else in the environment; None if none is.

    Names are without prefixes such as ``aws_``.
    """
    prefix = traits_of(url).prefix
    inner = options.get("config")
    given = {**(inner if isinstance(inner, Mapping) else {}), **options}
    named = {_short(name, prefix): value for name, value in given.items()}
    found = [named.get(name) for name in names]
    if prefix:
        found += [_variable(prefix, name) for name in names]
    return next((value for value in found if value is not None), None)


def is_on(value: object) -> bool:
    """Whether an option is set, and not to false.

    Example:
        >>> is_on("true"), is_on("False"), is_on(None), is_on("AKIA")
        (True, False, False, True)
    """
    return value is not None and str(value).lower() not in ("", "0", "false", "no", "off")


def is_client_option(url: str, name: str) -> bool:
    """Whether an option of a store belongs to its HTTP client.

    Example:
        >>> is_client_option("s3://bucket", "aws_allow_http"), is_client_option("s3://bucket", "region")
        (True, False)
    """
    return _short(name, traits_of(url).prefix) in _CLIENT_OPTIONS


def _variable(prefix: str, name: str) -> str | None:
    return os.environ.get((prefix + name).upper()) or None


def _short(name: str, prefix: str) -> str:
    return str(name).lower().removeprefix(prefix)
