"""CPU work on the consumer's thread: what `num_workers=0` means for an async dataset, as it does for torch's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.batches import BatchPlan, HostBatch, RawBatch
from headrace.datasets.protocol import sample_key
from headrace.engine.assemble import Assembler, SeededAssembler
from headrace.opensession import OpenSession
from headrace.rankinfo import RankInfo, provided_rank
from headrace.seeding import isolated_generators

__all__ = ["AssemblingSession"]


# Exceptions of user code. KeyboardInterrupt and SystemExit may be a signal handler's on this thread: Ctrl-C, or a
# SIGTERM that ends the job.
_BORDER = (Exception, GeneratorExit, asyncio.CancelledError)


class AssemblingSession:
    """A session whose batches are transformed and collated when they are taken, on the consumer's thread.

    A helper thread would draw from the same random generators as the training loop, in an order that depends on timing.
    Here each batch is assembled with generators seeded from its own seed; afterwards they are as they were before.

    To its consumer it is the session, and the handoff.

    Args:
        session: where the fetched batches come from; owned from here on.
        dataset: the dataset they come from, which names the samples in errors.
        assembler: the CPU work.
        rank: what `get_rank_info` answers in it.
    """

    def __init__(self, session: OpenSession, dataset: Any, assembler: Assembler, rank: RankInfo) -> None:
        self._session = session
        self._handoff = session.handoff
        self._dataset = dataset
        self._assemble = SeededAssembler(replace(assembler, border=_BORDER))
        self._rank = rank
        self._interrupted: HostBatch | None = None

    @property
    def handoff(self) -> AssemblingSession:
        """Where the batches arrive: here."""
        return self

    @property
    def is_current(self) -> bool:
        """Whether waiting here would be waiting for oneself."""
        return self._session.is_current

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the engine."""
        return self._handoff.ended

    @property
    def error(self) -> BaseException | None:
        """What ended the engine."""
        return self._handoff.error

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        """Send plans ahead."""
        self._session.admit(plans)

    def ask(self, number: int) -> None:
        """Ask how far a batch is."""
        self._session.ask(number)

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
        """Assemble the next batch if it is fetched; after a Ctrl-C in its transform, the same batch again."""
        host, self._interrupted = self._interrupted or self._handoff.take(), None
        if host is None or host.empty:
            return host
        self._interrupted = host
        assembled = self._assembled(host, host.data)
        self._interrupted = None
        return assembled

    def _assembled(self, fetched: HostBatch, raw: RawBatch) -> HostBatch:
        with isolated_generators(), provided_rank(self._rank):
            host = self._assemble(raw)
        failures = (*fetched.failures, *host.located(functools.partial(sample_key, self._dataset)).failures)
        return replace(host, plan=fetched.plan, failures=failures, end=fetched.end, requests=fetched.requests)

    def close(self) -> None:
        """End the session, without waiting for it."""
        self._session.close()
        self._interrupted = None
