"""The user's sampler or batch sampler: its state within an epoch and between two, and the epoch that was set."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

from headrace._core.consumer.cursor_sampler import CursorSampler
from headrace._core.streams.resumable import Stateful
from headrace.errors import StateError


class UserSampler:
    """The states of a sampler that is asked for its indices one after the other.

    Args:
        batch_sampler: the loader's; None without.
        sampler: what indices are drawn from; None where a batch sampler of the user's decides.
        walked: whether indices are drawn from it; if not, positions are computed, and it has no state here.

    Attributes:
        stateful: the part whose state is saved with each plan, once draws have begun; None if there is none.
        at_start: its state before the epoch's first draw; None if it has none.
    """

    def __init__(self, batch_sampler: object, sampler: object, *, walked: bool) -> None:
        self._parts = (batch_sampler, sampler) if walked else ()
        self.stateful: Stateful | None = None
        self.at_start: object = None

    @property
    def epoch(self) -> int | None:
        """The epoch that was set by its `set_epoch`; None if it has none."""
        epochs = (getattr(part, "epoch", None) for part in self._parts if hasattr(part, "set_epoch"))
        return next((epoch for epoch in epochs if type(epoch) is int), None)

    @property
    def _own(self) -> Stateful | None:
        """The sampler or batch sampler with a state; None of one of ours, which draws each epoch anew."""
        part = next((part for part in self._parts if isinstance(part, Stateful)), None)
        return None if isinstance(part, CursorSampler) else part

    @property
    def outlives_epochs(self) -> bool:
        """Whether its state outlives the iterator of an epoch."""
        return self._own is not None

    def between_epochs(self) -> object:
        """The state now, between two epochs; None if it has none that outlives them."""
        return None if self._own is None else copy.deepcopy(self._own.state_dict())

    def restore(self, state: object) -> None:
        """Restore a state that was saved between two epochs, or at the end of one."""
        if self._own is not None and state is not None:
            _load(self._own, state)

    def begin(self, draws: Iterator[object]) -> None:
        """Follow an epoch's draws: the state is that of the iterator, the batch sampler or the sampler."""
        parts = (draws, *self._parts) if self._parts else ()
        self.stateful = next((part for part in parts if isinstance(part, Stateful)), None)

    def after_draw(self) -> object:
        """The state after the last draw; None if there is none."""
        return None if self.stateful is None else copy.deepcopy(self.stateful.state_dict())

    def continued(self, part: Any, state: object) -> Iterator[object]:
        """The draws of `part`, the sampler or the batch sampler, from a state within an epoch on.

        Raises:
            StateError: neither it nor its iterator has a `load_state_dict`.
        """
        stateful: Any = part  # what is saved from now on
        if isinstance(part, Stateful):
            _load(part, state)  # before its iterator is made
        draws: Iterator[object] = iter(stateful)
        if not isinstance(part, Stateful):
            if not isinstance(draws, Stateful):
                raise StateError(f"the state has one of {type(part).__name__}, which has no load_state_dict now")
            _load(draws, state)
            stateful = draws
        self.stateful = stateful
        return draws


def _load(part: Stateful, state: object) -> None:
    part.load_state_dict(cast(Any, copy.deepcopy(state)))
