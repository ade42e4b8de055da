"""The look-ahead: plans are drawn from the sampler on the consumer's thread, and sent ahead in groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace._core.batches import BatchPlan, StageTimes
from headrace._core.failure import Failure, Stage, interrupted
from headrace._core.look_ahead import QUICK, LookAheadSize

# Batches for which plans are sent one by one after a wait: first, and at most. Waking the engine
# costs 8 µs where it is a thread and 20 to 90 µs where it is a process
# (benchmarks/next_latency.py), and only pays if it idles.
PROMPT, MOST_PROMPT = 8, 1 << 10
CALM = 64  # batches without a stall, at least, after which the look-ahead is reduced
# bytes of the batches of a stream, up to which a stall doubles the look-ahead: each costs two
# wake-ups
SMALL = 1 << 20
# the same where workers read a torch dataset, each batch in less than `QUICK`
SMALL_IN_WORKERS = 1 << 24


@dataclass(slots=True, eq=False)
class Prefetcher:
    """Draws plans and sends them ahead, so that as many batches are under way or ready as the look-ahead says.

    While a third of the look-ahead (and at least two batches) is ready, plans are held back, and
    then sent as a group. After the first `free` plans, and with `by_size`, the sampler is still
    asked for one plan at each batch, and for no more than the least look-ahead: the sampler may
    draw random numbers from a generator that the training loop uses too, and these may not depend
    on the speed of either.

    After a stall of the consumer each plan is sent at once for a while: twice as long at each
    stall.

    The look-ahead is extended whenever the consumer waited for samples to be fetched, and fetches
    had nothing to begin: by the batches that they could begin; that of small batches, of a stream
    or of quick workers, is doubled. It is reduced after twice as many batches as it has, and `CALM`
    at least, without a wait. With `by_size` only the bytes of batches decide.

    Attributes:
        planned: plans drawn so far.
        held: plans that were drawn and not sent.
        under_way: plans that were sent and whose batches have not arrived, by their numbers, oldest
            first.
        exhausted: whether nothing more is to be planned.
        failure: the sampler's error; raised after the batches before it.
    """

    plans: Iterator[BatchPlan]  # runs the user's sampler
    admit: Callable[[list[BatchPlan]], None]  # sends plans to the engine
    ahead: LookAheadSize | None  # None to plan one batch at a time
    # Plans always go in groups of this part of the look-ahead, also after a stall, to join
    # requests. 0 for no groups.
    group: float = 0
    # The group of blocks at a position: plans of a group are sent together, so that a block is read
    # by one request.
    group_of: Callable[[int], int] | None = None
    free: float = math.inf  # number of plans that may be drawn at any time
    by_size: bool = False  # whether neither draws nor the look-ahead may depend on speed
    # Whether workers read a torch dataset: where the look-ahead is extended, plans go in groups
    # too.
    in_workers: bool = False
    held: list[BatchPlan] = field(default_factory=list)
    planned: int = 0
    under_way: dict[int, BatchPlan] = field(default_factory=dict)
    exhausted: bool = False
    failure: Failure | None = None
    _due: bool = True  # whether plans are sent now
    _prompt: int = PROMPT
    _prompt_again: int = PROMPT
    _stalled: float | None = None  # when the consumer began to wait for the next batch
    _unstalled: int = 0  # batches since the last stall, or since the look-ahead was last reduced

    def fill(self) -> None:
        """Draw plans until the look-ahead is full, and send those that are due."""
        try:
            while not self.exhausted and self.outstanding < self._most():
                self._draw()
        finally:
            if self.held and (self._due or not self.under_way) and (count := self._complete()):
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
            self._fail(interrupted(error))
            raise

    def _fail(self, error: Exception) -> None:
        """Plan nothing more; the error is raised after the batches under way."""
        self.exhausted = True
        self.failure = Failure.caught(error, Stage.SAMPLING, self.planned)

    def _complete(self) -> int:
        """The number of plans that were held and begin in groups of blocks of which all plans were drawn."""
        held, group_of = self.held, self.group_of
        if group_of is None or self.exhausted or not self.under_way:
            return len(held)
        last = group_of(held[-1].positions[-1])
        return sum(group_of(plan.positions[0]) != last for plan in held)

    def _most(self) -> int:
        """The most plans that may be outstanding when the next one is drawn."""
        if self.ahead is None:
            return 1
        return self.ahead.batches if self.planned < self.free else self.ahead.least

    @property
    def outstanding(self) -> int:
        """The number of plans whose batches have not arrived."""
        return len(self.under_way) + len(self.held)

    @property
    def oldest(self) -> BatchPlan:
        """The oldest plan under way."""
        return next(iter(self.under_way.values()))

    def on_batch(self, number: int, end: bool, times: StageTimes, ready: int, nbytes: int) -> bool:
        """Count a batch of `nbytes` that arrived; whether the look-ahead is to be filled now, by `fill`, or later.

        After the `end` of a stream nothing more is planned. `ready` other batches have arrived.
        """
        plan = self.under_way.pop(number)
        if end:
            self.exhausted = True
        ahead = self.ahead
        if ahead is None:
            return False
        small = SMALL_IN_WORKERS if self.in_workers else SMALL
        # of a stream, or of workers; 0 if unknown
        nbytes = 0 if times.load.limit else ahead.batches * nbytes
        if nbytes > small:
            ahead.reduce()
        if self.by_size:
            self._stalled = None
            if self.planned > CALM and 0 < 2 * nbytes <= small:
                ahead.extend(ahead.batches)
        elif self._stalled is not None:
            quick = self.in_workers and times.work_ended - times.work_began < QUICK
            arrived = times.work_ended if quick else times.fetched
            if arrived > self._stalled and not self.exhausted:
                ahead.extend(math.ceil(times.load.unused / max(1, len(plan.indices))))
                if self.planned > CALM and 0 < 2 * nbytes <= small:
                    ahead.extend(ahead.batches)
            self._stalled, self._unstalled = None, 0
        else:
            self._unstalled += 1
            if self._unstalled >= CALM and self._unstalled >= 2 * ahead.batches:
                self._unstalled = 0
                ahead.reduce()
        if self.group or (self.in_workers and ahead.batches > ahead.least):
            size = int((self.group or 0.5) * ahead.batches)
            self._due = ahead.batches - len(self.under_way) >= max(1, size)
        elif self._prompt:
            self._prompt -= 1
            self._due = True
        else:
            self._due = ready < 2 or ready < ahead.batches // 3
        return self._due or self.by_size or self.planned >= self.free

    def on_stall(self, now: float) -> None:
        """Send the next plans one by one: the consumer has to wait, since `now` by the clock of `StageTimes`."""
        if self._stalled is None:
            self._stalled = now
        if not self._prompt:
            self._prompt_again = min(2 * self._prompt_again, MOST_PROMPT)
        self._prompt = self._prompt_again
