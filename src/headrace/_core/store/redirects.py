"""Keeping requests to the host that the user named.

obstore's client follows redirects wherever they lead, and sends its default headers along: an ``x-api-key`` that was
meant for one server reaches another. It has no option against that. It has one for proxies, though: everything that is
not meant for the store's own host goes by way of a proxy at port 0, where nothing can listen. A redirect elsewhere so
fails before a byte is sent, for every object, and without one request more. `docs/design/0010-stores.md` weighs it.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from headrace._core.store.schemes import traits_of
from headrace._core.store.store_options import endpoint_of, is_on, nested_options, option

ALLOW = "allow_redirects"
"""The name of headrace's own option among those of a store."""

BLACKHOLE_PROXY = "127.0.0.1:0"
"""Where no process can listen: port 0 stands for "any" when a socket is bound, and is no port itself."""

# Of these, the client itself drops what would go to another host.
_DROPPED = frozenset({"authorization", "cookie", "cookie2", "proxy-authorization", "www-authenticate"})
# Headers that say something of the request, and nothing of who sends it.
_HARMLESS = frozenset({"accept", "accept-encoding", "accept-language", "cache-control", "range", "user-agent"})


def fenced_host(url: str, options: Mapping[str, object]) -> str | None:
    """The one host that a store's requests may go to; None where there are others, or more are allowed.

    That is the host of an ``http(s)://`` URL. S3 has one where `options`, or the environment, name the endpoint and say
    all about credentials; elsewhere the client also asks services that give credentials, at addresses that are not
    known here.

    Example:
        >>> fenced_host("https://me:hush@Example.org:8080/train", {})
        'example.org'
        >>> fenced_host("s3://bucket", {"endpoint": "http://10.0.0.7:9000", "skip_signature": True})
        '10.0.0.7'
        >>> fenced_host("s3://bucket", {}) is None
        True
    """
    if options.get(ALLOW, False):
        return None
    traits = traits_of(url)
    if traits.single_host == "never":
        return None
    if traits.single_host == "with endpoint" and not any(
        is_on(option(url, options, name)) for name in (*traits.credential_options, "profile")
    ):
        return None
    return urlsplit(endpoint_of(url, options) or "").hostname


def restrict_redirects(url: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options of a store's client that keep its requests to the store's host; none where they cannot, or may not.

    Raises:
        ValueError: requests go by way of a proxy, so that nothing can be restricted, and have a header that a redirect
            would take to another host.

    Example:
        >>> restrict_redirects("https://example.org/train", {})
        {'proxy_url': 'http://127.0.0.1:0', 'proxy_excludes': 'example.org'}
        >>> restrict_redirects("https://example.org/train", {"allow_redirects": True})
        {}
    """
    host = fenced_host(url, options)
    if host is None:
        return {}
    client = nested_options(options, "client_options")
    if proxy_for(url, options) is None:
        return {"proxy_url": f"http://{BLACKHOLE_PROXY}", "proxy_excludes": host}
    headers = client.get("default_headers")
    names = list(map(str, headers)) if isinstance(headers, Mapping) else []
    exposed = [name for name in names if name.lower() not in _DROPPED | _HARMLESS]
    if exposed:
        raise ValueError(
            f"the header {exposed[0]!r} of client_options['default_headers'] would go along with a redirect to another "
            f"host, and through a proxy redirects cannot be kept to {host}. If it holds no secret, or every host that "
            f"{host} may name can be trusted, say options={{{ALLOW!r}: True, ...}}"
        )
    return {}


def proxy_for(url: str, options: Mapping[str, object]) -> str | None:
    """The URL of the proxy for a store's requests, from its options or the environment; None if there is none."""
    proxy = nested_options(options, "client_options").get("proxy_url")
    if not proxy:
        endpoint = urlsplit(endpoint_of(url, options) or "https:")
        if endpoint.hostname and urllib.request.proxy_bypass(endpoint.hostname):
            return None
        proxies = urllib.request.getproxies()
        proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if not proxy:
        return None
    return str(proxy) if "://" in str(proxy) else f"http://{proxy}"
