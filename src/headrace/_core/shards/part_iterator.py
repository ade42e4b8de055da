"""The iterator of one pass over a stream of parts, whose state says which stream, reader and epoch it is of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from headrace._core.interface.stream_state import ResumableIterator, State, expect_int, expect_state
from headrace.errors import StateError

T_co = TypeVar("T_co", covariant=True)


class PartIterator(ResumableIterator[T_co]):
    """The samples of one reader in one epoch.

    The state of another epoch can be loaded: the iterator then continues in that epoch's order.

    Args:
        name: of the stream, in errors.
        options: returns what must be the same where a state is loaded.
        start: starts the reader in an epoch and a repetition of it; nothing is read before the first `anext`.
        epoch: the number of the epoch.
        repetition: the number of the repetition.
    """

    def __init__(
        self,
        name: str,
        options: Callable[[], Mapping[str, object]],
        start: Callable[[int, int], ResumableIterator[T_co]],
        *,
        epoch: int,
        repetition: int,
    ) -> None:
        self._name = name
        self._options = options
        self._start = start
        self._epoch, self._repetition = epoch, repetition
        self._inner = start(epoch, repetition)
        self._fixed: State | None = None  # the part of the state that stays the same

    def __anext__(self) -> Awaitable[T_co]:
        return self._inner.__anext__()

    def state_dict(self) -> State:
        if self._fixed is None:
            self._fixed = {"of": dict(self._options()), "epoch": self._epoch, "repetition": self._repetition}
        return {**self._fixed, "stream": self._inner.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._check(expect_state(state, "of"))
        place = expect_int(state, "epoch"), expect_int(state, "repetition")
        stream = expect_state(state, "stream")
        if place != (self._epoch, self._repetition):
            self._epoch, self._repetition = place
            self._inner = self._start(*place)
            self._fixed = None
        self._inner.load_state_dict(stream)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _check(self, saved: State) -> None:
        present = self._options()
        different = [name for name in {**present, **saved} if saved.get(name) != present.get(name)]
        if different:
            listed = "; ".join(f"{name} was {saved.get(name)!r}, and is {present.get(name)!r}" for name in different)
            hint = ""
            if "reader" in different or "readers" in different:
                hint = (
                    ". A reader is a rank, or a worker of it in a torch loader. For another number of ranks, merge "
                    "the states of all of them by headrace.merge_states"
                )
            raise StateError(f"the state does not fit this {self._name}: {listed}{hint}")
