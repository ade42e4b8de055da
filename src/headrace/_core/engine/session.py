"""A session: one epoch on the engine's loop, and the order of its stages."""

from __future__ import annotations

import asyncio
import functools
import operator
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, RawBatch, SessionStart, StageTimes
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.config import EngineConfig
from headrace._core.engine.executors import Executor, Work
from headrace._core.engine.fetch_pool import Deliver, FetchRecorder, FetchStage
from headrace._core.engine.hedging import Spawn
from headrace._core.engine.memory import MemoryBudget, SampleSizes
from headrace._core.engine.stepping import AppliesSteps, session_compute
from headrace._core.eventloop.watchdog import LoopWatch
from headrace._core.failure import describe_samples
from headrace._core.messages import Answer, Consumed, Request, SessionEnd, Status, StatusRequest, TraceRequest
from headrace._core.randomized import CurrentSample, current_sample
from headrace._core.retry_policy import as_policy
from headrace._core.seeding import batch_seed
from headrace._core.store.request_stats import BodyReader, RequestStats, session_stats
from headrace._core.streams.kinds import DatasetKind, sample_key
from headrace._core.streams.order import session_epoch
from headrace._core.streams.steps import compute


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
        config: the loader's.
        start: the epoch, and where it begins within that.
        executor: runs the CPU work.
        work: the assembly of this session's batches, which `executor` runs.
        steps: the executor of a stream's functions before batching.
        seed: the seed of these functions; does not depend on where the session begins.
        send: sends the consumer a message.
        make_stage: makes the fetch stage.
        sizes: of the loader's samples.
        watch: how long user code has blocked the loop, and where.
    """

    def __init__(
        self,
        config: EngineConfig,
        start: SessionStart,
        *,
        executor: Executor,
        work: Work,
        steps: AppliesSteps,
        seed: int,
        send: Callable[[Answer], None],
        make_stage: Callable[[SessionStart, Deliver, Spawn, RequestStats], FetchStage],
        sizes: SampleSizes,
        watch: LoopWatch,
    ) -> None:
        self.start = start
        self._watch = watch
        self._make_stage = make_stage
        self._assembler = config.assembler
        self._executor = executor
        self._work = work
        self._steps = steps
        self._seed = seed
        self._common_seed = config.common_seed
        self._send = send
        # Lanes take turns; those of several engines where their batches arrive.
        in_order = config.in_order or (start.lanes > 1 and config.engines == 1)
        self._reorder = Reorder(start.batch) if in_order else None
        self._sample_key = functools.partial(sample_key, config.dataset)
        self._sizes = sizes
        retry, budget = config.options["retry"], config.options["memory_budget"]
        self._requests = RequestStats(None if retry is None else as_policy(retry))
        bounded = None if config.kind is not DatasetKind.ASYNC_MAP else budget
        self._memory = None if bounded is None else MemoryBudget(bounded, sizes)
        self._plans: deque[BatchPlan] = deque()  # ascending, that wait for memory
        self._outstanding: dict[int, BatchPlan] = {}  # received and not delivered
        self._admitted_at: dict[int, float] = {}  # of these
        self._assembling: dict[int, RawBatch] = {}
        self._changed = asyncio.Event()  # there are plans, or memory for them
        self._stage: FetchStage | None = None
        self._recorder: FetchRecorder | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._blocked_before = watch.blocked_seconds

    def handle(self, message: Request) -> None:
        """Do what the consumer asks for."""
        if isinstance(message, list):
            now = time.perf_counter()
            for plan in message:
                self._outstanding[plan.number], self._admitted_at[plan.number] = plan, now
                self._on_consumed(plan.taken)
            # Those of an engine that has ended come before others.
            self._plans = deque(sorted((*self._plans, *message), key=operator.attrgetter("number")))
            self._changed.set()
        elif isinstance(message, Consumed):
            self._on_consumed(message.number)
        elif isinstance(message, StatusRequest):
            self._send(Status(self._status(message.number)))
        elif isinstance(message, TraceRequest):
            self._recorder = FetchRecorder() if message.on else None
            if self._stage is not None:
                self._stage.trace(self._recorder)

    def _on_consumed(self, number: int) -> None:
        if self._memory is not None:
            self._memory.on_consumed(number)
            self._changed.set()

    def _status(self, number: int) -> str:
        plan = self._outstanding.get(number)
        if plan is None:
            return f"batch {number} is being sent to this process"
        if self._stage is None:
            return f"batch {number} has not begun: the workers are being started"
        raw = self._assembling.get(number)
        if raw is None:
            missing = plan.indices if plan in self._plans else self._stage.missing(plan)
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
            common_seed = batch_seed(self._common_seed, session_epoch.get() or 0, 0)
            compute.set(session_compute(self._steps, self._seed, common_seed))  # in this context, which fetchers copy
            current_sample.set(CurrentSample(0))  # of an unknown position, since fetches overlap
            self._stage = stage = self._make_stage(self.start, self._assemble_soon, self._spawn, self._requests)
            stage.trace(self._recorder)
            while True:
                self._changed.clear()
                while self._plans:
                    plan = self._plans[0]
                    if self._memory is not None and not self._memory.take(plan, stage.fetched_at_once(plan)):
                        break
                    stage.admit(self._plans.popleft())
                await self._changed.wait()

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
        if self._memory is not None:
            self._memory.on_fetched(raw.plan.number)
            load = self._memory.load(load, len(self._plans))
            self._changed.set()
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
        if self._memory is not None:
            self._memory.on_assembled()
            self._changed.set()
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
        fetches = None if self._recorder is None else self._recorder.take()
        host = host._replace(requests=self._requests.take(), stream_state=state, times=times, fetches=fetches)
        for ready in self._reorder.put(host) if self._reorder else (host,):
            del self._outstanding[ready.plan.number]
            self._send(ready)


def _single(error: BaseException) -> BaseException:
    """The only error of a group, which is raised instead of the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
