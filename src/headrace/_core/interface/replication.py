"""Detection of streams that do not depend on the rank, so that every rank reads the same samples."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from headrace._core.interface.traversal import child_datasets

_OF_RANKS = re.compile(r"(?:\w*_)?(?:ranks?|world_size|num_replicas|num_processes)(?:_\w*)?", re.IGNORECASE)


def is_replicated(stream: Any) -> bool:
    """Whether all ranks would read the same samples from a stream, as far as can be determined without reading.

    A stream of headrace's, or of torch's, is as its parts are. One of the user's own is taken to know its rank where an
    attribute or anything in its code is called ``rank``, ``get_rank_info``, ``WORLD_SIZE`` or the like, or where it
    reads a stream that splits itself.
    """
    if getattr(stream, "splits_by_rank", False):
        return False
    if _is_library(type(stream)) and not any(map(_is_own_function, _values(stream))):
        held = [part for value in _values(stream) for part in child_datasets(value)]
        return any(is_replicated(part) for part in held if hasattr(part, "__aiter__") or hasattr(part, "__iter__"))
    return not _knows_ranks(stream, set())


def _knows_ranks(value: Any, visited: set[int]) -> bool:
    if id(value) in visited:
        return False
    visited.add(id(value))
    if getattr(value, "splits_by_rank", False):
        return True
    if any(map(_OF_RANKS.fullmatch, getattr(value, "__dict__", ()))):
        return True
    if any(_OF_RANKS.fullmatch(name) for function in _functions(value) for name in _names(function.__code__)):
        return True
    return any(_knows_ranks(each, visited) for each in _reached(value))


def _reached(value: Any) -> Iterator[Any]:
    """The objects that a stream's attributes and its functions refer to."""
    if isinstance(value, functools.partial):
        yield value.func
        yield from (*value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        yield value.__self__
    for attribute in _values(value):
        yield from child_datasets(attribute)
        if _is_own_function(attribute):
            yield attribute
    for function in _functions(value):
        try:
            seen = inspect.getclosurevars(function)
        except ValueError:  # a variable of its closure has no value yet
            continue
        for outside in (*seen.nonlocals.values(), *seen.globals.values()):
            yield from child_datasets(outside)
            if _is_own_function(outside):
                yield outside


def _functions(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield value
        return
    for cls in type(value).__mro__:
        if not _is_library(cls):
            yield from (method for method in vars(cls).values() if isinstance(method, FunctionType))


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):  # os.environ["RANK"]
            yield constant


def _values(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())


def _is_own_function(value: Any) -> bool:
    if isinstance(value, functools.partial | MethodType):
        return True
    return callable(value) and not isinstance(value, type) and not _is_library(value)


def _is_library(thing: Any) -> bool:
    module = getattr(thing, "__module__", None) or "builtins"
    return module.partition(".")[0] in ("headrace", "torch", "builtins", "functools", "typing")
