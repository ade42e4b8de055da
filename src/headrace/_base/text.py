"""Text of errors, warnings and reports, and checks of arguments."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import operator
import reprlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

LIMIT = 200  # characters
LIST_ITEMS = 8  # number of items shown of a list


def shorten(text: str, limit: int = LIMIT) -> str:
    """Shorten text to at most `limit` characters.

    An ellipsis replaces the middle of a longer text.
    """
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def short_repr(value: object, limit: int = LIMIT) -> str:
    """Return the shortened repr of a value.

    If `__repr__` raises, return the name of the class.
    """
    try:
        return shorten(repr(value), limit)
    except Exception:  # user code
        return f"<{type(value).__name__}>"


def shorten_list(items: Sequence[object] | Iterable[object], count: int) -> str:
    """Return the first of `count` items, written as a list.

    Items beyond the shown items are never read.
    """
    shown = ", ".join(map(short_repr, islice(items, LIST_ITEMS)))
    return f"[{shown}]" if count <= LIST_ITEMS else f"[{shown}, … {count} in all]"


def check_keywords(function: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise TypeError for an unknown keyword argument.

    The message is as in Python, and suggests the nearest known keyword.

    Example:
        >>> check_keywords("TarDataset.__init__", ["shufle"], ["shuffle", "seed"])
        Traceback (most recent call last):
        TypeError: TarDataset.__init__() got an unexpected keyword argument 'shufle'. Did you mean
        'shuffle'?
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}{hint}"
            )


def check_function(name: str, function: object) -> None:
    """Raise TypeError unless `function` is callable with one argument, and not async."""
    if not callable(function):
        raise TypeError(f"{name} must be callable, but got {function!r}")
    if is_async(function):
        raise TypeError(
            f"{name} must not be async: it is called, not awaited. Await in aget, or in the "
            f"function of the dataset's map(); got {function!r}"
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError, NameError):
        # Of a built-in function, or with names for types.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"{name} is called with one argument, but {function!r} does not take one: {error}. "
            f"With a random generator as a further argument, it needs @headrace.randomized"
        ) from None


def is_async(function: Any) -> bool:
    """Return whether a function, or the `__call__` of an object, is a coroutine function."""
    return callable(function) and any(
        map(inspect.iscoroutinefunction, (function, function.__call__))
    )


def check_number(name: str, value: object, least: float, most: float = math.inf) -> None:
    """Raise ValueError unless `value` is a finite number from `least` to `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= most
        or value == math.inf
    ):
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name} must be a number {bounds}, but got {value!r}")


def whole_number(name: str, value: Any, least: int = 0, most: float = math.inf) -> int:
    """Return a whole number as a plain int.

    NumPy and torch integers are accepted.

    Raises:
        TypeError: `value` is not a whole number.
        ValueError: `value` is not from `least` to `most`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, but got {short_repr(value)}")
    number = int(operator.index(value))
    if not least <= number <= most:
        bounds = (
            f"at least {least}" if most == math.inf else f"between {least} and {most}"
        )
        raise ValueError(f"{name}={number} must be {bounds}")
    return number


_short = reprlib.Repr()
_short.maxother = 200  # characters


def dataset_repr(dataset: Any) -> str:
    """Return the shortened repr of a dataset.

    A list of a million keys is shown with the first few keys. Control characters, which a terminal
    would obey, are escaped.
    """
    text = _short.repr(dataset)
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def function_name(function: Any) -> str:
    """Return the qualified name of a function.

    For another callable, return the name of the class.
    """
    name = None
    with contextlib.suppress(Exception):  # user code: `__getattr__`
        name = getattr(function, "__qualname__", None)
    return name if type(name) is str else type(function).__name__


def error_message(error: BaseException) -> str:
    """Return the message of an error, even if `__str__` raises."""
    try:
        return str(error)
    except Exception as broken:  # user code
        return f"(no message: its __str__ raised {type(broken).__name__})"


def sample_repr(sample: Any) -> str:
    """Return the repr of a named tuple, without the bytes of `data`.

    The repr has the number of bytes in field `data`.
    """
    fields = (f"{name}=<{len(value):,} bytes>" if name == "data" else f"{name}={value!r}"
              for name, value in zip(sample._fields, sample, strict=True))  # fmt: skip
    return f"{type(sample).__name__}({', '.join(fields)})"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error without `error.add_note`.

    A class may override `add_note`, or refuse notes by a `__setattr__`.
    """
    notes = vars(error).setdefault("__notes__", [])
    if isinstance(notes, list):
        notes.append(note)


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Set `error.__cause__`, also for classes that refuse attributes."""
    vars(BaseException)["__cause__"].__set__(error, cause)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first line outside of headrace."""
    level, frame = 1, sys._getframe()
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] == "headrace"
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def check_names(option: str, names: object) -> None:
    """Raise `TypeError` if `names` is a str.

    Each letter of a str would count as a name.
    """
    if isinstance(names, str):
        raise TypeError(f"{option}= must be several names, not one str")


def seconds(value: float) -> str:
    """Format seconds with two digits and a unit."""
    unit, size = (
        ("s", 1.0) if value >= 1 else ("ms", 1e-3) if value >= 1e-3 else ("µs", 1e-6)
    )
    return f"{digits(value / size)} {unit}"


def share(value: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.0f} %"


def digits(value: float) -> str:
    """Format a number with at least two digits, and with separators of thousands."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"
