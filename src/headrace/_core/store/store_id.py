"""What tells one store from another, for names of what was read from them: where it is, and no secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headrace._core.store.redaction import redact_url, secrets_in
from headrace._core.store.schemes import traits_of
from headrace._core.store.store_options import is_client_option

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Options that say how a store is talked to, and not which one it is.
_MANNERS = frozenset({"client_options", "retry_config", "credential_provider", "allow_redirects", "profile"})
# Environment variables that name a place, after the prefix of the kind of store.
_PLACES = r".*(ENDPOINT|ACCOUNT_NAME|BASE_URL|EMULATOR|CONTAINER|BUCKET)"


def store_id(url: str, options: Mapping[str, Any], store: ObjectStore | None) -> str | None:
    """A text that is the same for the same store, in every process; None for one that lives in this process's memory.

    Args:
        url: the store's; without user name, password and query string, it is part of the text.
        options: it is opened with. Of these the text has all that are neither secrets nor about connections, and of the
            environment what names a place, so that one bucket's name at two endpoints is two stores.
        store: a ready one, in place of `options`.

    Example:
        >>> store_id("s3://bucket/a", {"endpoint": "http://10.0.0.1", "secret_access_key": "hush"}, None)
        "s3://bucket/a [('endpoint', 'http://10.0.0.1')]"
    """
    traits = traits_of(url, store)
    if not traits.shared:
        return None
    told: Mapping[str, Any] = options
    where = [redact_url(url)]
    if store is not None:
        told = getattr(store, "config", None) or {}
        where = [
            redact_url(url),
            type(store).__name__,
            *(redact_url(str(getattr(store, name, ""))) for name in ("url", "prefix")),
        ]
    secrets = set(secrets_in(told))
    said = [
        (name, str(value))
        for name, value in told.items()
        if name not in _MANNERS and not is_client_option(url, name) and not _hides(value, name, secrets)
    ]
    if traits.prefix:
        place = re.compile(traits.prefix + _PLACES, re.IGNORECASE)
        said.extend((name, value) for name, value in os.environ.items() if place.fullmatch(name))
    return " ".join((*where, ascii(sorted(said))))


def _hides(value: Any, name: str, secrets: Iterable[str]) -> bool:
    return bool(secrets_in({name: value})) or str(value) in secrets
