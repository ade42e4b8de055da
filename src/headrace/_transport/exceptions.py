"""Exceptions as pickles for exact copies.

Python pickles an exception as a call of the class with `args`. The call fails if the constructor
takes other arguments than the arguments of `super().__init__`. Otherwise the constructor would
compose the message a second time. Therefore this module does not call the constructor of a user's
class: the builtin base class makes the object, and the attributes are set afterwards. A class with
slots is an exception: its constructor is called.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from types import MethodDescriptorType

from headrace._base.text import set_cause


def reduce_exception(error: BaseException) -> str | tuple[object, ...]:
    """Return the reduction of `error`, with the cause.

    A `__reduce__` of the class takes precedence.
    """
    reduced = error.__reduce_ex__(5)
    if isinstance(reduced, str):  # the name of a global
        return reduced
    make, arguments, *state = reduced
    if _reduced_by_a_builtin(type(error)):
        make, arguments = _make, (type(error), arguments, error.args)
    notes = vars(error).get("__notes__")  # bypasses a `__getattr__` of the user's class
    return _restore, (
        make,
        arguments,
        state[0] if state else None,
        notes,
        error.__cause__,
    )


def without_unpicklable_parts(
    error: BaseException, is_picklable: Callable[[object], bool]
) -> BaseException:
    """Return a copy of `error` with class, message and picklable attributes."""
    arguments = error.args if is_picklable(error.args) else (str(error),)
    state = {name: value for name, value in vars(error).items() if is_picklable(value)}
    return _restore(_make, (type(error), arguments, arguments), state, None, None)


def _reduced_by_a_builtin(cls: type[BaseException]) -> bool:
    reduce: object = cls.__reduce__
    own = cls.__reduce_ex__ is not object.__reduce_ex__ or cls in copyreg.dispatch_table
    # pickle leaves slots to the constructor.
    own = own or bool(copyreg._slotnames(cls))  # type: ignore[attr-defined]
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
        builtin = builtin.__base__  # type: ignore[assignment]  # the base with the memory layout
    try:
        error = builtin.__new__(cls, *arguments)
        builtin.__init__(error, *arguments)
    except TypeError:
        # The layout comes from an extension module, or the base lacks arguments.
        error = cls(*arguments)
    vars(BaseException)["args"].__set__(error, args)
    return error
