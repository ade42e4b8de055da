"""Learning how long a store that throttles asks to be left alone.

The store's client keeps the status and the body of a refusal, and drops its headers. So one HEAD of the same URL is
sent, by whichever fetcher was refused first; it carries no credentials, follows no redirect, and what it answers is
looked at for `Retry-After` alone (RFC 9110, section 10.2.3).
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

PATIENCE = 2.0  # seconds; a store that is too busy to answer this leaves us with waits of our own
_PERFORMING = re.compile(r"performing [A-Z]+ (https?://\S+) in ")


def refused_url(error: BaseException) -> str | None:
    """The URL that a request of obstore's was refused for, where its error says it."""
    found = _PERFORMING.search(str(error))
    return found[1] if found else None


def parse_retry_after(value: str, now: float) -> float | None:
    """Seconds from a `Retry-After` header, in either of its forms; None where it is neither.

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
    """The seconds that the store behind `url` asks to wait; None where it does not say, or does not answer."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await _ask(url)
    except (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError, http.client.HTTPException):
        return None  # it was only to know how long to wait; the request itself is made again, and says what is wrong


async def _ask(url: str) -> float | None:
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
