"""`Retry-After` of a store that throttles.

obstore gives the status and the body of a refusal, but no headers. So the first fetcher that is refused sends one HEAD
of the same URL, without credentials and without following redirects, and reads `Retry-After` (RFC 9110, section
10.2.3) of its answer. `docs/design/0010-stores.md` has the measurement.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
import ssl
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

HEAD_TIMEOUT = 2.0  # seconds; without an answer, the backoff decides
_PERFORMING = re.compile(r"performing [A-Z]+ (https?://\S+) in ")


def refused_url(error: BaseException) -> str | None:
    """The URL of a refused request, from obstore's error; None if it has none."""
    found = _PERFORMING.search(str(error))
    return found[1] if found else None


def parse_retry_after(value: str, now: float) -> float | None:
    """The seconds of a `Retry-After` header in either of its forms; None if invalid.

    Example:
        >>> parse_retry_after("7", now=0.0), parse_retry_after("Thu, 01 Jan 1970 00:00:09 GMT", now=2.0)
        (7.0, 7.0)
    """
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except ValueError:
        return None


async def ask_retry_after(url: str) -> float | None:
    """Request `Retry-After` of a URL, in seconds; None if there is none, or no answer."""
    try:
        async with asyncio.timeout(HEAD_TIMEOUT):
            return await _send_head(url)
    except (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError, http.client.HTTPException):
        return None  # the request itself is retried, and reports what is wrong


async def _send_head(url: str) -> float | None:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    if parts.hostname is None:
        return None
    port = parts.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    try:
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        host = parts.netloc.rpartition("@")[2]
        writer.write(f"HEAD {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii"))
        head = await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.transport.abort()
    status, _, fields = head.partition(b"\r\n")
    if status.split(b" ")[1:2] not in ([b"429"], [b"503"]):
        return None
    value = http.client.parse_headers(io.BytesIO(fields)).get("Retry-After")
    return None if value is None else parse_retry_after(value, time.time())
