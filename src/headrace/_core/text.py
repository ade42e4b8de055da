"""Shortened text for error messages and records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

LIMIT = 200  # characters
LIST_ITEMS = 8  # shown of a list


def shorten(text: str, limit: int = LIMIT) -> str:
    """The beginning and the end of `text`, with an ellipsis between them where it is longer than `limit` characters.

    Example:
        >>> shorten("a" * 50 + "b" * 50, 9)
        'aaaa…bbbb'
    """
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def short_repr(value: object, limit: int = LIMIT) -> str:
    """`repr(value)`, shortened; of a value whose `__repr__` raises, the name of its class.

    Example:
        >>> short_repr("key")
        "'key'"
    """
    try:
        return shorten(repr(value), limit)
    except Exception:  # user code
        return f"<{type(value).__name__}>"


def shorten_list(items: Sequence[object] | Iterable[object], count: int) -> str:
    """The first of `count` items, as a list is written; never reads more of them than are shown.

    Example:
        >>> shorten_list(range(1000), 1000)
        '[0, 1, 2, 3, 4, 5, 6, 7, … 1000 in all]'
    """
    shown = ", ".join(map(short_repr, islice(items, LIST_ITEMS)))
    return f"[{shown}]" if count <= LIST_ITEMS else f"[{shown}, … {count} in all]"
