"""Application of steps to samples that are not yet in a batch, by a session's executor and in a worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from headrace._core.engine.assemble import CONSUMER_CATCH, Catch
from headrace._core.messages import Call
from headrace._core.randomized import CurrentSample, current_sample
from headrace._core.ranks.distributed import undivided
from headrace._core.seeding import TransformGenerators, batch_seed, seed_everything
from headrace._core.streams.operation import NOTHING
from headrace._core.streams.resumable import spawn_key
from headrace._core.streams.steps import Compute, Raised, RunSteps, Step, apply_steps
from headrace._core.text import add_note
from headrace._core.transport.pickling import format_error, picklable_error
from headrace._core.transport.shared_pickle import SharedPickle, why_not_picklable
from headrace.errors import NotPicklableError

KNOWN = 32  # groups of functions that a worker keeps: one for each `filter` or inner `map` of its loader

PickledSteps = OrderedDict[tuple[int, ...], SharedPickle]
"""The last pickle of each group of functions, by the functions' identities: unchanged ones are not sent again."""


@dataclass
class Functions:
    """The functions of a stream's steps, pickled once for all workers; `pickled` is None until then."""

    steps: tuple[Step, ...]
    pickled: SharedPickle | None = None

    @cached_property
    def generators(self) -> TransformGenerators:
        """The random generators that the functions hold."""
        return TransformGenerators(step.function for step in self.steps)

    def pickle(self, earlier: PickledSteps) -> SharedPickle:
        """The pickle, that of `earlier` if nothing has changed; raises `NotPicklableError`."""
        if self.pickled is None:
            key = tuple(id(step.function) for step in self.steps)
            try:
                self.pickled = earlier[key] = SharedPickle.dumps(self.steps, earlier.pop(key, None))
            except Exception as error:
                failed = next((step for step in self.steps if why_not_picklable(step.function)), self.steps[0])
                raise NotPicklableError(
                    what=f"{'filter' if failed.is_filter else 'map'} function {failed.function!r}",
                    reason=f"{type(error).__name__}: {error}",
                    remedy="Worker processes need a copy of it: create unpicklable objects inside the function, or use "
                    "num_workers=0.",
                ) from error
            if len(earlier) > KNOWN:
                earlier.popitem(last=False)
        return self.pickled


class StepsRequest(NamedTuple):
    """Some samples of a stream, in order, and the functions to apply to them.

    The seed of the random generators is combined with a sample's position; `position` is that of the first. On the way
    to a worker, `functions` is their pickle, or only the pickle's number.
    """

    functions: Any
    samples: Sequence[object]
    seed: int
    position: int

    def run(self, *, seeds: bool, catch: Catch = BaseException) -> list[object]:
        """The samples that are kept and the errors, in order, in this process.

        Args:
            seeds: whether random generators, those of the process too, are seeded for each sample.
            catch: the exceptions that are caught from user code.
        """
        functions: Functions = self.functions
        current = CurrentSample(self.seed)
        outcomes: list[object] = []
        token = current_sample.set(current)
        try:
            for position, sample in enumerate(self.samples, self.position):
                current.position, current.calls = position, 0
                if seeds:
                    of_sample = batch_seed(self.seed, 0, position)
                    seed_everything(of_sample)
                    functions.generators.seed(of_sample)
                outcome = apply_steps(functions.steps, sample, catch)
                if outcome is not NOTHING:
                    outcomes.append(outcome)
            return outcomes
        finally:
            current_sample.reset(token)

    def to_worker(self, earlier: PickledSteps, *, with_functions: bool) -> StepsRequest:
        """The request to a worker; a worker that lacks the functions answers None."""
        pickled = self.functions.pickle(earlier)
        return self._replace(functions=pickled if with_functions else pickled.number)


class AppliesSteps(Protocol):
    """The part of an executor that a session needs for this."""

    @property
    def parallel(self) -> int:
        """The number of requests that keep it busy."""

    async def apply(self, request: StepsRequest) -> list[object]:
        """Apply steps to samples that are not yet in a batch; returns those kept, and errors, in order."""


class StepsOnConsumersThread:
    """Application of steps on the consumer's thread, while it waits for a batch; with `num_workers=0`.

    Args:
        send: sends the consumer a message.
    """

    parallel = 1

    def __init__(self, send: Callable[[Call], None]) -> None:
        self._send = send

    async def apply(self, request: StepsRequest) -> list[object]:
        """Apply steps when the consumer next asks for a batch and none is ready."""
        answer: Future[list[object]] = Future()

        def run() -> None:
            if not answer.done():  # else the session was cancelled
                outcomes = request.run(seeds=True, catch=CONSUMER_CATCH)
                with contextlib.suppress(InvalidStateError):  # it was cancelled meanwhile
                    answer.set_result(outcomes)

        self._send(Call(run))
        return await asyncio.wrap_future(answer)


def session_compute(executor: AppliesSteps, seed: int, common_seed: int) -> Compute:
    """Application of one session's steps. Each pass of a stream has a seed of its own, by `spawn_key`.

    Args:
        executor: applies them.
        seed: the session's seed, from which the samples' seeds derive.
        common_seed: the same for a stream under `split`, where each rank applies the steps to all samples: different
            outcomes would give samples to two ranks, or to none.
    """

    def prepare(steps: tuple[Step, ...]) -> tuple[RunSteps, int]:
        functions = Functions(steps)
        own = batch_seed(common_seed if undivided.get() else seed, 1, spawn_key())
        return lambda samples, at: executor.apply(StepsRequest(functions, samples, own, at)), executor.parallel

    return prepare


class StepsInWorker:
    """Applies steps in a worker process, which keeps the functions that it was sent.

    Args:
        seeds: whether random generators are seeded for each sample.
    """

    def __init__(self, *, seeds: bool) -> None:
        self._seeds = seeds
        self._known: OrderedDict[int, Functions] = OrderedDict()

    def __call__(self, request: StepsRequest) -> list[object] | None:
        """The outcomes, with errors that can be pickled; None if the functions are missing."""
        sent: SharedPickle | int = request.functions
        number = sent if isinstance(sent, int) else sent.number
        if number not in self._known:
            if isinstance(sent, int):
                return None
            self._known[number] = Functions(sent.loads())
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        outcomes = request._replace(functions=self._known[number]).run(seeds=self._seeds)
        for place, outcome in enumerate(outcomes):
            if type(outcome) is Raised:
                text = format_error(outcome.error).rstrip()
                error = picklable_error(outcome.error)
                add_note(error, f"in a worker process:\n{text}")
                outcomes[place] = Raised(error)
        return outcomes
