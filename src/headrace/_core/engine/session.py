"""A session: one epoch on the engine's loop, and the order of its stages."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, RawBatch, SessionStart, StageTimes
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.executors import Executor, Work
from headrace._core.engine.fetch import Deliver, FetchStage
from headrace._core.engine.fetch_pool import FetchRecorder, Spawn
from headrace._core.engine.memory import SampleSizes
from headrace._core.engine.stepping import AppliesSteps, session_compute
from headrace._core.eventloop.watchdog import LoopWatch
from headrace._core.failure import describe_samples
from headrace._core.messages import Answer, Consumed, Request, SessionEnd, Status, StatusRequest, TraceRequest
from headrace._core.randomized import CurrentSample, current_sample
from headrace._core.seeding import batch_seed
from headrace._core.store.request_stats import BodyReader, RequestStats, session_stats
from headrace._core.streams.order import session_epoch
from headrace._core.streams.steps import Compute, compute


class Reorder:
    """A buffer of batches that wait for earlier ones; bounded by the number of outstanding plans."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._held: dict[int, HostBatch] = {}

    def put(self, host: HostBatch) -> Iterator[HostBatch]:
        """Add a batch; yields the batches that are next in order."""
        self._held[host.plan.number] = host
        while (ready := self._held.pop(self._next, None)) is not None:
            self._next += 1
            yield ready


