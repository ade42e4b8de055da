"""The batches of an epoch that were given out, and the state after each of the last few."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from headrace._core.batches import BatchPlan, HostBatch, StreamState, load_state
from headrace._core.order.order import EpochOrder
from headrace._core.order.state import LoaderState, checksum, encoded
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.streams.resumable import State, state_of_dataset

KEPT_POINTS = 9  # after each of the last 8 batches, and before them


class _Drawn(NamedTuple):
    """A plan whose batch was given out after a gap.

    Attributes:
        plan: the plan.
        first: number of the samples drawn before it.
        after: number of samples drawn with it.
        sampler: the state of the user's sampler after it.
        stream: the state of the loader's stream after it.
        positions: first and last position of its samples in the stream.
    """

    plan: BatchPlan
    first: int
    after: int
    sampler: object
    stream: StreamState | None
    positions: tuple[int, ...]


# A plan, the number of samples drawn before it and with it, and the state of the user's sampler after it. Plain tuples,
# as one is made for each batch; the plan is None before the first.
_DrawnFields: TypeAlias = tuple[BatchPlan | None, int, int, object]


class _Point(NamedTuple):
    """The position after a batch.

    Attributes:
        batches: number of the epoch's batches that were given out without a gap.
        drawn: the plan of the last of them, with what was drawn for them.
        stream: the state of the loader's stream after them.
        workers: the state of each worker's stream.
        last_worker: the worker of the last batch.
        delivered: batches given out after the gap.
        skipped: counts of `on_error`.
    """

    batches: int
    drawn: _DrawnFields
    stream: StreamState | None
    workers: Mapping[int, StreamState]
    last_worker: int
    delivered: tuple[_Drawn, ...]
    skipped: tuple[int, ...]

    def streams(self) -> dict[int | None, Mapping[str, object]]:
        """The states by their reader; None is the loader's."""
        states: dict[int | None, Mapping[str, object]] = {}
        for worker, state in self.workers.items():
            states[worker] = load_state(state)
        if self.stream is not None:
            states[None] = load_state(self.stream)
        return states


_PointFields: TypeAlias = tuple[
    int,
    _DrawnFields,
    StreamState | None,
    Mapping[int, StreamState],
    int,
    tuple[_Drawn, ...],
    tuple[int, ...],
]


