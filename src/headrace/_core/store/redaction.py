"""URLs: made from paths, and redacted, in texts of other libraries too, before they are shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

# scheme://authority, path, and from the first ? or # on; all up to white space or what quotes a URL within a text.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)([^\s/?#\"'<>`]*)([^\s?#\"'<>`]*)([?#][^\s\"'<>`]*)?")
_SECRET_NAME = re.compile(
    r"key|token|secret|passw|credential|sas|\bsig\b|signature|auth|cookie|header|client_id|service_account",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(?<=[^\s\"'<>`?])\?[^\s\"'<>`?]*(?:=|%3D)[^\s\"'<>`]*", re.IGNORECASE)
_USER = re.compile(r"(?<![^\s/@:\"'<>`])[^\s/@:\"'<>`]+:[^\s/\"'<>`]+@(?=[\w\[])")
_NAME = r"(?:[\w-]*(?:signature|credential|token|secret|passw|authorization|cookie|api[-_]?key|access[-_]?key)[\w-]*|sig)"
# A credential after its name: in a header, in JSON, and elsewhere.
_CREDENTIALS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"((?<![\w-])(?:[\w-]*(?:authorization|cookie)|x-[\w-]*(?:key|token|secret|signature)[\w-]*)\s*:\s*)[^\r\n\"'<>]+",
        rf"([\"']{_NAME}[\"']\s*:\s*[\"'])[^\"']+",
        rf"((?<![\w-]){_NAME}\s*(?:=|%3D)\s*[\"']?)[^\s&\"'<>,;]+",
        r"(\bbearer\s+)\S{16,}",
    )
]
_LONGEST = 4096  # characters; a server may answer with any number
_TOO_COMMON = frozenset({"true", "false", "none", "null"})


def url_of(place: str | os.PathLike[str]) -> str:
    """A URL unchanged; a local path as an absolute ``file://`` URL."""
    named = os.fspath(place)
    if "://" in named:
        return named
    check_path(named)
    return Path(named).absolute().as_uri()


def check_path(path: str) -> None:
    """Raise `ValueError` for an empty path, which would be the current directory, and a URL with one slash."""
    if not path:
        raise ValueError("the URL, or path, is empty")
    if short := re.match(r"(?i)(s3a?|gs|gcs|az|abfss?|https?):/*", path):
        raise ValueError(f"{path!r} is no path. Did you mean {short[1].lower()}://{path[short.end() :]}?")


def redact_url(url: str) -> str:
    """A URL without user name, password, query string and fragment."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return re.split(r"[?#]", url, maxsplit=1)[0]
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{_place(scheme, authority)}{slash}{path}"


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Redact URLs, queries and named credentials in a text, and mask `secrets`; the text is cut at 4,096 characters."""
    # The longest first, since one secret may begin with another.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    text = _URL.sub(lambda match: match[1] + _place(match[1], match[2]) + match[3], text[:_LONGEST])
    text = _USER.sub("", _QUERY.sub("", text))
    for pattern in _CREDENTIALS:
        text = pattern.sub(r"\1***", text)
    return text


def _place(scheme: str, authority: str) -> str:
    """The authority of a URL without user name and password; Azure's have the container before the ``@``."""
    is_azure = scheme.lower().startswith(("abfs", "adl", "az")) and ":" not in authority
    return authority if is_azure else authority.rpartition("@")[2]


def is_secret(name: str) -> bool:
    """Whether the name of an option or a header says that its value is a credential."""
    return _SECRET_NAME.search(name) is not None


def secrets_in(options: Mapping[str, object]) -> tuple[str, ...]:
    """The values in a store's options, at any depth, whose names say that they are credentials.

    The parts of such a value are secrets too, as is its percent-encoded form. Values of one or two characters are left
    out: masking them would only garble the text around them.
    """
    values = {*_secrets(options, named=False)}
    parts = {part for value in values for part in re.split(r"[\s;=&]+", value) if len(part) > 6}
    return tuple(values | parts | {quote(value, safe="") for value in values})


def _secrets(value: object, *, named: bool) -> Iterable[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets(inner, named=named or is_secret(str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, named=named)
    elif isinstance(value, bytes):
        yield from _secrets(value.decode("latin-1"), named=named)
    elif named and isinstance(value, str) and len(value) > 2 and value.lower() not in _TOO_COMMON:
        yield value
