"""The engine and its sessions: fetch and assemble, in every placement."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from headrace._engine.assemble import Assembler
from headrace._engine.concurrency import AdaptiveLimit
from headrace._engine.config import EngineConfig
from headrace._engine.executors import Executor, ProcessExecutor, ThreadExecutor, Work
from headrace._engine.fetch import (
    BatchFetch,
    FetchContext,
    Fetchers,
    FetchRecorder,
    FetchStage,
    RowFetch,
    SampleFetch,
)
from headrace._engine.look_ahead import AUTO_CONCURRENCY, LEAST_AHEAD, most_concurrency
from headrace._engine.memory import (
    MEASURED_BATCHES,
    MEASURED_RARELY,
    MemoryBudget,
    SampleSizes,
)
from headrace._engine.range_fetch import RangeFetch
from headrace._engine.sample_functions import Apply, SessionFunctions
from headrace._engine.streams import DispatchToWorkers, RowFetching, StreamFetch
from headrace._engine.worker_tasks import StartEpoch
from headrace._eventloop.watchdog import LoopWatch
from headrace._random.randomized import CurrentSample, current_sample
from headrace._random.seeding import batch_seed
from headrace._ranks.rankinfo import set_rank
from headrace._records.batches import (
    BatchPlan,
    FetchLoad,
    HostBatch,
    RawBatch,
    SessionStart,
    StageTimes,
)
from headrace._records.failure import describe_samples
from headrace._records.messages import (
    Answer,
    Call,
    Consumed,
    EngineRequest,
    SessionEnd,
    Status,
    StatusRequest,
    TraceRequest,
    WorkersRequest,
)
from headrace._store.request_stats import BodyReader, RequestStats, session_stats
from headrace._store.retry_policy import as_policy
from headrace._streams.epochs import session_epoch, session_seed
from headrace._streams.fetch_functions import fetches, holders, is_bounded
from headrace._streams.kinds import (
    DatasetKind,
    capabilities,
    reads_whole_blocks,
    sample_key,
)
from headrace._streams.map_style import FetchedDataset
from headrace._streams.sample_functions import compute
from headrace._transport.pickling import PickledPayload
from headrace._transport.shared_pickle import SharedPickle

_ASSEMBLE = "assemble (transform and collate)"


class Engine:
    """Runs sessions on an event loop.

    The placement owns the engine: it makes the engine, opens it on the loop, and closes it. The
    constructor starts the worker processes, before any loop or thread of the engine exists.

    Args:
        config: The configuration.
        first_task: The first task of the workers, if already pickled.
    """

    def __init__(
        self, config: EngineConfig, first_task: SharedPickle | None = None
    ) -> None:
        self.config = config
        # Measures how long user code blocks the loop, and where.
        self.watch = LoopWatch(type(config.dataset).__qualname__)
        # The searches of the last epoch, by what is counted.
        self._searches: dict[str, AdaptiveLimit] = {}
        # Bytes of batches, and of each operation of a stream.
        self.budget: int | None = None
        if config.options["memory_budget"] is not None and is_bounded(
            config.kind, config.dataset
        ):
            share = 1 + holders(config.dataset)
            self.budget = max(1, config.options["memory_budget"] // share)
        self.sizes = SampleSizes(
            MEASURED_RARELY if self.budget is None else MEASURED_BATCHES
        )
        self.executor: Executor
        if config.has_processes:
            self.executor = ProcessExecutor(config, first_task)
        else:
            self.executor = ThreadExecutor(config.rank, deferred=config.deferred)
        self._running: dict[EngineSession, asyncio.Task[None]] = {}

    def start(self, session: EngineSession) -> None:
        """Run a session as a task of the running loop."""
        task = asyncio.get_running_loop().create_task(session.run())
        self._running[session] = task
        if self.config.kind.is_async:  # otherwise the loop runs no user code
            self.watch.begin()
        task.add_done_callback(lambda _: self._forget(session))

    def call_on_consumers_thread(self, function: Callable[[], None]) -> None:
        """Have each consumer that waits for a batch call `function`."""
        for session in self._running:
            session.send(Call(function))

    def _forget(self, session: EngineSession) -> None:
        del self._running[session]
        if self.config.kind.is_async:
            self.watch.end()

    def prepare(self, start: SessionStart) -> None:
        """Set the epoch, connect the workers, and have workers with a dataset start the epoch."""
        # Set in the context of the session's task. The fetchers copy this context.
        session_epoch.set(start.epoch)
        session_seed.set(self.config.options["seed"])
        set_rank(self.config.rank)
        self.executor.open()
        if isinstance(self.executor, ProcessExecutor) and not self.config.kind.is_async:
            running = frozenset(session.start.epoch for session in self._running)
            states = {
                worker: PickledPayload.dumps(state)
                for worker, state in start.streams.items()
            }
            self.executor.broadcast(
                lambda worker: StartEpoch(
                    start.epoch, running, start.set_epoch, states.get(worker)
                )
            )

    async def close(self, deadline: float) -> None:
        """Cancel the sessions, wait for them, and close the executor.

        Each step may take `deadline` seconds.
        """
        tasks = list(self._running.values())
        for session in list(self._running):
            session.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=deadline)
        await self.executor.close(deadline)

    def make_stage(self, context: FetchContext, start: SessionStart) -> FetchStage:
        config, dataset = self.config, self.config.dataset
        if not config.kind.is_async:
            streams = config.kind.is_iterable
            return DispatchToWorkers(
                context,
                start,
                config.num_workers,
                streams=streams,
                in_order=config.in_order,
            )
        if config.kind is DatasetKind.ASYNC_ITERABLE:
            fetching = None
            if fetches(dataset):
                fetchers = Fetchers(context, self._concurrency("rows"))
                fetching = RowFetching(fetchers, self.budget, context.hedged_requests())
            return StreamFetch(
                context,
                start,
                dataset,
                config.drop_last,
                config.assembler.tolerance,
                fetching,
            )
        if isinstance(dataset, FetchedDataset) and capabilities(dataset).agets:
            rows = self._map_style(context, dataset.rows)
            return RowFetch(context, dataset.fetch, self._concurrency("rows"), rows)
        return self._map_style(context, dataset)

    def _map_style(self, context: FetchContext, dataset: Any) -> FetchStage:
        config, options = self.config, self.config.options
        can = capabilities(dataset)
        blocks = can.agets and reads_whole_blocks(dataset)
        if blocks and options["concurrency"] == "auto":
            calls = max(1, config.look_ahead // config.engines)
            return BatchFetch(
                context, dataset, calls, blocks=True, singly=True, joins=True
            )
        if blocks or (config.assembler.batched and can.agets and not can.ranges):
            singly = blocks or (can.aget and config.assembler.tolerance.skips)
            concurrency = self._concurrency("calls")
            return BatchFetch(context, dataset, concurrency, blocks=blocks, singly=singly)
        make = RangeFetch if can.ranges else SampleFetch
        return make(context, dataset, self._concurrency("fetches"))

    def _concurrency(self, counted: str) -> int | AdaptiveLimit:
        """Return the option, or a search that begins with the limit found in the last epoch.

        `counted` is ``"calls"`` for calls of `agets`, ``"fetches"`` or ``"rows"``.
        """
        config, given = self.config, self.config.options["concurrency"]
        if given != "auto":
            return given
        least, most = max(1, AUTO_CONCURRENCY // config.engines), most_concurrency()
        if counted == "calls":  # the look-ahead is enough for `most` samples
            least = max(
                1, LEAST_AHEAD // config.engines, config.look_ahead * least // most
            )
            most = min(most, config.look_ahead)
        peers = config.engines * config.rank.world_size
        found = self._searches.get(counted)
        limit = AdaptiveLimit(least, most, peers) if found is None else found.successor()
        self._searches[counted] = limit
        return limit


class EngineSession:
    """Runs one epoch: takes plans and sends batches, until `cancel`.

    Call `handle` and `cancel` on the loop. `run` is the session's task. The children of this task
    are the fetchers and a short task for each batch. When the session has ended, no task of the
    epoch is left.

    Args:
        engine: The engine, which starts and ends the session.
        send: Sends an answer to the consumer.
        work: The assembly of batches.
        start: The beginning of the epoch.
        apply: Applies the functions of a stream. Default: the executor of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        send: Callable[[Answer], None],
        work: Work,
        start: SessionStart,
        apply: Apply | None = None,
    ) -> None:
        config = engine.config
        self.start = start
        self._engine = engine
        self._assembler = config.assembler
        self._sizes, self._watch = engine.sizes, engine.watch
        executor = self._executor = engine.executor
        self._work = work
        common_seed = batch_seed(config.options["seed"] or 0, start.epoch, 0)
        self._functions = SessionFunctions(
            apply or executor.apply, lambda: executor.workers, start.seed, common_seed
        )
        self.send = send
        self._in_order = config.in_order
        self._next_number = start.batch
        self._held: dict[int, HostBatch] = {}  # batches waiting for earlier batches
        self._sample_key = functools.partial(sample_key, config.dataset)
        retry = config.options["retry"]
        self._requests = RequestStats(retry=None if retry is None else as_policy(retry))
        hedges = config.options["hedge"] is not None
        self._context = FetchContext(
            self._assemble_soon, self._spawn, self._requests, hedges
        )
        self._memory: MemoryBudget | None = None
        if engine.budget is not None:
            dataset = config.dataset
            joins = capabilities(dataset).ranges or reads_whole_blocks(dataset)
            joins = joins and not isinstance(dataset, FetchedDataset)
            self._memory = MemoryBudget(engine.budget, self._sizes, joins=joins)
        # Plans waiting for memory, by ascending number.
        self._plans: deque[BatchPlan] = deque()
        # Plans received and not delivered, with the times of receipt.
        self._outstanding: dict[int, tuple[BatchPlan, float]] = {}
        self._assembling: dict[int, RawBatch] = {}
        self._changed = asyncio.Event()  # set for new plans, or for free memory
        self._left = False  # whether the consumer has left the epoch
        self._stage: FetchStage | None = None
        self._task: asyncio.Task[Any] | None = None
        self._blocked_before = self._watch.blocked_seconds

    def handle(self, message: EngineRequest) -> None:
        if isinstance(message, list):
            now = time.perf_counter()
            for plan in message:
                self._outstanding[plan.number] = plan, now
                self._on_consumed(plan.taken)
            # Plans from an engine that has ended may precede other plans, so sort.
            self._plans = deque(sorted((*self._plans, *message)))
            self._changed.set()
        elif isinstance(message, Consumed):
            self._on_consumed(message.number)
        elif isinstance(message, StatusRequest):
            self.send(Status(self._status(message.number)))
        elif isinstance(message, TraceRequest):
            self._context.recorder = FetchRecorder() if message.on else None
        elif isinstance(message, WorkersRequest) and isinstance(
            self._executor, ProcessExecutor
        ):
            self._executor.resize(message.number)

    def _on_consumed(self, number: int) -> None:
        if self._memory is not None:
            self._memory.on_consumed(number)
            self._changed.set()

    def _status(self, number: int) -> str:
        if number not in self._outstanding:
            return f"batch {number} is being sent to this process"
        if self._stage is None:
            return f"batch {number} has not begun: the workers are being started"
        plan, _ = self._outstanding[number]
        raw, worker = self._assembling.get(number), self._executor.worker_of(number)
        if raw is None:
            indices = plan.indices if plan in self._plans else self._stage.missing(plan)
            count = "1 sample" if len(indices) == 1 else f"{len(indices)} samples"
            stage = f"fetch, and waits for {count}:"
        else:
            indices = raw.plan.indices
            stage = "fetch, in a worker" if raw.samples is None else _ASSEMBLE
            stage += "," if worker is None else f", worker {worker},"
        samples = describe_samples(indices, self._sample_key)
        return f"batch {number} is in stage {stage} {samples}"

    def leave(self) -> None:
        """End the session after the consumer has left the epoch.

        Workers with a torch dataset first read all requested batches, as in torch. Otherwise the
        next epoch would depend on how far a worker has come.
        """
        self._left = True
        if self._engine.config.kind.is_async or not self._outstanding:
            self.cancel()

    def cancel(self) -> None:
        """End, and admit no more plans."""
        if self._task is not None and not self._context.stopping:
            self._task.cancel()
        self._context.stopping = True

    async def run(self) -> None:
        """Prepare the engine, then run until `cancel`.

        However the session ends, a `SessionEnd` is sent.
        """
        # In this task's context, copied by the fetchers.
        session_stats.set(self._requests)
        self._requests.bodies = BodyReader()
        error: BaseException | None = None
        try:
            # Restored states are sent even if the session is ending: persistent workers keep them
            # for the next epoch.
            if not self._context.stopping or self.start.streams:
                self._engine.prepare(self.start)
            if not self._context.stopping:
                self._task = asyncio.current_task()
                await self._run_stages()
        except BaseException as caught:
            # A bug in headrace, or the loop is closing: the consumer must not hang.
            error = None if self._context.stopping else caught
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            if not isinstance(error, Exception | None):
                raise
        finally:
            self._requests.bodies.close()
            self.send(SessionEnd(error))
            # Free the shared memory of the functions now, not at the next garbage collection.
            self._work = None

    async def _run_stages(self) -> None:
        # A task group of anyio cancels a task again at each await, and so interrupts `finally`
        # blocks of user code. asyncio cancels once. The engine limits the time of closing.
        async with asyncio.TaskGroup() as self._tasks:
            compute.set(self._functions)  # in this context, copied by the fetchers
            # Fetches overlap, so the position of a sample is unknown.
            current_sample.set(CurrentSample(0))
            self._stage = stage = self._engine.make_stage(self._context, self.start)
            while True:
                self._changed.clear()
                while self._plans and self._has_memory(stage, self._plans[0]):
                    stage.admit(self._plans.popleft())
                await self._changed.wait()

    def _has_memory(self, stage: FetchStage, plan: BatchPlan) -> bool:
        """Return whether the memory budget admits a plan."""
        return self._memory is None or self._memory.take(
            plan, stage.fetched_at_once(plan)
        )

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        # User code may outlast the cancellation. The task group is closed by then.
        if not self._context.stopping:
            self._tasks.create_task(work())

    def _assemble_soon(self, raw: RawBatch) -> None:
        """Take on a fetched batch."""
        fetched = time.perf_counter()
        if self._context.stopping:
            return
        assert self._stage is not None
        load = self._stage.load()
        if self._memory is None:
            self._sizes.on_fetched(raw)
        else:
            self._memory.on_fetched(raw)
            load = self._memory.load(load, len(self._plans))
            self._changed.set()
        # If the batch stays in this process, a task and a thread would take longer than the work.
        host = self._work.passed_on(raw) if isinstance(self._work, Assembler) else None
        if host is not None:
            self._put(raw, host, fetched, load)
        else:
            self._assembling[raw.plan.number] = raw
            self._tasks.create_task(self._assemble(raw, fetched, load))

    async def _assemble(self, raw: RawBatch, fetched: float, load: FetchLoad) -> None:
        if raw.samples is None:
            host = await self._executor.assemble(raw, self._work)
        else:
            # Failures stay in this process, so exceptions of user code are not sent to a worker and
            # back.
            kept, lost = raw.without_failures()
            made = self._assembler.nothing_to_do(kept, lost)
            if made is None:
                made = await self._executor.assemble(kept, self._work)
            host = made.with_lost(raw, lost)
        del self._assembling[raw.plan.number]
        self._put(raw, host, fetched, load)

    def _put(
        self, raw: RawBatch, host: HostBatch, fetched: float, load: FetchLoad
    ) -> None:
        """Send a finished batch with times, and batches held for order."""
        assert self._stage is not None
        self._sizes.on_assembled(host)
        if self._memory is not None:
            self._memory.on_assembled()
            self._changed.set()
        host = self._stage.on_assembled(raw, host).located(raw.origin or self._sample_key)
        number, watch = raw.plan.number, self._watch
        _, admitted = self._outstanding[number]
        deaths, self._executor.deaths = self._executor.deaths, 0
        work = host.times
        times = StageTimes(  # `_replace` would take twice as long
            admitted=admitted,
            began=raw.began or admitted,
            fetched=fetched,
            work_began=work.work_began,
            work_ended=work.work_ended,
            assembled=time.perf_counter(),
            fetch_seconds=raw.fetch_seconds,
            nbytes=int((self._sizes.fetched.mean or 0) * len(raw.plan.indices)),
            engine_cpu=time.thread_time(),
            blocked=watch.blocked_seconds - self._blocked_before,
            blocked_in=watch.place,
            worker_deaths=deaths,
            engine_queued=watch.queued_seconds,
            work_cpu=work.work_cpu,
            work_queued=work.work_queued,
            worked_by=work.worked_by,
            functions_seconds=self._functions.seconds,
            load=load,
        )
        self._held[number] = host._replace(
            requests=self._requests.take(),
            stream_state=host.stream_state
            if raw.stream_state is None
            else raw.stream_state,
            times=times,
            fetches=None
            if self._context.recorder is None
            else self._context.recorder.take(),
        )
        if not self._in_order:
            self._next_number = number
        while (done := self._held.pop(self._next_number, None)) is not None:
            del self._outstanding[self._next_number]
            self._next_number += 1
            self.send(done)
        if self._left and not self._outstanding:
            self.cancel()
