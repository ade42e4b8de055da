"""Application of a stream's functions to samples before batching.

A session's executor applies the functions, in this process or in a worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from headrace._engine.assemble import CONSUMER_CATCH, Catch
from headrace._engine.config import MAKE_LATER
from headrace._random.randomized import CurrentSample, current_sample
from headrace._random.seeding import TransformGenerators, batch_seed
from headrace._ranks.distributed import undivided
from headrace._ranks.rankinfo import bound
from headrace._records.messages import Call
from headrace._streams.epochs import spawn_key
from headrace._streams.resumable import BadRecord
from headrace._streams.sample_functions import RunFunctions, SampleFunction, outcome_of
from headrace._transport.pickling import Message, dump_message, not_picklable, noted_error
from headrace._transport.shared_pickle import SharedPickle, raise_unpicklable

# Number of kept pickles: a pickle for each `filter` or inner `map` of a loader.
KNOWN = 32


class Chunk(NamedTuple):
    """Consecutive samples of a stream, with the position of the first sample.

    For each sample, the random generators are seeded from `seed` and the sample's position.
    """

    samples: Sequence[object]
    seed: int
    position: int


class Outcomes(NamedTuple):
    """The outcomes of a chunk's samples, and the duration in seconds.

    The outcome is `NOTHING` for a dropped sample, and `BadRecord` for a failed sample.
    """

    of_samples: list[object]
    seconds: float


class FunctionsTask:
    """A task of worker processes: apply the functions of a stream."""

    def __init__(self, functions: tuple[SampleFunction, ...]) -> None:
        self._functions = functions
        self._pickled: SharedPickle | None = None

    @cached_property
    def _generators(self) -> TransformGenerators:
        return TransformGenerators(part.function for part in self._functions)

    def pickle(self, earlier: OrderedDict[tuple[int, ...], SharedPickle]) -> SharedPickle:
        """Return the task, pickled once for all workers.

        Args:
            earlier: The last pickles, by the identities of the functions. Unchanged functions are
                not sent again.

        Raises:
            NotPicklableError: A function cannot be pickled.
        """
        if self._pickled is None:
            key = tuple(id(part.function) for part in self._functions)
            try:
                self._pickled = earlier[key] = SharedPickle.dumps(
                    self, earlier.pop(key, None)
                )
            except Exception as error:
                parts = [
                    (part.name, part.function, MAKE_LATER) for part in self._functions
                ]
                raise_unpicklable(parts, error)
            if len(earlier) > KNOWN:
                earlier.popitem(last=False)
        return self._pickled

    def start(self, worker: int, workers: int) -> None:
        pass  # nothing to do: the task of the assembly has started the worker

    def __call__(self, chunk: Chunk) -> Message:
        """Return the outcomes of a chunk, pickled in a worker, with picklable errors."""
        outcomes = self.apply(chunk)
        for place, outcome in enumerate(outcomes.of_samples):
            if type(outcome) is BadRecord:
                outcomes.of_samples[place] = BadRecord(
                    noted_error(outcome.error, "in a worker process")
                )
        try:
            return dump_message(outcomes)
        except BaseException as error:  # user code: __reduce__ of a result
            remedy = (
                "It is sent back from a worker process: return tensors, arrays, or classes that "
                "both can import."
            )
            raise not_picklable(
                "the result of a function before batching", error, remedy
            ) from error

    def apply(self, chunk: Chunk, *, catch: Catch = BaseException) -> Outcomes:
        """Return the outcome of each sample.

        Random generators are seeded before each sample. Errors of the classes in `catch` become
        outcomes.
        """
        current, began = CurrentSample(chunk.seed), time.perf_counter()
        outcomes: list[object] = []
        with bound(current_sample, current):
            for position, sample in enumerate(chunk.samples, chunk.position):
                current.position, current.calls = position, 0
                self._generators.seed(batch_seed(chunk.seed, 0, position))
                outcomes.append(outcome_of(self._functions, sample, catch))
        return Outcomes(outcomes, time.perf_counter() - began)


Apply = Callable[[FunctionsTask, Chunk], Awaitable[Outcomes]]
"""Applies functions off the session's event loop."""


def settle(
    answer: asyncio.Future[Any], result: object, error: Exception | None = None
) -> None:
    """Set the result or error of a future, from any thread.

    Nothing happens if the future is done or the event loop is closed. A future of
    `concurrent.futures` would take 30 µs more for each batch.
    """

    def settle_on_loop() -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    with suppress(RuntimeError):
        answer.get_loop().call_soon_threadsafe(settle_on_loop)


def apply_on_consumers_thread(send: Callable[[Call], None]) -> Apply:
    """Return an `Apply` on the consumer's thread.

    The functions run while the consumer waits for a batch, with `num_workers=0`.
    """

    async def apply(task: FunctionsTask, chunk: Chunk) -> Outcomes:
        answer: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if not answer.done():  # otherwise the session was cancelled
                settle(answer, task.apply(chunk, catch=CONSUMER_CATCH))

        send(Call(run))
        return await answer

    return apply


@dataclass(slots=True, eq=False)
class SessionFunctions:
    """Application of a session's functions: a `Compute`.

    Contexts of the session's tasks refer to this object, and may outlive the session. Therefore
    this object must not refer to the session.

    Each pass of a stream has a seed, made from `spawn_key` and the session's seed. Under `split`,
    the common seed replaces the session's seed. Each rank then applies the functions to all
    samples, and different outcomes would give a sample to two ranks, or to no rank.
    """

    apply: Apply
    parallel: Callable[[], int]  # returns the number of chunks that keep `apply` busy
    seed: int
    common_seed: int
    seconds: float = 0.0  # time in functions so far

    def __call__(
        self, functions: tuple[SampleFunction, ...]
    ) -> tuple[RunFunctions, Callable[[], int]]:
        task = FunctionsTask(functions)
        own = batch_seed(
            self.common_seed if undivided.get() else self.seed, 1, spawn_key()
        )
        return lambda some, position: self._run(
            task, Chunk(some, own, position)
        ), self.parallel

    async def _run(self, task: FunctionsTask, chunk: Chunk) -> list[object]:
        outcomes = await self.apply(task, chunk)
        self.seconds += outcomes.seconds
        return outcomes.of_samples
