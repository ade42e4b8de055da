"""Operations that hold samples, and continue from an earlier position after a restore."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from headrace._core.interface.iterators import OperationIterator
from headrace._core.interface.reread import Reread
from headrace._core.interface.stream_state import State, expect_int

T = TypeVar("T")


class Mark(NamedTuple):
    """A position that can be saved; with the numbers of samples and errors, and of errors, given before it."""

    given: int
    errors: int
    position: Callable[[], State]


class ReplayIterator(OperationIterator[T]):
    """An operation whose samples depend on some that it holds: not every position of it can be saved as such.

    The state is then an earlier position, and how many samples and errors have been given since. They are read again,
    and dropped.
    """

    def __init__(self) -> None:
        self._mark: Mark | None = None
        self._given = 0  # samples and errors
        self._errors = 0  # of those
        self._reread = Reread()

    async def __anext__(self) -> T:
        if self._mark is None:
            self._mark = self._new_mark()
        if self._reread.left:
            await self._reread.drop(self._next, self.operation)
        try:
            sample = await self._next()
        except StopAsyncIteration:
            raise
        except Exception:  # of user code: counted, since it stands in place of a sample when it is read again
            self._given += 1
            self._errors += 1
            raise
        self._given += 1
        return sample

    def _position(self) -> State:
        if self._mark is None or not self._reread.left:
            self._mark = self._latest_mark()
        given, errors, position = self._mark
        return {**position(), "given": self._given - given, "errors": self._errors - errors}

    def _latest_mark(self) -> Mark:
        """The latest position from which what is held now can be read again."""
        return self._new_mark() if self._mark is None or self._is_exact() else self._mark

    def _new_mark(self) -> Mark:
        return Mark(self._given, self._errors, self._snapshot())

    def _restore(self, state: State) -> None:
        self._given, self._errors = expect_int(state, "given"), expect_int(state, "errors")
        self._reread = Reread(self._given, self._errors)
        self._restore_exact(state)
        position = {name: value for name, value in state.items() if name not in ("operation", "given", "errors")}
        self._mark = Mark(0, 0, lambda: position)

    @abstractmethod
    async def _next(self) -> T:
        """The next sample."""

    @abstractmethod
    def _is_exact(self) -> bool:
        """Whether the current position can be saved as such; true at the start."""

    @abstractmethod
    def _snapshot(self) -> Callable[[], State]:
        """The current position, if it can be saved as such."""

    @abstractmethod
    def _restore_exact(self, state: State) -> None:
        """Continue from such a position."""
