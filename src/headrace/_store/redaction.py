"""URLs: made from paths, and redacted in messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

# A URL in a text ends before white space or a quote.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^\s\"'<>`]*")
_SECRET_NAME = re.compile(
    r"key|token|secret|passw|credential|sas|\bsig\b|signature|auth|cookie|header"
    r"|client_id|service_account",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(?i)(?<=[^\s\"'<>`?])\?[^\s\"'<>`?]*(?:=|%3D)[^\s\"'<>`]*")
_USER = re.compile(r"(?<![^\s/@:\"'<>`])[^\s/@:\"'<>`]+:[^\s/\"'<>`]+@(?=[\w\[])")
_NAME = (
    r"(?:[\w-]*(?:signature|credential|token|secret|passw|authorization|cookie"
    r"|(?:api|access)[-_]?key)[\w-]*|sig)"
)
# A credential follows a name: in a header, in JSON, and elsewhere.
_CREDENTIALS = (
    r"(?i)((?<![\w-])(?:[\w-]*(?:authorization|cookie)|x-[\w-]*(?:key|token|secret|signature)"
    r"[\w-]*)\s*:\s*)[^\r\n\"'<>]+",
    rf"(?i)([\"']{_NAME}[\"']\s*:\s*[\"'])[^\"']+",
    rf"(?i)((?<![\w-]){_NAME}\s*(?:=|%3D)\s*[\"']?)[^\s&\"'<>,;]+",
    r"(?i)(\bbearer\s+)\S{16,}",
)
_TOO_COMMON = frozenset({"true", "false", "none", "null"})


def url_of(place: str | os.PathLike[str]) -> str:
    """Return the URL of a place.

    A URL is returned unchanged, and a local path as an absolute ``file://`` URL.
    """
    named = os.fspath(place)
    if "://" in named:
        return named
    check_path(named)
    return Path(named).absolute().as_uri()


def check_path(path: str) -> None:
    """Raise `ValueError` for an empty path or a malformed URL.

    An empty path would be the current directory. A URL with a single slash would be a path.
    """
    if not path:
        raise ValueError("the URL, or path, is empty")
    if short := re.match(r"(?i)(s3a?|gs|gcs|az|abfss?|https?):/*", path):
        meant = redact_url(f"{short[1].lower()}://{path[short.end() :]}")
        raise ValueError(f"this is neither a URL nor a path. Did you mean {meant}?")


def redact_url(url: str) -> str:
    """Remove user name, password, query string and fragment from a URL."""
    scheme, separator, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    authority, slash, path = rest.partition("/")
    if ":" in authority or not scheme.lower().startswith(("abfs", "adl", "az")):
        # In Azure's URLs the container stands before the "@".
        authority = authority.rpartition("@")[2]
    return f"{scheme}{separator}{authority}{slash}{path}"


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Redact URLs and credentials in a text, and mask `secrets`.

    Credentials are recognised by names. The text is cut at 4,096 characters.
    """
    # The longest first, since a secret may begin with another secret.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    text = text[:4096]  # a server may answer with any number of characters
    text = _URL.sub(lambda match: redact_url(match[0]), text)
    text = _USER.sub("", _QUERY.sub("", text))
    for pattern in _CREDENTIALS:
        text = re.sub(pattern, r"\1***", text)
    return text


def is_secret(name: str) -> bool:
    """Return whether an option's or header's name means a credential."""
    return _SECRET_NAME.search(name) is not None


def secrets_in(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return all credentials in a store's options, at any depth.

    Credentials are recognised by names. The parts of a credential are secrets too. Values of one or
    two characters are left out: masking so short values would only garble the surrounding text.
    """
    values = {*_secrets(options, named=False)}
    parts = {
        part for value in values for part in re.split(r"[\s;=&]+", value) if len(part) > 6
    }
    return tuple(values | parts)


def _secrets(value: object, *, named: bool) -> Iterable[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets(inner, named=named or is_secret(str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, named=named)
    elif isinstance(value, bytes):
        yield from _secrets(value.decode("latin-1"), named=named)
    elif (
        named
        and isinstance(value, str)
        and len(value) > 2
        and value.lower() not in _TOO_COMMON
    ):
        yield value
