"""Which of the packages that the demo needs are not installed."""

from __future__ import annotations

import importlib.util

__all__ = ["missing_extras"]

_FOR_DISPLAY = {"rich": "rich"}
_FOR_DIGITS = {"sklearn": "scikit-learn", "PIL": "pillow", "aiohttp": "aiohttp"}


def missing_extras(*, for_url: bool) -> list[str]:
    """The names, as pip knows them, of packages of the extra `demo` that are needed and not there.

    Args:
        for_url: whether the user's own objects are streamed, for which no digits, decoder and server are needed.
    """
    needed = _FOR_DISPLAY if for_url else {**_FOR_DIGITS, **_FOR_DISPLAY}
    return [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
