"""Find the variable that makes a pickled function or dataset large, to name it in a warning."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch

_MOST = 20_000  # values that are visited; large values are rarely nested deeply
_LEAVES = (str, int, float, complex, type(None), type, types.ModuleType)


def largest_value(obj: object) -> tuple[str, int]:
    """The largest array, tensor or bytes that a function or an object holds: its variable and size in bytes.

    Example:
        >>> table = np.zeros(1000)
        >>> def look_up(index): return table[index]
        >>> largest_value(look_up)
        ("'table', a global of look_up (ndarray)", 8000)
    """
    found, size = "", 0
    queue: deque[tuple[str, object]] = deque([("", obj)])
    seen: set[int] = set()
    while queue and len(seen) < _MOST:
        name, value = queue.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if (nbytes := _size(value)) is None:
            queue.extend((part_name or name, part) for part_name, part in _parts(value))
        elif nbytes > size:
            found, size = f"{name} ({type(value).__name__})".lstrip(), nbytes
    return found, size


def _size(value: object) -> int | None:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.nbytes
    if isinstance(value, torch.Tensor):
        # Shared objects are not copied.
        shared = value.layout is torch.strided and value.untyped_storage().is_shared()
        return 0 if shared else value.element_size() * value.nelement()
    return len(value) if isinstance(value, bytes | bytearray) else None


def _parts(value: object) -> Iterable[tuple[str, object]]:
    """The objects held by an object, with names; an empty name stands for that of the holder."""
    if isinstance(value, dict):
        return [("", part) for part in value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [("", part) for part in value]
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, functools.partial):
        return [("", value.func), *((f"an argument of {value!r:.80}", part) for part in (value.args, value.keywords))]
    if isinstance(value, types.FunctionType):
        return _variables(value)
    owner = type(value).__name__
    return [(f"attribute {name!r} of {owner}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    owner = function.__qualname__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name!r}, a variable of {owner}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield f"{name!r}, a global of {owner}", function.__globals__[name]
    for default in (function.__defaults__, function.__kwdefaults__):
        yield f"a default of {owner}", default


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
