"""Whose turn it is among the lanes of a stream, and where each lane's next batch begins."""

from __future__ import annotations

from collections import deque

from headrace._core.batches import HostBatch, SessionStart


class LaneTurns:
    """Gives each plan of a stream to one of its lanes, in turn.

    A lane that has ended is left out, once its end is known here. Until then its turns give empty batches, which are
    not delivered: so the order of those that are delivered depends on the lanes alone.

    Args:
        start: where the epoch begins, with the number of lanes.

    Example:
        >>> turns = LaneTurns(SessionStart(lanes=2))
        >>> [turns.take(8) for _ in range(3)]  # the lane, and the number of its samples that were planned before
        [(0, 0), (1, 0), (0, 8)]
    """

    def __init__(self, start: SessionStart) -> None:
        self.lanes = start.lanes
        ended = set(start.ended)
        self._last = (start.next_worker - 1) % start.lanes
        for lane, state in start.streams.items():
            assert lane is not None
            if state.get("repeats") is True:  # it had ended, and is read again in place of lost batches
                self._last = lane
                ended.add(lane)
            elif state.get("ended") is True:
                ended.add(lane)
        turns = ((start.next_worker + turn) % start.lanes for turn in range(start.lanes))
        self._active = deque(lane for lane in turns if lane not in ended)  # the next one first
        drawn = {lane: state.get("drawn", 0) for lane, state in start.streams.items()}
        self._drawn = [found if isinstance(found := drawn.get(lane, 0), int) else 0 for lane in range(start.lanes)]

    @property
    def left(self) -> bool:
        """Whether a lane is not known to have ended."""
        return bool(self._active)

    def take(self, samples: int) -> tuple[int, int]:
        """The lane whose turn it is, and the number of its samples that were planned before; `samples` are now."""
        lane = self._active[0]
        self._active.rotate(-1)
        first = self._drawn[lane]
        self._drawn[lane] += samples
        return lane, first

    @property
    def repeating(self) -> int:
        """The lane that is read again in place of lost batches: the one that gave the last batch."""
        return self._last

    def on_batch(self, host: HostBatch) -> bool:
        """Note a batch that arrived; whether it was the end of the last lane."""
        if host.worker is None:  # it failed before its lane was read
            return False
        if not host.empty:
            self._last = host.worker
        if host.end and host.worker in self._active:
            self._active.remove(host.worker)
        return not self._active
