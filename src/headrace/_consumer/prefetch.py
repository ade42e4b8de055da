"""The look-ahead: plans drawn from the sampler and sent ahead.

Plans are drawn on the consumer's thread, and sent in groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace._engine.look_ahead import QUICK, LookAheadSize
from headrace._records.batches import BatchPlan, HostBatch
from headrace._records.failure import Failure, Stage, interrupted
from headrace._transport.pickling import PickledPayload

# Number of plans to send singly after a wait: initial number, and maximum.
# Waking the engine costs 8 µs in a thread, and 20 to 90 µs in a process
# (benchmarks/next_latency.py), and only pays if the engine idles.
PROMPT, MOST_PROMPT = 8, 1 << 10
CALM = 64  # minimum number of batches without a stall before the look-ahead is reduced
# Bytes in the look-ahead of a stream. Up to this size, a stall doubles the look-ahead, because each
# stall costs two wake-ups.
SMALL = 1 << 20
# The same for workers with a torch dataset, if a batch takes less than `QUICK`.
SMALL_IN_WORKERS = 1 << 24


@dataclass(slots=True, eq=False)
class Prefetcher:
    """Draws plans from the sampler, and sends them ahead.

    The look-ahead is the number of batches under way or ready. While a third of the look-ahead (and
    at least two batches) is ready, plans are held back, and later sent as a group.

    The sampler may draw random numbers from a generator of the training loop. The numbers must not
    depend on the speed of the sampler or of the training loop. Therefore, after the first `free`
    plans and with `by_size`, a plan is drawn at each batch, even if plans are held back. After the
    first `free` plans, no more plans are outstanding than the least look-ahead.

    After a stall of the consumer, each plan is sent at once for a number of batches. The number
    doubles at each stall.

    The look-ahead is extended after a wait of the consumer for fetches, if fetchers were unused: by
    the number of batches for the unused fetchers. The look-ahead of small batches, from a stream or
    from quick workers, is doubled. The look-ahead is reduced after many batches without a wait:
    twice the look-ahead, and at least `CALM`. With `by_size`, only the bytes of batches decide.

    Attributes:
        planned: Number of plans drawn so far.
        held: Plans drawn and not sent.
        under_way: Plans sent, without an arrived batch, by number; oldest first.
        exhausted: Whether there is nothing more to plan.
        failure: The error of the sampler, to be raised after all earlier batches.
    """

    plans: Iterator[BatchPlan]  # runs the user's sampler
    admit: Callable[[list[BatchPlan]], None]  # sends plans to the engine
    ahead: LookAheadSize | None  # None: plan a single batch at a time
    # Plans always go in groups, to join requests, even after a stall. The size of a group, as a
    # share of the look-ahead. 0 for no groups.
    group: float = 0
    # Returns the group of blocks at a position. Plans of a group are sent together, so that a
    # single request reads a block.
    group_of: Callable[[int], int] | None = None
    free: float = math.inf  # number of plans that may be drawn at any time
    by_size: bool = False  # whether draws and the look-ahead must not depend on speed
    # Whether workers read a torch dataset. With an extended look-ahead, plans then go in groups.
    in_workers: bool = False
    held: list[BatchPlan] = field(default_factory=list)
    planned: int = 0
    under_way: dict[int, BatchPlan] = field(default_factory=dict)
    exhausted: bool = False
    failure: Failure | None = None
    _due: bool = True  # whether to send plans now
    _prompt: int = PROMPT
    _prompt_again: int = PROMPT
    _stalled: float | None = None  # start time of the consumer's wait for the next batch
    # Batches since the last stall or the last reduction of the look-ahead.
    _unstalled: int = 0

    def fill(self) -> None:
        """Draw plans until the look-ahead is full, and send due plans."""
        try:
            while not self.exhausted and self.outstanding < self._most():
                self._draw()
        finally:
            if (
                self.held
                and (self._due or not self.under_way)
                and (count := self._complete())
            ):
                self._send(count)

    def _draw(self) -> None:
        drawn = len(self.held)
        try:
            # No Python code runs between the draw and the list: Ctrl-C loses no plan.
            self.held.extend(itertools.islice(self.plans, 1))
        except Exception as error:  # user code: the sampler
            self._fail(error)
        if len(self.held) > drawn:
            self.planned += 1
        else:
            self.exhausted = True

    def _send(self, count: int) -> None:
        drawn = self.held[:count]
        del self.held[:count]
        try:
            self.admit(drawn)
            self.under_way.update((plan.number, plan) for plan in drawn)
        except Exception as error:  # an index that cannot be pickled
            self._fail(error)
        except BaseException as error:
            self._fail(interrupted(repr(error)))
            raise

    def _fail(self, error: Exception) -> None:
        """Plan nothing more; the error is raised after the batches under way."""
        self.exhausted = True
        self.failure = Failure.caught(error, Stage.SAMPLING, self.planned)

    def _complete(self) -> int:
        """Return the number of held plans in complete groups.

        A group of blocks is complete when all plans of the group have been drawn.
        """
        held, group_of = self.held, self.group_of
        if group_of is None or self.exhausted or not self.under_way:
            return len(held)
        last = group_of(held[-1].positions[-1])
        return sum(group_of(plan.positions[0]) != last for plan in held)

    def _most(self) -> int:
        """Return the maximum number of outstanding plans before another draw."""
        if self.ahead is None:
            return 1
        return self.ahead.batches if self.planned < self.free else self.ahead.least

    @property
    def outstanding(self) -> int:
        """The number of plans without an arrived batch."""
        return len(self.under_way) + len(self.held)

    @property
    def oldest(self) -> BatchPlan:
        """The oldest plan under way."""
        return next(iter(self.under_way.values()))

    def on_batch(self, host: HostBatch, ready: int) -> bool:
        """Count an arrived batch, and return whether to call `fill` now.

        `ready` is the number of other arrived batches.
        """
        plan = self.under_way.pop(host.plan.number)
        if host.end:
            self.exhausted = True
        if self.ahead is None:
            return False
        self._resize(self.ahead, host, len(plan.indices))
        self._due = self._is_due(self.ahead, ready)
        return self._due or self.by_size or self.planned >= self.free

    def _resize(self, ahead: LookAheadSize, host: HostBatch, samples: int) -> None:
        """Extend or reduce the look-ahead after a batch of some samples."""
        times = host.times
        # Bytes in the look-ahead. Only for streams and workers, if known; otherwise 0.
        nbytes, small = times.nbytes, SMALL
        if self.in_workers:
            small = SMALL_IN_WORKERS
            if type(host.data) is PickledPayload:
                nbytes = host.data.nbytes
        nbytes = 0 if times.load.limit else ahead.batches * nbytes
        may_double = self.planned > CALM and 0 < 2 * nbytes <= small
        if nbytes > small:
            ahead.reduce()
        if self.by_size:
            self._stalled = None
            if may_double:
                ahead.extend(ahead.batches)
        elif self._stalled is not None:
            quick = self.in_workers and times.work_ended - times.work_began < QUICK
            arrived = times.work_ended if quick else times.fetched
            if arrived > self._stalled and not self.exhausted:
                ahead.extend(math.ceil(times.load.unused / max(1, samples)))
                if may_double:
                    ahead.extend(ahead.batches)
            self._stalled, self._unstalled = None, 0
        else:
            self._unstalled += 1
            if self._unstalled >= CALM and self._unstalled >= 2 * ahead.batches:
                self._unstalled = 0
                ahead.reduce()

    def _is_due(self, ahead: LookAheadSize, ready: int) -> bool:
        """Return whether to send the next plans now. `ready` is the number of arrived batches."""
        if self.group or (self.in_workers and ahead.batches > ahead.least):
            size = int((self.group or 0.5) * ahead.batches)
            return ahead.batches - len(self.under_way) >= max(1, size)
        if self._prompt:
            self._prompt -= 1
            return True
        return ready < 2 or ready < ahead.batches // 3

    def on_stall(self, now: float) -> None:
        """Note a wait of the consumer.

        The next plans are sent singly. `now` is the start of the wait, by the clock of
        `StageTimes`.
        """
        if self._stalled is None:
            self._stalled = now
        if not self._prompt:
            self._prompt_again = min(2 * self._prompt_again, MOST_PROMPT)
        self._prompt = self._prompt_again
