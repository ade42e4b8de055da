"""The base class of headrace's errors: pickling, copies, and construction from a message alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

__all__ = [
    "HeadraceError",
]


def _restore(cls: type[HeadraceError], args: tuple[object, ...], state: dict[str, object]) -> HeadraceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _or_from_message(compose: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(compose)

    @functools.wraps(compose)
    def init(self: HeadraceError, *args: object, **fields: object) -> None:
        try:
            signature.bind(self, *args, **fields)
        except TypeError:
            if fields or len(args) != 1 or not isinstance(args[0], str):
                raise
            super(HeadraceError, self).__init__(args[0])
        else:
            compose(self, *args, **fields)

    return init


class HeadraceError(Exception):
    """The base class: `except headrace.HeadraceError` catches every error that headrace itself raises.

    Each class can also be constructed from a message alone, as torch does to raise an error of a worker process again.
    Its attributes are None then.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = _or_from_message(cls.__dict__["__init__"])  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[object, ...]:
        # Constructors compose messages from keyword fields; a copy keeps the composed message.
        return _restore, (type(self), self.args, self.__dict__)