class Session:
    """Runs one epoch: plans in, batches out to the consumer, until it is cancelled.

    `handle` and `cancel` are called on the loop. `run` is the session's task; the fetchers and one short task for each
    batch are its children, so nothing of the epoch remains when it has ended.

    Args:
        start: where it begins within its epoch.
        work: the assembly of this session's batches, which `executor` runs.
        steps: the executor of a stream's functions before batching.
        seed: the seed of these functions; does not depend on where the session begins.
        common_seed: their seed under `split`, equal on all ranks.
        sample_key: the dataset's name of an index, for errors.
        sizes: of the loader's samples.
        watch: how long user code has blocked the loop, and where.
    """

    def __init__(
        self,
        *,
        make_stage: Callable[[Deliver, Spawn, RequestStats], FetchStage],
        start: SessionStart,
        assembler: Assembler,
        executor: Executor,
        work: Work,
        steps: AppliesSteps | None,
        seed: int,
        common_seed: int,
        send: Callable[[Answer], None],
        in_order: bool,
        sample_key: Callable[[Any], str | None],
        sizes: SampleSizes,
        requests: RequestStats,
        watch: LoopWatch,
    ) -> None:
        self._watch = watch
        self._make_stage = make_stage
        self._assembler = assembler
        self._executor = executor
        self._work = work
        self._steps = steps
        self._seed = seed
        self._common_seed = common_seed
        self._send = send
        self._reorder = Reorder(start.batch) if in_order else None
        self._sample_key = sample_key
        self._sizes = sizes
        self._requests = requests
        self._plans: deque[BatchPlan] = deque()
        self._outstanding: dict[int, BatchPlan] = {}  # admitted and not delivered
        self._admitted_at: dict[int, float] = {}  # of these
        self._assembling: dict[int, RawBatch] = {}
        self._admitted = asyncio.Event()
        self._stage: FetchStage | None = None
        self._consumed = -1  # the number of the last batch that has been taken, as far as the consumer has said
        self._recorder: FetchRecorder | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._blocked_before = watch.blocked_seconds

    def handle(self, message: Request) -> None:
        """Do what the consumer asks for."""
        if isinstance(message, list):
            self._admit(message)
        elif isinstance(message, Consumed):
            self._on_consumed(message.number)
        elif isinstance(message, StatusRequest):
            self._send(Status(self._status(message.number)))
        elif isinstance(message, TraceRequest):
            self._recorder = FetchRecorder() if message.on else None
            if self._stage is not None:
                self._stage.trace(self._recorder)

    def _admit(self, plans: Sequence[BatchPlan]) -> None:
        self._plans.extend(plans)
        self._outstanding.update((plan.number, plan) for plan in plans)
        self._admitted_at.update(dict.fromkeys((plan.number for plan in plans), time.perf_counter()))
        self._admitted.set()

    def _on_consumed(self, number: int) -> None:
        self._consumed = max(self._consumed, number)  # said once, perhaps before there is a stage
        if self._stage is not None and not self._cancelled:
            self._stage.on_consumed(self._consumed)

    def _status(self, number: int) -> str:
        plan = self._outstanding.get(number)
        if plan is None:
            return f"batch {number} is being sent to this process"
        if self._stage is None:
            return f"batch {number} has not begun: the workers are being started"
        raw = self._assembling.get(number)
        if raw is None:
            missing = self._stage.missing(plan)
            samples = describe_samples(missing, self._sample_key)
            count = "1 sample" if len(missing) == 1 else f"{len(missing)} samples"
            return f"batch {number} is in stage fetch, and waits for {count}: {samples}"
        worker = self._executor.worker_of(number)
        stage = "assemble (transform and collate)" if raw.samples is not None else "fetch, in a worker"
        who = "" if worker is None else f", worker {worker}"
        return f"batch {number} is in stage {stage}{who}, {describe_samples(raw.plan.indices, self._sample_key)}"

    def cancel(self) -> None:
        """Admit nothing more and end; also called for a consumer that leaves the epoch."""
        if self._cancelled:
            return
        self._cancelled = True
        if self._stage is not None:
            self._stage.stop()
        if self._task is not None:
            self._task.cancel()

    async def run(self, prepare: Callable[[], Any]) -> None:
        """Await `prepare`, then run until `cancel`. However it ends, a `SessionEnd` is sent."""
        self._task = asyncio.current_task()
        session_stats.set(self._requests)  # in this task's context, which its fetchers copy
        self._requests.bodies = BodyReader()
        error: BaseException | None = None
        try:
            if not self._cancelled:
                await prepare()
                await self._run_stages()
        except BaseException as caught:  # a bug of ours, or the loop is closing: the consumer must not hang
            error = None if self._cancelled else _single(caught)
            if not isinstance(error, Exception | None):
                raise
        finally:
            self._requests.bodies.close()
            self._send(SessionEnd(error))
            del self._work  # frees its shared memory now, not at the next garbage collection

    async def _run_stages(self) -> None:
        # Not anyio's task group, which cancels a task again at each await, and so interrupts `finally` blocks of user
        # code. asyncio's cancels once; the engine bounds the time of closing.
        async with asyncio.TaskGroup() as self._tasks:
            compute.set(self._compute())  # in this task's context, which its fetchers copy
            current_sample.set(CurrentSample(0))  # of an unknown position, since fetches overlap
            self._stage = self._make_stage(self._assemble_soon, self._spawn, self._requests)
            if self._recorder is not None:
                self._stage.trace(self._recorder)
            self._stage.on_consumed(self._consumed)
            while True:
                self._admitted.clear()
                while self._plans:
                    self._stage.admit(self._plans.popleft())
                await self._admitted.wait()

    def _compute(self) -> Compute | None:
        if self._steps is None:
            return None
        return session_compute(self._steps, self._seed, batch_seed(self._common_seed, session_epoch.get() or 0, 0))

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not self._cancelled:  # user code may outlast that, and the task group is closed
            self._tasks.create_task(work())

    def _assemble_soon(self, raw: RawBatch) -> None:
        if self._cancelled:
            return
        assert self._stage is not None
        fetched = time.perf_counter()
        self._sizes.on_fetched(raw)
        load = self._stage.load()
        # Where batches stay in this process, a task and a thread would take longer than the work.
        host = self._work.passed_on(raw) if isinstance(self._work, Assembler) else None
        if host is None:
            self._assembling[raw.plan.number] = raw
            self._tasks.create_task(self._assemble(raw, fetched, load))
        else:
            self._put(raw, host, fetched, load)

    async def _assemble(self, raw: RawBatch, fetched: float, load: FetchLoad) -> None:
        if raw.samples is None:
            host = await self._executor.assemble(raw, self._work)
        else:
            # Failures stay in this process: an exception of user code is not sent to a worker and back.
            kept, lost = raw.without_failures()
            host = self._assembler.nothing_to_do(kept, lost) or await self._executor.assemble(kept, self._work)
            host = host.with_lost(raw, lost)
        del self._assembling[raw.plan.number]
        self._put(raw, host, fetched, load)

    def _put(self, raw: RawBatch, host: HostBatch, fetched: float, load: FetchLoad) -> None:
        """Hand over a batch, with its times, and those that waited for it."""
        assert self._stage is not None
        self._sizes.on_assembled(host)
        host = self._stage.on_assembled(raw, host).located(self._sample_key)
        state = host.stream_state if raw.stream_state is None else raw.stream_state
        admitted, work = self._admitted_at.pop(host.plan.number), host.times
        times = StageTimes(
            admitted,
            raw.began or admitted,
            fetched,
            work.work_began,
            work.work_ended,
            time.perf_counter(),
            raw.fetch_seconds,
            int((self._sizes.fetched or 0) * len(raw.plan.indices)),
            load,
            time.thread_time(),
            self._watch.blocked_seconds,
            self._watch.place,
            self._executor.take_deaths(),
            self._watch.queued_seconds,
            *self._requests.take_times(),
            work.work_cpu,
            self._blocked_before,
            work.worked_by,
        )
        requests = self._requests.take()
        fetches = None if self._recorder is None else self._recorder.take()
        host = HostBatch(  # not `replace`, which takes three times as long
            host.plan,
            host.data,
            host.size,
            host.failures,
            host.end,
            host.empty,
            requests,
            host.worker,
            state,
            times,
            fetches,
        )
        for ready in self._reorder.put(host) if self._reorder else (host,):
            del self._outstanding[ready.plan.number]
            self._send(ready)


def _single(error: BaseException) -> BaseException:
    """The only error of a group, which is raised instead of the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
