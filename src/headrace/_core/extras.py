"""Packages that only a part of headrace needs."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.errors import MissingExtraError


def require(module: str, what: str, package: str, extra: str) -> Any:
    """Import a module of a package that `what` needs; raises `MissingExtraError`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(what=what, package=package, extra=extra) from None
