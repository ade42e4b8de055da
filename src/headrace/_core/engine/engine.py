"""The engine: fetch and assemble, with the executor they share. One piece of code wherever it is placed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from headrace._core.batches import SessionStart
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.config import EngineConfig
from headrace._core.engine.executors import Executor, ProcessExecutor, ThreadExecutor, Work
from headrace._core.engine.fetch import BatchFetch, SampleFetch
from headrace._core.engine.fetch_pool import Deliver, FetchStage
from headrace._core.engine.hedging import Spawn
from headrace._core.engine.memory import SampleSizes
from headrace._core.engine.range_fetch import RangeFetch
from headrace._core.engine.session import Session
from headrace._core.engine.stepping import AppliesSteps
from headrace._core.engine.streams import DispatchToWorkers, LaneFetch, StreamFetch
from headrace._core.engine.worker_tasks import StartEpoch
from headrace._core.eventloop.watchdog import LoopWatch
from headrace._core.look_ahead import AUTO_CONCURRENCY, most_concurrency
from headrace._core.messages import Answer
from headrace._core.ranks.rankinfo import provide_rank
from headrace._core.store.request_stats import RequestStats
from headrace._core.streams.blocking import EnteredDatasets
from headrace._core.streams.kinds import DatasetKind, capabilities
from headrace._core.streams.order import session_epoch
from headrace._core.transport.pickling import PickledPayload
from headrace._core.transport.shared_pickle import SharedPickle


class Engine:
    """Runs sessions on one event loop. Its placement owns it: makes it, opens it on the loop, closes it.

    Worker processes are started by the constructor, before any loop or thread of the engine exists.

    Args:
        config: what to run.
        first_task: the first task of worker processes, already pickled; by default the configuration's.
        owns_process: nothing but this engine runs in the process, so that a helper thread may seed its generators.

    Attributes:
        watch: how long user code has blocked the loop, and where.

    Raises:
        NotPicklableError: a function has to go to worker processes and cannot.
    """

    def __init__(
        self, config: EngineConfig, first_task: SharedPickle | None = None, *, owns_process: bool = False
    ) -> None:
        self._config = config
        self.watch = LoopWatch(type(config.dataset).__qualname__)
        self._control: AdaptiveLimit | None = None  # the last epoch's
        self._sample_sizes = SampleSizes()
        self._executor: Executor
        if config.has_processes:
            self._executor = ProcessExecutor(config, first_task)
        else:
            threads = 0 if config.deferred else max(1, config.num_workers)
            self._executor = ThreadExecutor(threads, config.rank, seeds=owns_process and threads == 1)
        self._opening: asyncio.Task[None] | None = None
        self._entered = EnteredDatasets()
        self._running: dict[Session, asyncio.Task[None]] = {}

    def session(
        self,
        send: Callable[[Answer], None],
        work: Work,
        start: SessionStart,
        seed: int,
        steps: AppliesSteps | None = None,
    ) -> Session:
        """A new session, not yet running; may be called from any thread.

        Args:
            send: sends the consumer a message.
            work: assembles the batches.
            start: where it begins within its epoch.
            seed: of the functions of a stream that are applied before batching.
            steps: where functions of a stream are applied before batching; by default in the executor.
        """
        return Session(
            self._config,
            start,
            executor=self._executor,
            work=work,
            steps=steps or self._executor,
            seed=seed,
            send=send,
            make_stage=self._make_stage,
            sizes=self._sample_sizes,
            watch=self.watch,
        )

    @property
    def usable(self) -> bool:
        """False once its executor has failed to open, or its workers could not be replaced."""
        opening = self._opening
        if opening is not None and opening.done() and (opening.cancelled() or opening.exception() is not None):
            return False
        return self._executor.usable

    def start(self, session: Session, pipe_seed: int | None = None) -> None:
        """Run a session as a task of the running loop; `pipe_seed` as in `StartEpoch`."""
        prepare = functools.partial(self._prepare, session.start, pipe_seed)
        task = asyncio.get_running_loop().create_task(session.run(prepare))
        self._running[session] = task
        if self._config.kind.is_async:  # otherwise no user code runs on the loop
            self.watch.begin()
        task.add_done_callback(lambda _: self._forget(session))

    def _forget(self, session: Session) -> None:
        del self._running[session]
        if self._config.kind.is_async:
            self.watch.end()

    async def _prepare(self, start: SessionStart, pipe_seed: int | None) -> None:
        # In the context of the session's task, which its fetchers' contexts are copied from.
        session_epoch.set(start.epoch)
        provide_rank(self._config.rank)
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._executor.open())
        if self._config.kind.is_async:
            await self._entered.enter(self._config.dataset)  # once; later only datasets added since
        await asyncio.shield(self._opening)
        if isinstance(self._executor, ProcessExecutor) and not self._config.kind.is_async:
            running = frozenset(session.start.epoch for session in self._running)
            states = {worker: PickledPayload.dumps(state) for worker, state in start.streams.items()}
            self._executor.broadcast(
                lambda worker: StartEpoch(start.epoch, running, start.set_epoch, pipe_seed, states.get(worker))
            )

    async def close(self, deadline: float) -> str | None:
        """Cancel the sessions, wait for them, leave the dataset, close the executor; each within `deadline` seconds.

        Returns:
            A description of the tasks that did not end in time; None if all did.
        """
        tasks = list(self._running.values())
        for session in list(self._running):
            session.cancel()
        late = (await asyncio.wait(tasks, timeout=deadline))[1] if tasks else ()
        await self._entered.exit(deadline)
        if self._opening is None:  # never used: what the constructor launched still has to be connected to be ended
            self._opening = asyncio.ensure_future(self._executor.open())
        await asyncio.wait([self._opening], timeout=deadline)
        if self._opening.done():
            self._opening.exception()  # the sessions that needed the executor have raised it
        await self._executor.close(deadline)
        return f"cancelled, and still running: {len(late)} epoch{'s' * (len(late) > 1)}" if late else None

    def kill(self) -> None:
        """End what can be ended when the loop no longer runs."""
        self._executor.kill()

    def release(self) -> None:
        """Close the descriptors that `close` could not, once the loop is closed."""
        self._executor.release()

    def _make_stage(self, begin: SessionStart, deliver: Deliver, spawn: Spawn, requests: RequestStats) -> FetchStage:
        config, dataset, options = self._config, self._config.dataset, self._config.options
        if not config.kind.is_async:
            streams = config.kind.is_iterable
            return DispatchToWorkers(
                config.num_workers, streams=streams, deliver=deliver, in_order=config.in_order, start=begin
            )
        if config.kind is DatasetKind.ASYNC_ITERABLE:
            stream = dataset, config.drop_last, config.assembler.tolerance, deliver, spawn
            return LaneFetch(begin, lambda beginning, lane: StreamFetch(*stream, beginning, lane))
        can = capabilities(dataset)
        by_batches = config.batched and can.agets and not can.ranges
        hedge = options["hedge"] is not None
        concurrency: int | AdaptiveLimit
        if options["concurrency"] != "auto":
            concurrency = options["concurrency"]
        else:
            start, most = max(1, AUTO_CONCURRENCY // config.engines), most_concurrency()
            if by_batches:  # calls; the look-ahead is as many as cover the most samples
                start, most = max(1, config.look_ahead * start // most), min(most, config.look_ahead)
            peers = config.engines * config.rank.world_size
            found = self._control  # what the last epoch found is where this one begins
            concurrency = self._control = AdaptiveLimit(start, most, peers) if found is None else found.successor()
        if by_batches:
            return BatchFetch(dataset.agets, concurrency, deliver, spawn, requests)
        if can.ranges:
            return RangeFetch(dataset, concurrency, deliver, spawn, requests, hedge=hedge, cached=can.cached_reads)
        return SampleFetch(dataset.aget, concurrency, deliver, spawn, requests, hedge=hedge)
