"""Exceptions as pickles that restore the same exception.

Python pickles an exception as a call of its class with its `args`. That fails if the constructor takes other arguments
than it passes to `super().__init__`, and otherwise composes the message a second time. Here the constructor of a user's
class is not called: its builtin base class makes the object, and its attributes are set.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable
from types import MethodDescriptorType
from typing import Any

from headrace._core.text import set_cause


def reduce_exception(error: BaseException) -> str | tuple[object, ...]:
    """How to pickle `error` with its cause; a class's own `__reduce__` takes precedence."""
    reduced = error.__reduce_ex__(5)
    if isinstance(reduced, str):  # the name of a global
        return reduced
    if not _reduced_by_a_builtin(type(error)):
        return _restore_by_own_reduce, (reduced, getattr(error, "__notes__", None), error.__cause__)
    _, arguments, *state = reduced
    return _restore, (type(error), arguments, error.args, state[0] if state else None, _slots(error), error.__cause__)


def without_unpicklable_parts(error: BaseException, is_picklable: Callable[[object], bool]) -> BaseException:
    """A copy of `error` with its class and message, and those attributes that can be pickled."""
    arguments = error.args if is_picklable(error.args) else (str(error),)
    state = {name: value for name, value in vars(error).items() if is_picklable(value)}
    slots = {name: value for name, value in _slots(error).items() if is_picklable(value)}
    return _restore(type(error), arguments, arguments, state, slots, None)


def _reduced_by_a_builtin(cls: type[BaseException]) -> bool:
    reduce: object = cls.__reduce__
    own = cls.__reduce_ex__ is not object.__reduce_ex__ or cls in copyreg.dispatch_table
    return not own and isinstance(reduce, MethodDescriptorType) and reduce.__objclass__.__module__ == "builtins"


def _slots(error: BaseException) -> dict[str, object]:
    names: list[str] = copyreg._slotnames(type(error))  # type: ignore[attr-defined]  # as copy and pickle do
    slots = {}
    for name in names:
        with contextlib.suppress(Exception):  # it is not set, which a `__getattr__` of the class may say in its own way
            slots[name] = getattr(error, name)
    return slots


def _restore(
    cls: type[BaseException],
    arguments: tuple[object, ...],
    args: tuple[object, ...],
    state: dict[str, object] | None,
    slots: dict[str, object],
    cause: BaseException | None,
) -> BaseException:
    builtin = cls
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__  # type: ignore[assignment]  # the base that lays out the object
    try:
        error = builtin.__new__(cls, *arguments)
        builtin.__init__(error, *arguments)
    except TypeError:  # the layout is of an extension module, or its builtin base lacks arguments
        error = cls(*arguments)
    vars(BaseException)["args"].__set__(error, args)
    if state:
        error.__setstate__(state)
    for name, value in slots.items():
        setattr(error, name, value)
    set_cause(error, cause)
    return error


def _restore_by_own_reduce(
    reduced: tuple[Any, ...], notes: list[str] | None, cause: BaseException | None
) -> BaseException:
    make, arguments, *state = reduced
    error: BaseException = make(*arguments)
    if state and state[0]:
        error.__setstate__(state[0])
    if notes is not None:
        error.__notes__ = notes
    set_cause(error, cause)
    return error
