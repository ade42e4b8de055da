"""The lanes of a stream: how many an epoch has, whose turn it is, and where each lane's next batch begins."""

from __future__ import annotations

from collections import deque
from typing import Any

from headrace._core.batches import HostBatch, SessionStart
from headrace._core.order.spec import LoaderSpec
from headrace._core.order.state import LoaderState
from headrace._core.ranks.distributed import ShardOptions, current_lane
from headrace._core.ranks.rankinfo import bound
from headrace._core.streams.kinds import DatasetKind, most_lanes, why_not_by_lanes
from headrace._core.text import warn_user


class LaneChoice:
    """Chooses the number of lanes for the epochs of one loader, and warns where engines have nothing to read."""

    def __init__(self, spec: LoaderSpec) -> None:
        self._source = spec.source
        self._is_stream = spec.kind is DatasetKind.ASYNC_ITERABLE
        self.wanted = spec.engines  # lanes that an epoch has, if the stream has as many shards
        self._why_whole = why_not_by_lanes(spec.source) if self._is_stream else None
        self._warned: set[int] = set()  # the numbers of lanes
        self.own = 1  # lanes of an epoch that begins anew, as last determined
        self.current = 1  # of the epoch begun last

    @property
    def possible(self) -> bool:
        """Whether the dataset is a stream that can be read by lanes."""
        return self._is_stream and self._why_whole is None

    def of_epoch(self, resumed: LoaderState | None) -> int | None:
        """The number of lanes of the epoch that begins, or continues; None if no engine reads it as a stream."""
        if not self._is_stream:
            return None
        self.own = self.current = self._of_new_epoch()
        if resumed is not None and resumed.lanes is not None:
            self.current = resumed.lanes
        return self.current

    def _of_new_epoch(self) -> int:
        if self.wanted == 1 or self._why_whole is not None:
            return 1
        most = max(1, most_lanes(self._source))
        if most < self.wanted and most not in self._warned:
            self._warned.add(most)
            warn_user(
                f"engines={self.wanted}, but the stream has only {most} shards (or row groups) for each rank: it is "
                f"read in {most} lanes, by as many engines. Write smaller shards for more"
            )
        return min(self.wanted, most)

    def describe(self) -> str:
        """How engines read the stream of the epoch begun last, for `stats()`."""
        if not self._is_stream or self.wanted == 1 == self.current:
            return ""
        if self.current > 1:
            return f", {self.current} lanes"
        reason = "" if self._why_whole is None else f" as a whole: {self._why_whole}"
        return f", of which one reads the stream{reason}"

    def batches(self, dataset: Any, batch_size: int | None, *, drop_last: bool) -> int | None:
        """The number of batches of an epoch, each lane's by itself; None of a stream that is read as a whole."""
        lanes = self._of_new_epoch() if self._is_stream else 1
        if lanes == 1:
            return None
        batches = 0
        for lane in range(lanes):
            with bound(current_lane, ShardOptions(lane, lanes)):
                samples = len(dataset)
            size = batch_size or 1
            batches += samples // size if drop_last and batch_size is not None else -(-samples // size)
        return batches


class LaneTurns:
    """Gives each plan of a stream to one of its lanes, in turn.

    A lane that has ended is left out, once its end is known here. Until then its turns give empty batches, which are
    not delivered: so the order of those that are delivered depends on the lanes alone.

    Attributes:
        active: lanes that are not known to have ended, the next one first.
    """

    def __init__(self, start: SessionStart) -> None:
        self.lanes = start.lanes
        ended = start.ended
        turns = ((start.next_worker + turn) % start.lanes for turn in range(start.lanes))
        self.active = deque(lane for lane in turns if lane not in ended)
        drawn = {lane: state.get("drawn", 0) for lane, state in start.streams.items()}
        self._drawn = [found if isinstance(found := drawn.get(lane, 0), int) else 0 for lane in range(start.lanes)]

    def take(self, samples: int) -> tuple[int, int]:
        """The lane whose turn it is, and the number of its samples that were planned before; `samples` are now."""
        lane = self.active[0]
        self.active.rotate(-1)
        first = self._drawn[lane]
        self._drawn[lane] += samples
        return lane, first

    def on_batch(self, host: HostBatch) -> bool:
        """Note a batch that arrived; whether it was the end of the last lane."""
        if host.worker is None:  # it failed before its lane was read
            return False
        if host.end and host.worker in self.active:
            self.active.remove(host.worker)
        return not self.active
