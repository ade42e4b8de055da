"""The first batches of the next epoch, fetched while the last ones of this epoch are consumed; docs/design/0002."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from headrace._core.batches import BatchPlan, FetchLoad
from headrace._core.links.session import Session
from headrace._core.order.restore import EpochSpec


class NextEpoch(NamedTuple):
    """The epoch that is expected next, and its session.

    Its plans share the limits of the epoch under way: the look-ahead, and what may be fetched and held at once.
    """

    spec: EpochSpec
    session: Session  # owned, up to `adopt`
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
        if not fits or replace(spec, order=self.spec.order, draws=self.spec.draws, begun=begun) != self.spec:
            self.session.close()
        return not self.session.ended