class EpochProgress:
    """Follows one epoch's plans from the sampler to the consumer.

    Args:
        begun: the state at the beginning: of the whole epoch, or the one restored.
        order: draws the indices.
        streams: the states of the streams that are read on from, their samples numbered as by the session.
        origin: the cursor before the planner's sample 0.
        ranks: the number of ranks that share the order; 1 where each has its own.
        workers: number of workers that each read a copy of the dataset, or of lanes; 0 where there are none.
        rank: of this process.
        of_rank: whether the state is of this rank alone; otherwise it depends on the order.
        keeps_dataset: whether a dataset with a state of its own is used for the next epoch too.
        before_first: returns the state of the dataset, or of its iterator, before the first batch; None if unknown.

    Attributes:
        over: whether the epoch has ended, which is a call of `next()` too.
    """

    def __init__(
        self,
        begun: LoaderState,
        order: EpochOrder,
        *,
        streams: Mapping[int | None, Mapping[str, object]],
        origin: int,
        ranks: int,
        workers: int,
        rank: RankInfo,
        of_rank: bool,
        keeps_dataset: bool,
        before_first: Callable[[], State | None],
    ) -> None:
        self._begun = begun
        self._order = order
        self._origin = origin
        self._ranks = ranks
        self._workers = workers
        self._rank, self._of_rank = rank, of_rank
        self._keeps_dataset = keeps_dataset
        self._before_first: Callable[[], State | None] | None = before_first
        self._drawn: dict[int, _DrawnFields] = {}  # plans that were not given out
        self._beyond: dict[int, _Drawn] = {}  # those given out after a gap
        self._samples = order.first_sample
        begun_streams = dict(streams)
        self._last: _PointFields = _Point(
            batches=begun.batches,
            drawn=(None, order.first_sample, order.first_sample, begun.sampler),
            stream=begun_streams.pop(None, None),
            workers={worker: state for worker, state in begun_streams.items() if worker is not None},
            last_worker=begun.next_worker - 1,
            delivered=(),
            skipped=begun.skipped,
        )
        self._points: deque[_PointFields] = deque([self._last], maxlen=KEPT_POINTS)
        self.over = False
        self._next = begun.batches  # number of the next plan
        self._most: int | None = None  # number of plans in the epoch, once the sampler has ended
        self._sampler_at_end: object = None  # its state then, which may be another one than after the last plan

    @property
    def last_point(self) -> object:
        """The position after the last batch that was given out: another object after each."""
        return self._points[-1]

    def on_plan(self, plan: BatchPlan, samples: int) -> None:
        """Record a plan; `samples` have been drawn with it."""
        state = self._order.user_sampler.after_draw()
        self._drawn[plan.number] = plan, self._samples, samples, state
        self._samples = samples
        self._next = plan.number + 1
        if state is not None and self._order.is_partial(plan.indices):
            self.on_exhausted()  # as the sampler's state says already, though its end has not been asked for

    def on_exhausted(self) -> None:
        """Record that the sampler has nothing more."""
        self._most = self._next
        self._sampler_at_end = self._order.user_sampler.after_draw()

    def batches_before(self) -> Sequence[Sequence[object]]:
        """The indices of the last batches before a restored state, as far as they are known."""
        return self._order.batches_before()

    @property
    def skipped(self) -> tuple[int, ...]:
        """The counts of `on_error` after the last batch."""
        return self._last[-1]

    def on_batch(self, host: HostBatch, skipped: tuple[int, ...], *, given: bool) -> None:
        """Record a batch.

        Args:
            host: the batch.
            skipped: the counts of `on_error` after it.
            given: whether `next()` returns it or raises its error; otherwise it is skipped.
        """
        self._before_first = None
        plan, _, _, _, _, _, _, worker, state, _, _ = host
        number = plan.number
        drawn = self._drawn.pop(number)
        batches, _, stream, workers, last_worker, _, _ = self._last
        if number == batches and worker is None and not self._beyond and not plan.repeat:
            self._last = number + 1, drawn, stream if state is None else state, workers, last_worker, (), skipped
        else:
            self._last = self._after(host, drawn, skipped)
        if given:
            self._points.append(self._last)

    def _after(self, host: HostBatch, drawn: _DrawnFields, skipped: tuple[int, ...]) -> _PointFields:
        """The position after a batch of any kind."""
        batches, last_drawn, stream, workers, last_worker, _, _ = self._last
        number, state = host.plan.number, host.stream_state
        if host.worker is not None:
            last_worker = host.worker
            if state is not None:
                workers, state = {**workers, host.worker: state}, None
        plan, first, after, sampler = drawn
        assert plan is not None
        if number != batches:
            read: Any = host.plan.indices
            positions = (read[0], read[-1]) if state is not None and read else ()
            self._beyond[number] = _Drawn(plan, first, after, sampler, state, positions)
        else:
            while True:
                batches, stream = batches + 1, stream if state is None else state
                if plan.repeat:  # of a batch around others that were given out before they have gaps
                    last_plan, before, with_it, _ = last_drawn
                    last_drawn = last_plan, after - (with_it - before), after, sampler
                else:
                    last_drawn = plan, first, after, sampler
                if batches not in self._beyond:
                    break
                plan, first, after, sampler, state, _ = self._beyond.pop(batches)
        delivered = tuple(self._beyond[each] for each in sorted(self._beyond)) if self._beyond else ()
        return batches, last_drawn, stream, workers, last_worker, delivered, skipped

    @property
    def kept_streams(self) -> dict[int | None, Mapping[str, object]]:
        """The states of a user's dataset, by its reader, for the next epoch; none while this one is not over."""
        if not (self.over and self._keeps_dataset):
            return {}
        kept = {reader: state_of_dataset(state) for reader, state in _Point(*self._last).streams().items()}
        return {reader: state for reader, state in kept.items() if state is not None}

    def next_state(self, fresh: LoaderState) -> LoaderState:
        """The state before the next epoch: `fresh`, with the states of a user's dataset."""
        kept = self.kept_streams
        rank = self._rank.rank if kept and self._of_rank else None
        return fresh._replace(streams=kept, rank=rank, ranks=self._rank.world_size)

    def state(self, lag: int = 0) -> LoaderState:
        """The state after the last call of `next()` (not one that ended the epoch), or `lag` calls before.

        Raises:
            ValueError: that point is no longer known.
        """
        back = lag - self.over
        if not 0 <= back < len(self._points):
            most = len(self._points) - 1 + self.over
            raise ValueError(f"lag={lag} must be {int(self.over)} to {most}: other states are not kept")
        point, order = _Point(*self._points[-1 - back]), self._order
        size = self._begun.fingerprint.length
        plan, first, samples, sampler = point.drawn
        cursor = self._origin + samples * self._ranks
        checked = None
        if plan is not None and order.checks_indices:
            indices = plan.indices if samples - first == len(plan.indices) else ()
            checked = (*checksum(indices), self._rank.rank)
        earlier = self._delivered_before(point)
        of_rank = (
            self._of_rank or bool(point.delivered or earlier) or (order.is_of_one_rank and self._rank.world_size > 1)
        )
        streams = point.streams()
        if not streams and self._before_first is not None and (before := self._before_first()) is not None:
            streams[None] = before
        over = self._begun.over or (self._most is not None and point.batches >= self._most)
        if size is not None and self._ranks > 1:
            cursor = size if over else min(cursor, size)  # ranks may have unequal last batches
        return self._begun._replace(
            cursor=cursor,
            samples=samples,
            batches=self._number_in_epoch(point.batches),
            over=over,
            rank=self._rank.rank if of_rank else None,
            ranks=self._rank.world_size,
            order_seed=order.order_seed,
            generator=encoded(order.generator),
            sampler=self._sampler_at_end if over and not self._begun.over else sampler,
            last_indices=self._begun.last_indices if checked is None else checked,
            streams=streams,
            # What they were restored from; a lane that has given no batch begins there.
            merged=self._begun.merged if len(streams) < (self._begun.lanes or 1) else (),
            next_worker=(point.last_worker + 1) % (self._workers or 1),
            delivered=(*earlier, *self._delivered_since(point)),
            skipped=point.skipped,
        )

    def _delivered_before(self, point: _Point) -> list[tuple[int, ...]]:
        """Batches that were given out before the state that this epoch was restored from, and after the point.

        Their samples are numbered as in this epoch.
        """
        shift = self._begun.samples - self._order.first_sample
        position: Any = 0 if point.stream is None else load_state(point.stream).get("position", 0)
        return [
            (number, first - shift, count, *positions)
            for number, first, count, *positions in self._begun.delivered
            if (positions[1] >= position if positions else first - shift + count > point.drawn[2])
        ]

    def _delivered_since(self, point: _Point) -> list[tuple[int, ...]]:
        """Batches that were given out after a gap, in this epoch."""
        return [
            (self._number_in_epoch(each.plan.number), each.first, each.after - each.first, *each.positions)
            for each in point.delivered
        ]

    def _number_in_epoch(self, number: int) -> int:
        """The number of a batch among all of the epoch: plans are numbered without those that were given out before."""
        for earlier in sorted(each[0] for each in self._begun.delivered):
            number += earlier <= number
        return number
