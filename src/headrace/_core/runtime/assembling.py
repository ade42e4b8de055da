"""CPU work on the consumer's thread, for async datasets with `num_workers=0`, as in torch."""

from __future__ import annotations

import functools
from dataclasses import replace

from headrace._core.batches import HostBatch, RawBatch
from headrace._core.engine.assemble import CONSUMER_CATCH, Assembler, SeededAssembler
from headrace._core.interface.kinds import sample_key
from headrace._core.open_session import SessionWrapper
from headrace._core.rankinfo import RankInfo, provided_rank
from headrace._core.runtime.thread import ThreadSession
from headrace._core.seeding import isolated_generators


class AssemblingSession(SessionWrapper):
    """Runs user functions on the consumer's thread, when a batch is taken.

    A helper thread would draw from the same random generators as the training loop, in an order that depends on timing.
    Here each batch is transformed and collated with generators seeded from its own seed, and each sample of a stream
    that is filtered with its own; afterwards their states are restored.
    """

    def __init__(self, session: ThreadSession, dataset: object, assembler: Assembler, rank: RankInfo) -> None:
        super().__init__(session)
        self._handoff = session.handoff
        self._dataset = dataset
        self._assemble = SeededAssembler(replace(assembler, catch=CONSUMER_CATCH))
        self._rank = rank
        self._skips = assembler.tolerance.skips
        self._interrupted: HostBatch | None = None

    def ready(self) -> int:
        return self._handoff.ready() + (self._interrupted is not None)

    def certain(self) -> int:
        if self._skips:  # a batch may lose all its samples here
            return 0
        return self._handoff.certain() + (self._interrupted is not None)

    def take(self) -> HostBatch | None:
        """The next batch if it is ready or can be assembled; an interrupted user function is called again."""
        host = self._interrupted or self._fetched()
        if host is None or not isinstance(host.data, RawBatch):
            return host
        self._interrupted = host
        assembled = self._assembled(host, host.data)
        self._interrupted = None
        return assembled

    def _fetched(self) -> HostBatch | None:
        """The next batch from the engine; calls the functions of a stream that the engine waits for."""
        while (host := self._handoff.take()) is None and (call := self._handoff.next_call()) is not None:
            with isolated_generators(), provided_rank(self._rank):
                call()
            self._handoff.forget_call()
        return host

    def _assembled(self, fetched: HostBatch, raw: RawBatch) -> HostBatch:
        with isolated_generators(), provided_rank(self._rank):
            host = self._assemble(raw)
        failures = (*fetched.failures, *host.located(functools.partial(sample_key, self._dataset)).failures)
        work = host.times
        times = fetched.times._replace(
            work_began=work.work_began,
            work_ended=work.work_ended,
            work_cpu=work.work_cpu,
            worked_by=work.worked_by,
        )
        return fetched._replace(data=host.data, size=host.size, failures=failures, empty=host.empty, times=times)

    def close(self) -> None:
        super().close()
        self._interrupted = None
