"""Notes on exceptions of user code, also of classes that refuse notes."""

from __future__ import annotations

import contextlib


class FailureLocation(Exception):
    """The notes on an exception whose class takes none: the last in its chain of causes, so that they are printed."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to `error`; where its class prevents that, as a `FailureLocation` among its causes."""
    for add in (error.add_note, lambda text: BaseException.add_note(error, text)):
        with contextlib.suppress(Exception):  # user code: a class that refuses notes, or attributes
            add(note)
        if has_note(error, note):
            return
    last = error
    seen = {id(last)}
    while (cause := last.__cause__) is not None and id(cause) not in seen:
        last = cause
        seen.add(id(last))
    if isinstance(last, FailureLocation):
        last.args = (f"{last}\n{note}",)
    else:
        location = FailureLocation(note)
        location.__context__ = last.__context__  # which a cause hides
        set_cause(last, location)


def has_note(error: BaseException, note: str) -> bool:
    """Whether a traceback of `error` shows `note`."""
    shown: object = ()
    with contextlib.suppress(Exception):  # user code: `__notes__` is a property
        shown = getattr(error, "__notes__", ())
    if isinstance(shown, list | tuple) and note in shown:
        return True
    cause = error.__cause__
    seen = {id(error)}
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, FailureLocation) and note in str(cause):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Set `error.__cause__`, past a class that lets no attributes be set."""
    vars(BaseException)["__cause__"].__set__(error, cause)
