"""Progress of an epoch: plans, deliveries, states.

Batches are planned without I/O and followed to the consumer. The states after the last few batches
are kept.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace._base.array_types import COMPUTED_INDICES
from headrace._order.order import EpochOrder
from headrace._order.state import Given, LoaderState, Losses, drawn_last, encoded
from headrace._random.seeding import batch_seed, random_key
from headrace._ranks.rankinfo import RankInfo
from headrace._records.batches import (
    BatchPlan,
    HostBatch,
    SessionStart,
    StreamState,
    load_state,
)
from headrace._records.failure import interrupted
from headrace._streams.resumable import State, state_of_dataset

# The positions after the last 8 batches, and the position before these batches.
KEPT_POINTS = 9


class _Drawn(NamedTuple):
    """Draws of the sampler up to a plan."""

    plan: BatchPlan | None  # None before the first plan
    before: int  # number of samples drawn before the plan
    samples: int  # number of samples drawn, with the plan's samples
    sampler: object  # state of the user's sampler after the plan


class _Point(NamedTuple):
    """Position after a batch."""

    batches: int  # number of the epoch's batches that were given out without a gap
    drawn: _Drawn  # draws up to the last of the batches before a gap
    # Stream states by worker; None for the loader.
    streams: Mapping[int | None, StreamState]
    last_worker: int  # worker of the last batch
    beyond: Mapping[int, _Drawn]  # batches given out after a gap, by number
    losses: Losses

    def loaded_streams(self) -> dict[int | None, Mapping[str, object]]:
        return {reader: load_state(state) for reader, state in self.streams.items()}


class EpochProgress(Iterator[BatchPlan]):
    """Draws the plans of an epoch, and follows the plans to the consumer.

    Attributes:
        begun: the state at the beginning of the whole epoch, or the restored state.
        rank: the rank of this process.
        base_seed: the seed from which the batches' seeds are derived.
        draws: iterator over the sampler's draws.
        session_start: where the epoch begins in the engine.
        before_first: function that returns the dataset's state before the first batch, if torch
            reads in the caller's thread. None otherwise, and after the first batch.
    """

    def __init__(
        self,
        begun: LoaderState,
        order: EpochOrder,
        draws: Iterator[Any],  # draws of the loader's sampler, from `begun` on
        base_seed: int,
        rank: RankInfo,
        *,
        restored: bool,  # whether the dataset has to be restored to `begun`
        # Whether the sampler gives sequences of indices, not single indices.
        batched: bool,
        readers: int,  # workers that each read a copy of the dataset; 1 without workers
        # Whether the state is always this rank's; else depends on the order.
        per_rank: bool,
        # Whether the next epoch uses the dataset and the dataset's own state.
        keeps_dataset: bool,
    ) -> None:
        self.begun, self.rank, self.base_seed, self.draws = begun, rank, base_seed, draws
        self._order = order
        self._batched = batched
        self._readers = readers
        self._per_rank = per_rank
        self._keeps_dataset = keeps_dataset
        self.before_first: Callable[[], State | None] | None = None
        # Number of the last batch that was taken; set by the consumer. Out of order: the number of
        # batches taken, less 1.
        self.taken = begun.batches - 1
        self.over = False  # whether a call of `next()` has ended the epoch
        first = order.first_sample
        self._part = part = order.rank_of(rank)
        # Cursor before sample 0, and number of ranks that share the order.
        self._origin, self._ranks = 0, 1
        # Number of consecutive positions of this rank before the next rank's turn.
        self._block = 1
        if order.shared:
            self._origin, self._ranks, self._block = (
                begun.cursor,
                part.world_size,
                order.sampler.dealt_at_once,
            )
        self.session_start = SessionStart(
            batch=begun.batches,
            streams=begun.streams if restored else {},
            next_worker=begun.next_worker,
            epoch=begun.epoch,
        )
        self._random_key = random_key(base_seed, begun.epoch)
        self._drawn: dict[int, _Drawn] = {}  # plans not given out yet
        self._samples = first
        # Batches given out before the restored state, after batches not given out: number of
        # samples by the number of the first sample.
        self._delivered = {
            first + given.first: given.samples for given in begun.delivered
        }
        drawn = _Drawn(None, first, first, begun.sampler)
        losses = Losses(begun.skipped, begun.lost)
        self._last = _Point(
            begun.batches, drawn, begun.streams, begun.next_worker - 1, {}, losses
        )
        self._points = deque([self._last], maxlen=KEPT_POINTS)
        # The last batch given out: the plan, and the indices of failures. A failure itself would
        # keep the frames of its error.
        self._given: tuple[BatchPlan, list[object]]
        self._number = begun.batches  # number of the next plan
        # Draw of the plan after the next plan, if the order is computed.
        self._drawn_ahead: list[Any] = []
        self._interruption: str | None = None  # of the last draw, as by Ctrl-C
        # Number of plans in the epoch, once the sampler has ended.
        self._most: int | None = None
        # State of the sampler at the sampler's end. May differ from the state after the last plan.
        self._sampler_at_end: object = None

    @property
    def last_point(self) -> object:
        """Position after the last batch given out: a new object for each batch."""
        return self._points[-1]

    def __next__(self) -> BatchPlan:
        order, number, ahead = self._order, self._number, self._drawn_ahead
        # In a computed order, the following draw is drawn too, so that the end is known in time.
        wanted = 2 if order.is_by_arithmetic else 1
        while True:
            missing = wanted - len(ahead)
            if missing:
                self._draw(missing)
            if not ahead:
                self._on_exhausted()
                raise StopIteration
            given = None if order.is_stream else self._delivered.get(self._samples)
            if not given:
                break
            self._samples += given
            del ahead[0]
        drawn = ahead[0]
        indices: Sequence[object] = (drawn,)
        if self._batched:
            indices = drawn if isinstance(drawn, COMPUTED_INDICES) else tuple(drawn)
        before = self._samples
        samples = before + (order.samples_at_most or len(indices))
        first, count = order.span(before, len(indices))
        plan = BatchPlan(
            number=number,
            indices=indices,
            seed=batch_seed(self.base_seed, self.begun.epoch, self._position(before)),
            epoch=self.begun.epoch,
            positions=self._positions(first, count),
            random_key=self._random_key,
            planned=time.perf_counter(),
            taken=self.taken,
        )
        state = order.sampler_state()
        planned = _Drawn(plan, before, samples, state)
        # Python handles a signal only at a call. So Ctrl-C finds all four, or none.
        self._number = number + 1
        self._samples = samples
        self._drawn[number] = planned
        del ahead[0]
        # A short batch is the last batch: the sampler's state is the state at the end already.
        ended = (
            order.continues_sampler
            and order.sampler is not None
            and len(indices) < (order.batch_size or 1)
        )
        if ended or (order.is_by_arithmetic and not ahead):
            self._on_exhausted()
        return plan

    def _draw(self, missing: int) -> None:
        ahead, before = self._drawn_ahead, len(self._drawn_ahead)
        try:
            # No Python code runs between the draw and the list: Ctrl-C loses no draw.
            ahead.extend(itertools.islice(self.draws, missing))
        except Exception:
            raise
        except BaseException as error:
            self._interruption = repr(error)
            raise
        if self._interruption is not None:
            if len(ahead) == before:  # Ctrl-C ends a generator, as if nothing were left
                raise interrupted(self._interruption)
            self._interruption = None

    def _position(self, number: int) -> int:
        """Return the position of this rank's sample among the samples of all ranks."""
        rounds, inside = divmod(number, self._block)
        part = self._part
        return (
            self._origin + (rounds * part.world_size + part.rank) * self._block + inside
        )

    def _positions(self, first: int, count: int) -> Sequence[int]:
        start, stride = self._position(first), self._part.world_size
        if self._block == 1:
            return range(start, start + count * stride, stride)
        return [self._position(number) for number in range(first, first + count)]

    def _on_exhausted(self) -> None:
        self._most = self._number
        self._sampler_at_end = self._order.sampler_state(ended=True)

    def on_batch(self, host: HostBatch, losses: Losses, *, given: bool) -> None:
        """Record a batch.

        If the batch is `given`, `next()` returns the batch or raises the batch's error. Otherwise
        the batch is skipped.
        """
        self.before_first = None
        number = host.plan.number
        drawn = self._drawn.get(number)
        if drawn is not None:
            # Otherwise a call of `next()` that Ctrl-C interrupted recorded it.
            before = self._last
            batches, last, streams = before.batches, before.drawn, before.streams
            last_worker = before.last_worker if host.worker is None else host.worker
            if host.stream_state is not None:  # batches of a reader come in order
                streams = {**streams, host.worker: host.stream_state}
            beyond = {**before.beyond, number: drawn}
            while batches in beyond:
                last = beyond.pop(batches)
                batches += 1
            point = _Point(batches, last, streams, last_worker, beyond, losses)
            # Python handles a signal only at a call. So Ctrl-C finds both, or none.
            self._last = point
            del self._drawn[number]
        if given:
            self._given = host.plan, [failure.index for failure in host.failures]
            if self._points[-1] is not self._last:
                self._points.append(self._last)

    def given_indices(self) -> list[object]:
        """Return the indices of the samples in the last batch that was given out."""
        plan, failed = self._given
        indices = list(plan.indices)
        for index in failed:
            if index in indices:
                indices.remove(index)
        return indices

    def next_state(self, fresh: LoaderState) -> LoaderState:
        """Return the state before the next epoch.

        The state is `fresh` with the lost batches and the states of a user's dataset.
        """
        kept: dict[int | None, Mapping[str, object]] = {}
        if self.over and self._keeps_dataset:
            for reader, stream in self._last.loaded_streams().items():
                if (state := state_of_dataset(stream)) is not None:
                    kept[reader] = state
        part = self._part
        rank = part.rank if kept and self._per_rank else None
        return fresh._replace(
            streams=kept, rank=rank, ranks=part.world_size, lost=self._last.losses.lost
        )

    def state(self, lag: int = 0) -> LoaderState:
        """Return the state after the last call of `next()`, or `lag` calls before.

        A call that ended the epoch does not count.
        """
        back = lag - self.over
        if not 0 <= back < len(self._points):
            most = len(self._points) - 1 + self.over
            raise ValueError(
                f"lag={lag} must be {int(self.over)} to {most}: other states are not kept"
            )
        point, order = self._points[-1 - back], self._order
        size = self.begun.fingerprint.length
        plan, samples = point.drawn.plan, point.drawn.samples
        cursor = self._origin + samples * self._ranks
        sampler = point.drawn.sampler
        # The program may have changed the sampler since the batch was drawn.
        if plan is not None and point is self._last and not self._drawn:
            sampler = order.sampler_state()
        checked = None
        if plan is not None and order.is_walked and not order.continues_sampler:
            checked = drawn_last(plan.indices, self._part.rank)
        earlier = [
            Given(first - samples, count)
            for first, count in self._delivered.items()
            if first + count > samples
        ]
        delivered = earlier + [
            Given(drawn.before - samples, drawn.samples - drawn.before)
            for _, drawn in sorted(point.beyond.items())
        ]
        of_one_rank = order.is_of_one_rank and self._part.world_size > 1
        is_per_rank = self._per_rank or bool(delivered) or of_one_rank
        streams = point.loaded_streams()
        if self.before_first is not None and (unread := self.before_first()) is not None:
            streams[None] = unread
        # An epoch without a batch ends with the call of `next()` that finds no batch.
        over = self.begun.over or (
            self._most is not None and point.batches >= self._most > 0
        )
        if size is not None and self._ranks > 1:
            # Ranks may have unequal last batches.
            cursor = size if over else min(cursor, size)
        return self.begun._replace(
            cursor=cursor,
            # Batches after these `batches` may be in `delivered`.
            batches=point.batches + len(self._delivered) - len(earlier),
            over=over,
            rank=self._part.rank if is_per_rank else None,
            ranks=self._part.world_size,
            generator=encoded(order.generator),
            sampler=self._sampler_at_end if over and not self.begun.over else sampler,
            last_draw=self.begun.last_draw if checked is None else checked,
            streams=streams,
            next_worker=(point.last_worker + 1) % self._readers,
            delivered=tuple(delivered),
            skipped=point.losses.skipped,
            lost=point.losses.lost,
        )
