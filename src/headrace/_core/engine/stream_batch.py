"""Batches that are filled from a stream, sync or async, and the progress of reading it."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace._core.batches import BatchPlan, RawBatch
from headrace._core.error_policy import Tolerance
from headrace._core.failure import Failure, Stage
from headrace._core.streams.operators import Pipe
from headrace._core.streams.resumable import State, expect_int
from headrace.errors import StateError

Catch = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(slots=True)
class Progress:
    """The progress of reading a stream.

    Attributes:
        position: samples and failures so far.
        failures_in_a_row: failures since the last sample.
        ended: whether the stream has ended.
        lost: whether the position could not be restored.
        repeats: whether it was started again for plans that repeat.
        drawn: of a lane, the number of samples that its batches were planned with; None of any other stream.
        delivered: samples to be dropped, as ranges of their positions, ascending; those passed are removed.
    """

    position: int = 0
    failures_in_a_row: int = 0
    ended: bool = False
    lost: bool = False
    repeats: bool = False
    drawn: int | None = None
    delivered: list[range] = field(default_factory=list)

    @classmethod
    def restored(cls, state: Mapping[str, object], delivered: Sequence[range] = ()) -> Progress:
        """The progress that a state was saved at.

        Raises:
            StateError: the state is damaged.
        """
        return cls(
            expect_int(state, "position"),
            ended=state.get("ended") is True,
            repeats=state.get("repeats") is True,
            drawn=expect_int(state, "drawn") if "drawn" in state else None,
            delivered=list(delivered),
        )

    def state_dict(self, stream: State) -> State:
        state: State = {"position": self.position, "stream": stream}
        if self.ended:
            state["ended"] = True
        if self.repeats:
            state["repeats"] = True
        if self.drawn is not None:
            state["drawn"] = self.drawn
        return state

    def next_is_delivered(self) -> bool:
        """Whether the next sample was delivered before."""
        while self.delivered and self.delivered[0].stop <= self.position:
            del self.delivered[0]
        return bool(self.delivered) and self.position in self.delivered[0]


class StreamBatch:
    """A batch that is filled from a stream, sync or async.

    Args:
        plan: the batch's plan.
        progress: the stream's progress, shared by its batches.
        tolerance: whether the batch is filled up after a failure; otherwise the next batch begins there, as in torch.
    """

    def __init__(self, plan: BatchPlan, progress: Progress, tolerance: Tolerance) -> None:
        self._began = time.perf_counter()
        self._plan = plan
        self._progress = progress
        self._tolerance = tolerance
        self._broken = False
        self._samples: list[Any] = []
        self._failures = 0
        self._first = progress.position
        self._places: list[int] | None = [] if progress.delivered else None  # positions; None for consecutive ones

    @property
    def room(self) -> int:
        """The number of samples that are still to be read."""
        return 0 if self._progress.ended or self._broken else self._missing

    @property
    def _missing(self) -> int:
        return len(self._plan.indices) - len(self._samples) + self._failures

    def add(self, sample: Any) -> bool:
        """Add the stream's next sample; returns False if it was delivered before, and is dropped."""
        progress = self._progress
        is_new = self._places is None or not progress.next_is_delivered()
        if is_new:
            self._samples.append(sample)
            if self._places is not None:
                self._places.append(progress.position)
        progress.position += 1
        progress.failures_in_a_row = 0
        return is_new

    def fail(self, error: BaseException) -> None:
        """Add an error in place of the next sample; the stream ends if it only raises errors."""
        if isinstance(error, StateError):
            self.fail_restoring(error)
            return
        progress = self._progress
        in_a_row = progress.failures_in_a_row + 1
        unskippable = None
        if in_a_row >= self._tolerance.max_in_a_row:  # an iterator that always raises would be read for ever
            unskippable = f"{in_a_row} failures in a row"
        if self._tolerance.skips and _ended_a_generator(error):  # skipping it would skip all samples after it
            unskippable = "the error ended the stream, samples after it are missing"
        failure = Failure.caught(error, stage=Stage.FETCH, batch=self._plan.number, index=progress.position)
        self._add_failure(replace(failure, unskippable=unskippable))
        progress.failures_in_a_row = in_a_row
        progress.ended |= unskippable is not None

    def fail_restoring(self, error: BaseException) -> None:
        """Add an error of restoring the stream's position, which ends it."""
        self._progress.ended = self._progress.lost = True
        self._add_failure(Failure.caught(error, stage=Stage.RESTORE, batch=self._plan.number))

    def _add_failure(self, failure: Failure) -> None:
        if self.add(failure):
            self._failures += 1
            self._broken = not self._tolerance.skips

    def raw(self, stream: Callable[[], State] | None, *, drop_last: bool, catch: Catch = BaseException) -> RawBatch:
        """The batch, with the state of the stream; with `drop_last`, only the failures of an incomplete one.

        Args:
            stream: returns the state of the iterator; None if there is none.
            drop_last: whether an incomplete batch is dropped.
            catch: what is caught from `stream`, and is the batch's failure.
        """
        progress, samples, positions = self._progress, self._samples, self._plan.positions
        places = range(self._first, progress.position) if self._places is None else self._places
        if drop_last and self._missing:
            failed = [slot for slot in zip(places, samples, strict=True) if isinstance(slot[1], Failure)]
            places, samples = [place for place, _ in failed], [failure for _, failure in failed]
        if isinstance(places, range):
            positions = positions[places.start : places.stop]
        else:
            positions = [positions[place] for place in places]
        plan = self._plan._replace(indices=tuple(places), positions=positions)
        state: State | None = None
        try:
            if stream is not None and not progress.lost:
                state = progress.state_dict(stream())
        except catch as error:
            return without_state(RawBatch(plan, samples, progress.ended), error)
        return RawBatch(plan, samples, progress.ended, stream_state=state, began=self._began)


def without_state(raw: RawBatch, error: BaseException) -> RawBatch:
    failure = Failure.caught(error, stage=Stage.SAVE_STATE, batch=raw.plan.number)
    return raw._replace(samples=[failure], whole=False)


def _ended_a_generator(error: BaseException) -> bool:
    """Whether `error` came out of a generator function of the user's, which gives nothing more then.

    It is found by the first frame outside of headrace that the error passed through. A generator further inside may
    have served a single sample. `pipe` calls its function again.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(frame.f_locals.get("self"), Pipe):
            return False
        if frame.f_globals.get("__name__", "").partition(".")[0] != "headrace":
            return bool(frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR))
    return False
