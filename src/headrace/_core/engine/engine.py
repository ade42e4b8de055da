"""The engine: fetch and assemble, with the executor they share. One piece of code wherever it is placed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import multiprocessing

from headrace._core.engine.assemble import Assembler
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.executors import DeferringExecutor, Executor, ProcessExecutor, ThreadExecutor, Work
from headrace._core.engine.fetch import BatchFetch, Deliver, FetchStage, SampleFetch
from headrace._core.engine.fetch_pool import Spawn
from headrace._core.engine.memory import BoundedFetch
from headrace._core.engine.range_fetch import RangeFetch
from headrace._core.engine.session import BatchSink, Session
from headrace._core.engine.stepping import AppliesSteps
from headrace._core.engine.streams import DispatchToWorkers, StreamFetch
from headrace._core.engine.worker_tasks import AssembleTask, ReadTask, StartEpoch
from headrace._core.interface.async_contexts import EnteredDatasets
from headrace._core.interface.epochs import session_epoch
from headrace._core.interface.kinds import DatasetKind, capabilities, sample_key
from headrace._core.pool.launch import ZygoteLauncher
from headrace._core.pool.processes import ContextLauncher, Launcher
from headrace._core.pool.supervisor import Pool
from headrace._core.pool.worker import WorkerTask
from headrace._core.rankinfo import RankInfo, provide_rank
from headrace._core.store.request_stats import RequestStats
from headrace._core.transport.shared_pickle import SharedPickle
from headrace._core.transport.sharing import why_not_picklable
from headrace.collate import destined
from headrace.errors import NotPicklableError
from headrace.options import AUTO_CONCURRENCY, LoaderOptions, as_policy, most_concurrency


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that an engine needs to know of a loader.

    Attributes:
        dataset: where samples are fetched, without what `map` queued.
        kind: how it is fetched from.
        assembler: the CPU work.
        num_workers: CPU workers; 0 for a helper thread, or for none where `deferred`.
        options: headrace's own options that are for the engine.
        deferred: whether the CPU work is left to the consumer's thread.
        look_ahead: batches that may be planned and not yet taken.
        batched: whether a plan is a batch.
        drop_last: whether a stream's last batch is left out when it is not full.
        in_order: whether batches leave in plan order.
        base_seed: what torch datasets' workers are seeded from.
        common_seed: the seed of random numbers that are the same on all ranks.
        pipe_seed: the seed of a data pipe's random pipes in this epoch.
        worker_init_fn: called in each worker with its number.
        context: a `multiprocessing` context the user asked for.
        rank: the rank of the consumer's process. Another rank needs another engine, whose processes are given it at
            their start.
    """

    dataset: Any
    kind: DatasetKind
    assembler: Assembler
    num_workers: int
    options: LoaderOptions
    deferred: bool
    look_ahead: int
    batched: bool
    drop_last: bool
    in_order: bool
    base_seed: int
    common_seed: int
    worker_init_fn: Callable[[int], Any] | None
    context: Any
    rank: RankInfo
    pipe_seed: int | None = None

    @property
    def has_processes(self) -> bool:
        """Whether there are worker processes."""
        return self.num_workers > 0 and self.options["executor"] == "process"

    @property
    def steps_on_consumers_thread(self) -> bool:
        """Whether functions of a stream are applied there before batching, where this process is the consumer's."""
        return self.kind is DatasetKind.ASYNC_ITERABLE and self.num_workers == 0

    def seeding_assembler(self) -> AssembleTask:
        """The CPU work of an async dataset's batch, in a process whose random generators are ours."""
        assembler = replace(self.assembler, collate=destined(self.assembler.collate))
        return AssembleTask(assembler, self.rank, self.worker_init_fn)

    def helper(self, *, seeds: bool) -> AssembleTask:
        """The same in a thread there, which does not wait until a batch is sent, and seeds only if it is alone."""
        default = destined(self.assembler.collate) is not self.assembler.collate
        return replace(self.seeding_assembler(), copies=not default, seeds=seeds)

    def worker_task(self) -> WorkerTask:
        """What the workers run."""
        if self.kind.is_async:
            return self.seeding_assembler()
        return ReadTask(
            self.dataset,
            iterable=self.kind.is_iterable,
            assembler=self.assembler,
            drop_last=self.drop_last,
            base_seed=self.base_seed,
            rank=self.rank,
            worker_init_fn=self.worker_init_fn,
        )

    @property
    def functions_of_epoch(self) -> bool:
        """Whether an engine is sent the functions with each epoch; otherwise its workers keep the first ones."""
        return self.kind.is_async and not (self.has_processes and self.context is not None)

    @property
    def workers_are_forks(self) -> bool:
        """Whether the user chose workers forked from this process."""
        return self.has_processes and self.context is not None and self.context.get_start_method() == "fork"

    def work(self) -> Any:
        """The assembly of batches outside this thread: a task for workers, or a function for threads."""
        return self.worker_task() if self.has_processes else self.helper(seeds=self.num_workers <= 1)

    def without_functions(self) -> EngineConfig:
        """The other parts of the config, which fetching needs."""
        return replace(self, assembler=replace(self.assembler, transforms=(), collate=list), worker_init_fn=None)

    def same_engine(self, other: EngineConfig) -> bool:
        """Whether one engine can run both: they differ in nothing but what belongs to an epoch."""
        of_epoch: dict[str, Any] = {"dataset": None, "base_seed": 0, "pipe_seed": None}
        mine, theirs = (
            replace(config.without_functions() if config.functions_of_epoch else config, **of_epoch)
            for config in (self, other)
        )
        return self.dataset is other.dataset and mine == theirs

    def parts(self) -> dict[str, Any]:
        """What travels to worker processes, by the name the user knows it by."""
        functions = {f"transform {fn!r}": fn for fn in self.assembler.transforms}
        parts = {**functions, f"collate_fn {self.assembler.collate!r}": self.assembler.collate}
        if self.worker_init_fn is not None:
            parts[f"worker_init_fn {self.worker_init_fn!r}"] = self.worker_init_fn
        if not self.kind.is_async:
            parts[f"dataset {type(self.dataset).__name__}"] = self.dataset
        return parts

    def launcher(self) -> Launcher:
        """How the workers are started: a torch dataset's by torch's start method, functions by the zygote."""
        if self.context is not None:
            return ContextLauncher(self.context)
        if not self.kind.is_async:
            return ContextLauncher(multiprocessing.get_context())
        return ZygoteLauncher()


