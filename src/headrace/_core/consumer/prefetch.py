"""The look-ahead: how many plans are out, drawn from the sampler on the consumer's thread and sent ahead in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headrace._core.batches import BatchPlan
from headrace._core.failure import Failure, Stage

# Batches for which plans are sent one by one after a wait: first, and at most. Waking the engine costs 8 µs where it is
# a thread and 20 to 90 µs where it is a process (benchmarks/next_latency.py), and only pays if it idles.
PROMPT, MOST_PROMPT = 8, 1 << 16
CALM = 64  # batches without a stall, sent in groups, after which that number is halved: a stall now and then is chance


class Prefetcher:
    """Draws plans and sends them ahead, so that `size` batches are under way or ready.

    While a third of the look-ahead (and at least two batches) is ready, plans are held back, and then sent as a group.
    After a stall of the consumer each plan is sent at once for a while: twice as long at each stall, and half as long
    again for every `CALM` batches without one.

    Args:
        plans: draws the plans; runs the user's sampler.
        admit: sends plans to the engine.
        size: how many batches may be outstanding; 0 to plan one batch at a time.
        together: whether plans are always sent in groups of half the look-ahead, also after a stall: the engine joins
            the requests of plans that arrive together.
        more: returns a plan after the sampler's last, or None.

    Attributes:
        planned: plans drawn so far.
        under_way: plans that were sent and whose batches have not arrived, by their numbers, oldest first.
        exhausted: whether nothing more is to be planned.
        failure: the sampler's error; raised after the batches before it.
    """

    def __init__(
        self,
        plans: Iterator[BatchPlan],
        admit: Callable[[Sequence[BatchPlan]], None],
        size: int,
        *,
        together: bool = False,
        more: Callable[[], BatchPlan | None] = lambda: None,
    ) -> None:
        self._plans = plans
        self._more = more
        self._admit = admit
        self._size = size
        self._ample = max(2, size // 3)
        self._group = max(1, size // 2) if together else 0
        self._prompt = self._prompt_again = PROMPT
        self._calm = 0  # batches sent in groups since the last stall, or since the last halving
        self.planned = 0
        self.under_way: dict[int, BatchPlan] = {}
        self.exhausted = False
        self.failure: Failure | None = None

    def fill(self) -> None:
        """Send plans until the look-ahead is full."""
        drawn: list[BatchPlan] = []
        try:
            while len(self.under_way) < (self._size or 1) and (plan := self._draw()) is not None:
                drawn.append(plan)
                self.planned += 1
                self.under_way[plan.number] = plan
        finally:  # plans drawn before a Ctrl-C in the sampler are not lost
            if drawn:
                self._admit(drawn)

    def _draw(self) -> BatchPlan | None:
        if not self.exhausted:
            try:
                return next(self._plans)
            except StopIteration:
                self.exhausted = True
            except Exception as error:  # user code: the sampler
                self.exhausted = True
                self.failure = Failure.caught(error, stage=Stage.SAMPLING, batch=self.planned)
        return self._more()

    @property
    def oldest(self) -> BatchPlan:
        """The oldest plan under way."""
        return next(iter(self.under_way.values()))

    @property
    def full(self) -> bool:
        """Whether as many plans are under way as may be, so that the last one shows which batches were taken."""
        return len(self.under_way) >= self._size

    def on_batch(self, number: int, *, end: bool) -> None:
        """Count a batch that arrived; with the stream's `end`, nothing more is planned."""
        del self.under_way[number]
        self.exhausted |= end

    def refill(self, ready: Callable[[], int]) -> None:
        """Fill the look-ahead again, now or later; called before the consumer computes.

        Args:
            ready: returns the number of batches that are ready.
        """
        if not self._size:
            return
        if self._group:
            if self._size - len(self.under_way) < self._group:
                return
        elif self._prompt:
            self._prompt -= 1
        else:
            self._calm += 1
            if self._calm == CALM:
                self._calm, self._prompt_again = 0, max(PROMPT, self._prompt_again // 2)
            if ready() >= self._ample:
                return
        self.fill()

    def on_stall(self) -> None:
        """Send the next plans one by one: the consumer had to wait."""
        if not self._prompt:
            self._prompt_again = min(2 * self._prompt_again, MOST_PROMPT)
        self._prompt, self._calm = self._prompt_again, 0
