"""An identifier of a store, for names of cached data: its place, without secrets."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from headrace._core.store.redaction import redact_url, secrets_in
from headrace._core.store.schemes import traits_of
from headrace._core.store.store_options import is_client_option, merged_options, nested_options

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Options of connections, which do not identify the store.
_CONNECTION_OPTIONS = frozenset({"client_options", "retry_config", "credential_provider", "allow_redirects", "profile"})
# Headers that do not identify the bytes, or may differ from one run to the next.
_CREDENTIAL_HEADERS = re.compile(
    r"authorization|authentication|cookie|token|signature|secret|passw|credential|user-agent", re.IGNORECASE
)
# Environment variables that name a place, after the prefix of the kind of store.
_PLACES = r".*(ENDPOINT|ACCOUNT_NAME|BASE_URL|EMULATOR|CONTAINER|BUCKET)"


def store_id(url: str, options: Mapping[str, object], store: ObjectStore | None) -> str | None:
    """A text that is equal for the same store in every process; None for a store in the memory of this process.

    Args:
        url: of the store; part of the text, without user name, password and query string.
        options: of the store. All that are neither secrets nor about connections are part of the text, as are
            environment variables that name a place: a bucket at two endpoints is two stores. Of default headers, except
            for credentials, a hash is.
        store: a ready store, in place of `options`.

    Example:
        >>> store_id("s3://bucket/a", {"endpoint": "http://10.0.0.1", "secret_access_key": "hush"}, None)
        "s3://bucket/a [('endpoint', 'http://10.0.0.1')]"
    """
    traits = traits_of(url, store)
    if not traits.shared:
        return None
    given: Mapping[str, object] = options
    client = nested_options(merged_options(url, options), "client_options")
    where = [redact_url(url)]
    if store is not None:
        given = getattr(store, "config", None) or {}
        client = getattr(store, "client_options", None) or {}
        where = [
            redact_url(url),
            type(store).__name__,
            *(redact_url(str(getattr(store, name, ""))) for name in ("url", "prefix")),
        ]
    config = given.get("config")
    if isinstance(config, Mapping) and secrets_in(config):  # all but the secrets are part of the text
        given = {**config, **{name: value for name, value in given.items() if name != "config"}}
    secrets = set(secrets_in(given))
    settings = [
        (name, str(value))
        for name, value in given.items()
        if name not in _CONNECTION_OPTIONS and not is_client_option(url, name) and not _hides(value, name, secrets)
    ]
    headers = client.get("default_headers")
    if isinstance(headers, Mapping) and (digest := _headers_digest(headers)) is not None:
        settings.append(("default_headers", digest))
    if traits.prefix:
        place = re.compile(traits.prefix + _PLACES, re.IGNORECASE)
        settings.extend((name, value) for name, value in os.environ.items() if place.fullmatch(name))
    return " ".join((*where, ascii(sorted(settings))))


def _headers_digest(headers: Mapping[str, object]) -> str | None:
    """A hash of the headers, which may be secrets; None if all of them are left out."""
    kept = sorted(
        (str(name).lower(), value.decode("latin-1") if isinstance(value, bytes) else str(value))
        for name, value in headers.items()
        if not _CREDENTIAL_HEADERS.search(str(name))
    )
    return hashlib.sha256(ascii(kept).encode()).hexdigest() if kept else None


def _hides(value: object, name: str, secrets: Iterable[str]) -> bool:
    return bool(secrets_in({name: value})) or str(value) in secrets
