"""CPU work on the consumer's thread, with `num_workers=0` and an async dataset, as torch does it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace._core.batches import BatchPlan, HostBatch, RawBatch
from headrace._core.engine.assemble import CONSUMER_BORDER, Assembler, SeededAssembler
from headrace._core.interface.kinds import sample_key
from headrace._core.rankinfo import RankInfo, provided_rank
from headrace._core.runtime.thread import ThreadSession
from headrace._core.seeding import isolated_generators


class AssemblingSession:
    """A session whose user functions run on the consumer's thread, when a batch is taken.

    A helper thread would draw from the same random generators as the training loop, in an order that depends on timing.
    Here each batch is transformed and collated with generators seeded from its own seed, and each sample of a stream
    that is filtered with its own; afterwards they are as they were before.

    To its consumer it is the session, and the handoff.

    Args:
        session: delivers the fetched batches; this owns it.
        dataset: the dataset they come from, which names the samples in errors.
        assembler: the CPU work.
        rank: the result of `get_rank_info` in user code.
    """

    def __init__(self, session: ThreadSession, dataset: Any, assembler: Assembler, rank: RankInfo) -> None:
        self._session = session
        self._handoff = session.handoff
        self._dataset = dataset
        self._assemble = SeededAssembler(replace(assembler, border=CONSUMER_BORDER))
        self._rank = rank
        self._interrupted: HostBatch | None = None

    @property
    def handoff(self) -> AssemblingSession:
        """Where the batches arrive: here."""
        return self

    @property
    def is_current(self) -> bool:
        """Whether waiting here would deadlock."""
        return self._session.is_current

    @property
    def ended(self) -> bool:
        """Whether the engine has delivered its last batch."""
        return self._handoff.ended

    @property
    def error(self) -> BaseException | None:
        """The error that ended the engine."""
        return self._handoff.error

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        """Send plans ahead."""
        self._session.admit(plans)

    def request_status(self, number: int) -> None:
        """Ask how far a batch is."""
        self._session.request_status(number)

    def take_status(self) -> str | None:
        """The answer, if it is there."""
        return self._handoff.take_status()

    def ready(self) -> int:
        """How many batches are fetched."""
        return self._handoff.ready() + (self._interrupted is not None)

    def wait(self, timeout: float | None) -> bool:
        """Block until a batch is fetched."""
        return self._handoff.wait(timeout)

    async def wait_async(self, timeout: float | None) -> bool:
        """As `wait`, on the caller's event loop."""
        return await self._handoff.wait_async(timeout)

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
        """The next batch from the engine; functions of a stream that it needs are run here."""
        while (host := self._handoff.take()) is None and (call := self._handoff.next_call()) is not None:
            with isolated_generators(), provided_rank(self._rank):
                call()
            self._handoff.forget_call()
        return host

    def _assembled(self, fetched: HostBatch, raw: RawBatch) -> HostBatch:
        with isolated_generators(), provided_rank(self._rank):
            host = self._assemble(raw)
        failures = (*fetched.failures, *host.located(functools.partial(sample_key, self._dataset)).failures)
        return replace(host, plan=fetched.plan, failures=failures, end=fetched.end, requests=fetched.requests)

    def close(self) -> None:
        """End the session, without waiting for it."""
        self._session.close()
        self._interrupted = None
