"""Errors from workers in torch's words: "Caught ValueError in DataLoader worker process 0", and the traceback there.

Torch raises a new exception with that message, without the attributes of the original. Here the exception itself was
pickled, and only its message is replaced by torch's, where nothing is lost by that.
"""

from __future__ import annotations

from headrace._core.torchcompat.private import KeyErrorMessage
from headrace.errors import HeadraceError, RemoteError

# Where a builtin keeps the text that its `str` shows, if that is not `args`.
_TEXT_FIELDS: tuple[tuple[type[BaseException], str], ...] = (
    (ImportError, "msg"),
    (SyntaxError, "msg"),
    (OSError, "strerror"),
)


def torch_error_text(error: BaseException, worker: int, traceback: str) -> str:
    """The message of torch's loader for an error of a worker."""
    remote = error.type_name if isinstance(error, RemoteError) else None
    name = type(error).__name__ if remote is None else remote.rpartition(".")[2]
    words = f"Caught {name} in DataLoader worker process {worker}.\nOriginal {traceback}"
    # `str` of a KeyError is the `repr` of its argument, which would be one line of backslashes.
    return KeyErrorMessage(words) if isinstance(error, KeyError) else words


def set_torch_error_text(error: BaseException, words: str) -> bool:
    """Make `words` the message of `error`.

    Attributes stay, and so do several arguments of a class with a constructor of its own. False where the message is
    not a text that could be replaced (a class that composes it in `__str__`, say): then the error is as it was.
    """
    if isinstance(error, HeadraceError) and not isinstance(error, RemoteError):
        return False  # their own messages have the location and the remedy
    try:
        return _reworded(error, words)
    except Exception:  # user code: a class whose attributes cannot be set
        return False


def _reworded(error: BaseException, words: str) -> bool:
    if len(error.args) <= 1 or not _has_own_constructor(type(error)):
        args, error.args = error.args, (words,)
        if _text_of(error) == words:
            return True
        error.args = args
    for builtin, field in _TEXT_FIELDS:
        if isinstance(error, builtin):
            return _replaced(error, field, words)
    return False


def _replaced(error: BaseException, field: str, words: str) -> bool:
    before: object = getattr(error, field)
    setattr(error, field, words)
    if _text_of(error) == words:
        return True
    # `str` puts a file's name after it, and an error's number before it.
    setattr(error, field, words.rstrip("\n"))
    if words.rstrip("\n") in (_text_of(error) or ""):
        return True
    setattr(error, field, before)
    return False


def _has_own_constructor(cls: type[BaseException]) -> bool:
    for base in cls.__mro__:
        if base.__module__ == "builtins":
            return False
        if "__init__" in vars(base) or "__new__" in vars(base):
            return True
    return False


def _text_of(error: BaseException) -> str | None:
    try:
        return str(error)
    except Exception:  # user code: __str__
        return None
