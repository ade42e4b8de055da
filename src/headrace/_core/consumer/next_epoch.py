"""The first batches of the next epoch, fetched while the last ones of this epoch are consumed; docs/design/0002."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from headrace._core.batches import BatchPlan, FetchLoad
from headrace._core.engine.config import EngineConfig
from headrace._core.links.select import PlacementSelector
from headrace._core.links.session import Session
from headrace._core.order.restore import EpochSpec

_log = logging.getLogger("headrace")


class NextEpoch(NamedTuple):
    """The epoch that is expected next, and its session.

    Its plans share the limits of the epoch under way: the look-ahead, and what may be fetched and held at once.
    """

    spec: EpochSpec
    session: Session
    plans: Iterator[BatchPlan]
    seen: list[object]  # the snapshot of the dataset
    of_batch: int  # fetches of a batch
    together: bool  # whether the engine joins the requests of plans that arrive together
    budget: int | None  # bytes of both epochs

    def fill(self, look_ahead: int, under_way: int, ready: int, load: FetchLoad) -> None:
        """Send as many plans as there is room for beside those `under_way`, of whose batches some are `ready`."""
        sent = self.session.sent_before
        before, fetching = under_way + len(sent), under_way - ready + len(sent)
        room = look_ahead - before
        if self.together:  # in one group, as at the beginning of an epoch
            room = 0 if fetching or 2 * room < look_ahead else room
        else:
            room = min(room, max(1, load.limit // self.of_batch) - fetching)
            if self.budget and load.memory:
                room = min(room, self.budget * load.memory_samples // load.memory // self.of_batch - before)
        if room > 0 and (drawn := list(islice(self.plans, room))):
            self.session.send(drawn)
            sent |= {plan.number: plan for plan in drawn}

    def adopt(self, spec: EpochSpec, *, fits: bool) -> bool:
        """Whether this is the epoch that begins, and its session runs; otherwise that is closed."""
        self.session.certain()  # receives its end, if the engine has ended
        begun = spec.begun._replace(found=self.spec.begun.found)  # which goes on while the last batches are delivered
        if not fits or spec._replace(order=self.spec.order, draws=self.spec.draws, begun=begun) != self.spec:
            self.session.close()
        return not self.session.ended


class NextEpochReader:
    """Has the first batches of a loader's next epoch fetched, and owns its session until the loader takes it.

    Attributes:
        epoch: the one that is expected; None before its first batches are planned.
        reads: False once one was not the epoch that came.
    """

    def __init__(self, placements: PlacementSelector) -> None:
        self.epoch: NextEpoch | None = None
        self.reads = True
        self._placements = placements

    def read(self, number: int, begin: Callable[[], NextEpoch | None], look_ahead: int, *load: Any) -> None:
        """Have batches fetched of the epoch of this number, which `begin` begins the first time."""
        if self.epoch is None:
            try:
                self.epoch = begin()
            except Exception:  # raised when the epoch begins, if it is still there
                _log.debug("epoch %d cannot be fetched before it begins", number, exc_info=True)
                self.reads = False
        if self.epoch is not None:
            self.epoch.fill(look_ahead, *load)

    def take(self, spec: EpochSpec, config: EngineConfig, *, resumed: bool) -> Session | None:
        """The session of the epoch that begins, if it was expected and runs."""
        if (expected := self.epoch) is None:
            return None
        fits, self.epoch = self._placements.fits_next(config, expected.seen), None
        if expected.adopt(spec, fits=fits):
            return expected.session
        self.reads = resumed
        text = "epoch %d is not the one that was expected: %d batches that were read ahead are dropped"
        _log.info(text, spec.begun.epoch, len(expected.session.sent_before))
        return None

    def drop(self) -> bool:
        """Close the session; whether there was one."""
        expected, self.epoch = self.epoch, None
        if expected is not None:
            expected.session.close()
        return expected is not None
