"""Detection of streams that do not depend on the rank, so that every rank reads the same samples."""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType

from headrace._core.interface.kinds import capabilities
from headrace._core.interface.traversal import child_datasets

_FIRST = 32  # elements of a list that are looked at
_NAME_OF_RANK = re.compile(r"(?:\w*_)?(?:ranks?|world_size|num_replicas|num_processes)(?:_\w*)?", re.IGNORECASE)


def is_replicated(stream: object) -> bool:
    """Whether all ranks would read the same samples from a stream, as far as can be determined without reading.

    A stream of headrace or torch is replicated if one of its parts is. A user's stream is not if it reads a stream that
    splits itself, or if an attribute or a name in its code is ``rank``, ``get_rank_info``, ``WORLD_SIZE`` or similar.
    """
    if getattr(stream, "splits_by_rank", False):
        return False
    if _is_library(type(stream)) and not any(map(_is_user_function, _attributes(stream))):
        parts = [part for value in _attributes(stream) for part in child_datasets(value)]
        return any(is_replicated(part) for part in parts if capabilities(part).aiter or hasattr(part, "__iter__"))
    return not _depends_on_rank(stream, set())


def is_divided_by_sample(stream: object) -> bool:
    """Whether every rank reads the whole stream and takes every n-th sample, so that its position is that of all."""
    return bool(getattr(stream, "divides_samples", False))


def _depends_on_rank(value: object, visited: set[int]) -> bool:
    if id(value) in visited:
        return False
    visited.add(id(value))
    names = [*getattr(value, "__dict__", ()), *(n for function in _functions(value) for n in _names(function.__code__))]
    if getattr(value, "splits_by_rank", False) or any(map(_NAME_OF_RANK.fullmatch, names)):
        return True
    return any(_depends_on_rank(each, visited) for each in _referenced(value))


def _referenced(value: object) -> Iterator[object]:
    """The datasets and the user's functions that a stream's attributes and functions refer to."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        yield value.__self__
    candidates = _attributes(value)
    for function in _functions(value):
        try:
            variables = inspect.getclosurevars(function)
        except ValueError:  # a variable of its closure has no value yet
            continue
        candidates += [*variables.nonlocals.values(), *variables.globals.values()]
    for candidate in candidates:
        yield from child_datasets(candidate)
        stages = candidate if isinstance(candidate, list | tuple) else (candidate,)  # webdataset's pipeline is a list
        yield from filter(_is_user_function, stages[:_FIRST])


def _functions(value: object) -> list[FunctionType]:
    if isinstance(value, FunctionType):
        return [value]
    classes = [cls for cls in type(value).__mro__ if not _is_library(cls)]
    return [method for cls in classes for method in vars(cls).values() if isinstance(method, FunctionType)]


def _names(code: CodeType) -> Iterator[str]:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield from (*code.co_names, *arguments, *code.co_freevars, *_locals_read(code))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):  # os.environ["RANK"]
            yield constant


def _locals_read(code: CodeType) -> Iterator[str]:
    """Not those that are only assigned: ``rank, worker = info()`` is no use of `rank`."""
    for instruction in dis.get_instructions(code):
        if "LOAD_FAST" in instruction.opname:
            names = instruction.argval  # of a pair, in CPython 3.13 and later, the second is loaded, or both are
            yield from (names,) if isinstance(names, str) else names[instruction.opname.startswith("STORE") :]


def _attributes(value: object) -> list[object]:
    return list(getattr(value, "__dict__", {}).values())


def _is_user_function(value: object) -> bool:
    if isinstance(value, functools.partial | MethodType):
        return True
    return callable(value) and not isinstance(value, type) and not _is_library(value)


def _is_library(thing: object) -> bool:
    module = getattr(thing, "__module__", None) or "builtins"
    return module.partition(".")[0] in ("headrace", "torch", "builtins", "functools", "typing")
