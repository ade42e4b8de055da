"""Exceptions as pickles that restore the same exception.

Python pickles an exception as a call of its class with its `args`. That fails if the constructor
takes other arguments than it passes to `super().__init__`, and otherwise composes the message a
second time. Here the constructor of a user's class is not called, unless the class has slots: its
builtin base class makes the object, and its attributes are set.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from types import MethodDescriptorType

from headrace._core.text import set_cause


def reduce_exception(error: BaseException) -> str | tuple[object, ...]:
    """How to pickle `error` with its cause; a class's own `__reduce__` takes precedence."""
    reduced = error.__reduce_ex__(5)
    if isinstance(reduced, str):  # the name of a global
        return reduced
    make, arguments, *state = reduced
    if _reduced_by_a_builtin(type(error)):
        make, arguments = _make, (type(error), arguments, error.args)
    notes = vars(error).get("__notes__")  # not by the __getattr__ of a user's class
    return _restore, (make, arguments, state[0] if state else None, notes, error.__cause__)


def without_unpicklable_parts(
    error: BaseException, is_picklable: Callable[[object], bool]
) -> BaseException:
    """A copy of `error` with its class and message, and those attributes that can be pickled."""
    arguments = error.args if is_picklable(error.args) else (str(error),)
    state = {name: value for name, value in vars(error).items() if is_picklable(value)}
    return _restore(_make, (type(error), arguments, arguments), state, None, None)


def _reduced_by_a_builtin(cls: type[BaseException]) -> bool:
    reduce: object = cls.__reduce__
    own = cls.__reduce_ex__ is not object.__reduce_ex__ or cls in copyreg.dispatch_table
    own = own or bool(copyreg._slotnames(cls))  # type: ignore[attr-defined]  # which pickle leaves to the constructor
    return (
        not own
        and isinstance(reduce, MethodDescriptorType)
        and reduce.__objclass__.__module__ == "builtins"
    )


def _restore(
    make: Callable[..., BaseException],
    arguments: tuple[object, ...],
    state: dict[str, object] | None,
    notes: list[str] | None,
    cause: BaseException | None,
) -> BaseException:
    error = make(*arguments)
    if state:
        error.__setstate__(state)
    if notes is not None:
        error.__notes__ = notes
    set_cause(error, cause)
    return error


def _make(
    cls: type[BaseException], arguments: tuple[object, ...], args: tuple[object, ...]
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
    return error
