"""Replacement of batches that lost all their samples; the reasons are in docs/design/0003-errors-of-user-code.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.error_policy import EpochFailures
from headrace._core.failure import Stage

CANDIDATES = 64  # delivered batches whose indices are kept, to be repeated
LOST_IN_A_ROW = 100  # batches; a stream is given up after as many failures


class Replacements:
    """Counts the batches of an epoch that lost all their samples, and plans replacements at its end.

    Of a map-style dataset one of the last batches that were delivered is planned again. Of a stream only the engine
    knows the samples: it begins the stream again.

    Args:
        repeat: makes a plan of the indices of an earlier one, or of a stream, of None.
        epoch: the counts of the epoch.
        stream: whether the dataset is a stream.

    Attributes:
        lost: batches of this epoch that lost all their samples.
    """

    def __init__(
        self, repeat: Callable[[Sequence[object] | None], BatchPlan], epoch: EpochFailures, *, stream: bool
    ) -> None:
        self._repeat = repeat
        self._epoch = epoch
        self._stream = stream
        self._candidates: deque[Sequence[object] | None] = deque(maxlen=1 if stream else CANDIDATES)
        self._owed = 0
        self._in_a_row = 0
        self._missing = 0  # lost batches whose replacements were not delivered
        self._repeated = 0  # plans of replacements that came back
        self.lost = 0

    @property
    def counts(self) -> tuple[int, int]:
        """Number of lost batches without a replacement so far, and of replacements that were planned and came back."""
        return self._missing, self._repeated

    def resume(self, missing: int, repeated: int, before: Callable[[], Sequence[Sequence[object]]]) -> None:
        """Continue from the counts of a restored epoch; `before` returns the indices of its last batches."""
        self._owed = self._missing = missing
        self._repeated = repeated
        if self._stream and self._epoch.delivered:
            self._candidates.append(None)
        self._candidates.extend(before())

    def on_batch(self, host: HostBatch) -> None:
        """Count a batch, whatever becomes of it."""
        self._repeated += host.plan.repeat

    def on_delivered(self, host: HostBatch) -> None:
        """Record a batch that is delivered."""
        self._missing -= host.plan.repeat
        self._in_a_row = 0
        if host.size:  # a batch sampler may ask for a batch of no samples
            self._candidates.append(None if self._stream else host.plan.indices)

    def on_skipped(self, host: HostBatch) -> bool:
        """Note a batch of which samples are skipped; returns whether it lost all of them.

        Raises:
            TooManySkippedError: so did all of the last 100 batches.
        """
        if not host.empty:
            return False
        if self._stream and all(failure.stage is Stage.FETCH for failure in host.failures):
            self.on_end(host.plan)  # a batch continues after unreadable samples: it is empty at the stream's end only
            return False
        self.lost += 1
        self._owed += 1
        self._missing += not host.plan.repeat
        self._in_a_row += 1
        if self._in_a_row >= LOST_IN_A_ROW:
            self._in_a_row = 0
            raise self._epoch.error(f"each of the last {LOST_IN_A_ROW} batches lost all its samples")
        return True

    def on_end(self, plan: BatchPlan) -> None:
        """Record that the stream had no samples left for `plan`."""
        if plan.repeat:
            self._owed += 1
            self._candidates.clear()

    def plan(self) -> BatchPlan | None:
        """A plan in place of a lost batch; None if none was lost, or if there is nothing to repeat."""
        if not (self._owed and self._candidates):
            return None
        self._owed -= 1
        # It is a candidate again once it is delivered; so a batch that fails each time is not planned for ever.
        return self._repeat(self._candidates[0] if self._stream else self._candidates.popleft())

    def check(self) -> None:
        """Called at the end of the epoch.

        Raises:
            TooManySkippedError: nothing was delivered and something was skipped, or a lost batch was not replaced.
        """
        if not (self._epoch.examples or self._owed):
            return
        if not self._epoch.delivered and self._epoch.examples:
            raise self._epoch.error("every sample failed, and no batch could be delivered")
        if self._owed:
            raise self._epoch.error(
                f"{self._owed} batches lost all their samples, and nothing could be delivered in their place, "
                f"so that this process has fewer batches than were planned"
            )
