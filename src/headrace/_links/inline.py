"""Work on the consumer's thread with `num_workers=0`, as in torch.

The thread reads torch datasets, and assembles batches of async datasets.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from headrace._engine.assemble import CONSUMER_CATCH
from headrace._engine.config import EngineConfig
from headrace._engine.worker_tasks import (
    BatchReader,
    MapReader,
    StreamReader,
    cannot_start,
)
from headrace._random.seeding import isolated_generators
from headrace._ranks.rankinfo import bound, temporary_rank
from headrace._records.batches import BatchPlan, HostBatch, RawBatch, SessionStart
from headrace._records.messages import Answer, EngineRequest, Link
from headrace._streams.epochs import session_epoch
from headrace._streams.kinds import sample_key
from headrace._streams.resumable import State, warn_of_rereading

P = ParamSpec("P")
T = TypeVar("T")


class InlineLink(Link):
    """A link to a torch dataset in the consumer's thread.

    `receive` reads a batch. The constructor starts a stream. With a seed, the random generators of
    the program are restored after each batch.
    """

    def __init__(self, config: EngineConfig, start: SessionStart) -> None:
        self._epoch = bound(session_epoch, start.epoch)
        self._rank = temporary_rank(config.rank)
        self._isolates = config.options["seed"] is not None
        make = functools.partial(
            StreamReader if config.kind.is_iterable else MapReader,
            config.dataset,
            # Ctrl-C is raised: KeyboardInterrupt is not an error of the dataset.
            replace(config.assembler, catch=Exception),
            drop_last=config.drop_last,
            seeds=self._isolates,
        )
        self._read: Callable[[BatchPlan], HostBatch]
        if start.streams:
            warn_of_rereading(start.streams)
            try:
                self._read = self._in_context(
                    functools.partial(make, state=start.own_state)
                )
            except Exception as error:  # raised at the first batch, as in an engine
                self._read = cannot_start(error, restoring=True)
        else:
            self._read = self._in_context(make)
        self._sample_key = functools.partial(sample_key, config.dataset)
        self.messages: deque[Answer] = deque()
        self._plans: deque[BatchPlan] = deque()

    def state_dict(self) -> State | None:
        """Return the state of a stateful dataset or iterator, or None."""
        if isinstance(self._read, BatchReader):
            return self._in_context(self._read.state_dict)
        return None

    def send(self, message: EngineRequest) -> None:
        if isinstance(message, list):  # other requests need no answer here
            self._plans.extend(message)

    def receive(self) -> None:
        if not self._plans:
            return
        plan = self._plans.popleft()
        try:
            host = self._in_context(self._read, plan)
        except BaseException:
            # Ctrl-C: read the batch again; a stream continues with later samples.
            self._plans.appendleft(plan)
            raise
        self.messages.append(host.located(self._sample_key) if host.failures else host)

    def must_wait(self) -> bool:
        return False

    def leave(self) -> None:
        self._plans.clear()

    def _in_context(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call user code in the context of an engine."""
        isolated = isolated_generators() if self._isolates else contextlib.nullcontext()
        with self._rank, self._epoch, isolated:
            return work(*args, **kwargs)


class WorkOnConsumersThread:
    """User functions on the consumer's thread.

    For async datasets with `num_workers=0`, as in torch. A helper thread would draw random numbers
    from the generators of the training loop, in an order that depends on timing. On the consumer's
    thread, each batch is transformed and collated with generators seeded for the batch. Functions
    before batching run with generators seeded for the sample. Afterwards, the states of the
    generators are restored.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._sample_key = functools.partial(sample_key, config.dataset)
        self._assembler = replace(config.assembler, catch=CONSUMER_CATCH)
        self._generators = self._assembler.generators()
        self._rank = config.rank
        self.skips = config.assembler.tolerance.skips

    def call(self, function: Callable[[], None]) -> None:
        with isolated_generators(), temporary_rank(self._rank):
            function()

    def finish(self, host: HostBatch) -> HostBatch:
        """Assemble a fetched batch.

        After Ctrl-C, `finish` is called again for the same batch.
        """
        if not isinstance(host.data, RawBatch):
            return host
        with isolated_generators(), temporary_rank(self._rank):
            self._generators.seed(host.plan.seed)
            made = self._assembler(host.data).located(
                host.data.origin or self._sample_key
            )
        work = made.times
        times = host.times._replace(
            work_began=work.work_began,
            work_ended=work.work_ended,
            work_cpu=work.work_cpu,
            work_queued=work.work_queued,
            worked_by=work.worked_by,
        )
        return made.with_failures_of(host)._replace(times=times)
