"""Arguments of the `DataLoader` of a torch that is newer than this headrace."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Container, Iterable, Mapping
from typing import NoReturn

import torch
from torch.utils.data import DataLoader

_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@functools.cache
def torchs_arguments() -> Mapping[str, inspect.Parameter]:
    """The arguments of the installed torch's loader, by name."""
    return inspect.signature(DataLoader.__init__).parameters


def newer_arguments(known: Container[str]) -> dict[str, inspect.Parameter]:
    """Those of the installed torch's loader that are not known, as keyword-only parameters."""
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in torchs_arguments().items()
        if name not in known and parameter.kind in _NAMED
    }


def check_newer_arguments(given: Mapping[str, object], known: Iterable[str], *, stacklevel: int) -> None:
    """Warn of arguments that only torch knows: headrace's engine loads the batches, and ignores them.

    Args:
        given: arguments that are none of headrace's own, by name.
        known: names of all arguments, for the suggestion.
        stacklevel: as of `warnings.warn`, from the caller's frame.

    Raises:
        TypeError: torch does not know one either.
    """
    torchs = newer_arguments(())
    for name, value in given.items():
        if name not in torchs:
            _refuse(name, known)
        default = torchs[name].default
        if value is not default and value != default:
            warnings.warn(
                f"torch {torch.__version__}'s DataLoader has the argument {name}=, which this version of headrace does "
                f"not know: {name}={value!r} is given to torch's constructor, but headrace loads the batches, and does "
                "so as without it",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


def _refuse(name: str, known: Iterable[str]) -> NoReturn:
    similar = difflib.get_close_matches(name, known, n=1)
    suggestion = f". Did you mean {similar[0]!r}?" if similar else ""
    raise TypeError(f"DataLoader.__init__() got an unexpected keyword argument {name!r}{suggestion}")
