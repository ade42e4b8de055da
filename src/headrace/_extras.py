"""Optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.errors import MissingExtraError


def require(module: str, what: str, package: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: name of the module.
        what: the part of headrace with the need, for the error message.
        package: name of the package.
        extra: headrace's extra with the package.

    Raises:
        MissingExtraError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(what=what, package=package, extra=extra) from None
