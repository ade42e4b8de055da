"""An identifier of a store, for names of cached data: its place, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from headrace._core.store.redaction import redact_url, secrets_in
from headrace._core.store.schemes import traits_of
from headrace._core.store.store_options import is_client_option

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Options of connections, which do not identify the store.
_CONNECTION_OPTIONS = frozenset({"client_options", "retry_config", "credential_provider", "allow_redirects", "profile"})
# Environment variables that name a place, after the prefix of the kind of store.
_PLACES = r".*(ENDPOINT|ACCOUNT_NAME|BASE_URL|EMULATOR|CONTAINER|BUCKET)"


def store_id(url: str, options: Mapping[str, object], store: ObjectStore | None) -> str | None:
    """A text that is equal for the same store in every process; None for a store in the memory of this process.

    Args:
        url: of the store; part of the text, without user name, password and query string.
        options: of the store. All that are neither secrets nor about connections are part of the text, as are
            environment variables that name a place: a bucket at two endpoints is two stores.
        store: a ready store, in place of `options`.

    Example:
        >>> store_id("s3://bucket/a", {"endpoint": "http://10.0.0.1", "secret_access_key": "hush"}, None)
        "s3://bucket/a [('endpoint', 'http://10.0.0.1')]"
    """
    traits = traits_of(url, store)
    if not traits.shared:
        return None
    given: Mapping[str, object] = options
    where = [redact_url(url)]
    if store is not None:
        given = getattr(store, "config", None) or {}
        where = [
            redact_url(url),
            type(store).__name__,
            *(redact_url(str(getattr(store, name, ""))) for name in ("url", "prefix")),
        ]
    secrets = set(secrets_in(given))
    settings = [
        (name, str(value))
        for name, value in given.items()
        if name not in _CONNECTION_OPTIONS and not is_client_option(url, name) and not _hides(value, name, secrets)
    ]
    if traits.prefix:
        place = re.compile(traits.prefix + _PLACES, re.IGNORECASE)
        settings.extend((name, value) for name, value in os.environ.items() if place.fullmatch(name))
    return " ".join((*where, ascii(sorted(settings))))


def _hides(value: object, name: str, secrets: Iterable[str]) -> bool:
    return bool(secrets_in({name: value})) or str(value) in secrets