class Engine:
    """Runs sessions on one event loop. Its placement owns it: makes it, opens it on the loop, closes it.

    Worker processes are started by the constructor, before any loop or thread of the engine exists.

    Args:
        config: what to run.
        first_task: the first task of worker processes, already pickled; by default the configuration's.
        owns_process: nothing but this engine runs in the process, so that a helper thread may seed its generators.

    Raises:
        NotPicklableError: a function has to go to worker processes and cannot.
    """

    def __init__(
        self, config: EngineConfig, first_task: SharedPickle | None = None, *, owns_process: bool = False
    ) -> None:
        self._config = config
        self._control: AdaptiveLimit | None = None  # the last epoch's
        self._executor: Executor
        self._applies: AppliesSteps | None = None
        self._broadcast: Callable[[object], None] | None = None
        if config.has_processes:
            self._executor = self._applies = executor = ProcessExecutor(_launched(config, first_task))
            if not config.kind.is_async:
                self._broadcast = executor.broadcast
        elif config.deferred:
            self._executor = DeferringExecutor()
        else:
            threads = max(1, config.num_workers)
            self._executor = self._applies = ThreadExecutor(threads, config.rank, seeds=owns_process and threads == 1)
        self._opening: asyncio.Task[None] | None = None
        self._entered = EnteredDatasets()
        self._running: dict[Session, asyncio.Task[None]] = {}
        self._epochs: dict[Session, int] = {}

    def session(self, handoff: BatchSink, work: Work, steps: AppliesSteps | None = None) -> Session:
        """A new session, not yet running; may be called from any thread.

        Args:
            handoff: where its batches go.
            work: assembles the batches.
            steps: where functions of a stream are applied before batching; by default in the executor.
        """
        retry = self._config.options["retry"]
        return Session(
            make_stage=self._make_stage,
            assembler=self._config.assembler,
            executor=self._executor,
            work=work,
            steps=steps or self._applies,
            common_seed=self._config.common_seed,
            handoff=handoff,
            in_order=self._config.in_order,
            sample_key=functools.partial(sample_key, self._config.dataset),
            requests=RequestStats(None if retry is None else as_policy(retry)),
        )

    @property
    def usable(self) -> bool:
        """False once its executor has failed to open."""
        opening = self._opening
        return opening is None or not opening.done() or (not opening.cancelled() and opening.exception() is None)

    def start(self, session: Session, epoch: int, *, set_epoch: bool, pipe_seed: int | None = None) -> None:
        """Run a session as a task of the running loop; `set_epoch` and `pipe_seed` as in `StartEpoch`."""
        prepare = functools.partial(self._prepare, epoch, set_epoch, pipe_seed)
        task = asyncio.get_running_loop().create_task(session.run(prepare))
        self._running[session] = task
        self._epochs[session] = epoch
        task.add_done_callback(lambda _: self._forget(session))

    def _forget(self, session: Session) -> None:
        del self._running[session], self._epochs[session]

    async def _prepare(self, epoch: int, set_epoch: bool, pipe_seed: int | None) -> None:
        # In the context of the session's task, which its fetchers' contexts are copied from.
        session_epoch.set(epoch)
        provide_rank(self._config.rank)
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._executor.open())
        if self._config.kind.is_async:
            await self._entered.enter(self._config.dataset)  # once; later only datasets added since
        await asyncio.shield(self._opening)
        if self._broadcast is not None:
            running = frozenset(self._epochs.values())
            self._broadcast(StartEpoch(epoch, running, set_epoch, pipe_seed))

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

    def _make_stage(self, deliver: Deliver, spawn: Spawn, requests: RequestStats) -> FetchStage:
        """The stage that fetches, by the kind of the dataset."""
        config = self._config
        dataset = config.dataset
        if not config.kind.is_async:
            streams = config.kind.is_iterable
            return DispatchToWorkers(config.num_workers, streams=streams, deliver=deliver, in_order=config.in_order)
        if config.kind is DatasetKind.ASYNC_ITERABLE:
            return StreamFetch(dataset, config.drop_last, config.assembler.tolerance, deliver, spawn)
        budget = config.options["memory_budget"]
        if budget is None:
            return self._make_fetch(deliver, spawn, requests)
        return BoundedFetch(
            lambda through: self._make_fetch(through, spawn, requests), budget, config.look_ahead, deliver
        )

    def _make_fetch(self, deliver: Deliver, spawn: Spawn, requests: RequestStats) -> FetchStage:
        """The stage for samples that are fetched by index, by the capabilities of the dataset."""
        config = self._config
        dataset = config.dataset
        can = capabilities(dataset)
        by_batches = config.batched and can.agets and not can.ranges
        concurrency: int | AdaptiveLimit
        options = config.options
        hedge = options["hedge"] is not None
        if options["concurrency"] == "auto":
            start, most = AUTO_CONCURRENCY, most_concurrency()
            if by_batches:  # calls; the look-ahead is as many as cover the most samples
                start, most = max(1, config.look_ahead * start // most), min(most, config.look_ahead)
            found = self._control  # what the last epoch found is where this one begins
            concurrency = self._control = AdaptiveLimit(start, most) if found is None else found.successor()
        else:
            concurrency = options["concurrency"]
        if by_batches:
            return BatchFetch(dataset.agets, concurrency, deliver, spawn, requests)
        if can.ranges:
            return RangeFetch(dataset, concurrency, deliver, spawn, requests, hedge=hedge, cached=can.cached_reads)
        return SampleFetch(dataset.aget, concurrency, deliver, spawn, requests, hedge=hedge)


def name_unpicklable(config: EngineConfig, error: Exception) -> NoReturn:
    """Raise the error that says what in the config cannot be pickled; `error` itself if each part can."""
    for what, part in config.parts().items():
        if (reason := why_not_picklable(part)) is not None:
            remedy = (
                "Worker processes need a copy of it, and it holds something that cannot leave this process (a lock, a "
                "socket, an open file): make that inside the function, at its first call, or use num_workers=0."
            )
            raise NotPicklableError(what=what, reason=reason, remedy=remedy) from error
    if (reason := why_not_picklable(config.dataset)) is not None:
        remedy = (
            "The loader's process needs a copy of it: open connections in `async def __aenter__` of the dataset, or by "
            "headrace.per_loop; or use placement='thread'."
        )
        what = f"dataset {type(config.dataset).__name__}"
        raise NotPicklableError(what=what, reason=reason, remedy=remedy) from error
    raise error


def _launched(config: EngineConfig, first_task: SharedPickle | None) -> Pool:
    stateful = config.kind is DatasetKind.ITERABLE
    try:
        first = config.worker_task() if first_task is None else first_task
        pool = Pool(first, workers=config.num_workers, launcher=config.launcher(), stateful=stateful)
        pool.launch()
    except Exception as error:
        name_unpicklable(config, error)
    return pool
