"""The configuration of an engine, which can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from headrace._core.engine.assemble import Assembler
from headrace._core.engine.worker_tasks import AssembleTask, ReadTask
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.streams.kinds import DatasetKind
from headrace._core.transport.shared_pickle import why_not_picklable
from headrace.collate import is_default
from headrace.errors import NotPicklableError
from headrace.options import LoaderOptions


class EngineConfig(NamedTuple):
    dataset: Any  # where samples are fetched, without what `map` queued
    kind: DatasetKind
    assembler: Assembler
    num_workers: int  # of all engines; 0 for a helper thread, or for none where `deferred`
    options: LoaderOptions  # those that are for the engine
    deferred: bool  # whether the CPU work is left to the consumer's thread
    look_ahead: int  # batches that may be planned and not yet taken
    drop_last: bool
    in_order: bool
    base_seed: int  # what torch datasets' workers are seeded from
    worker_init_fn: Callable[[int], Any] | None
    context: Any  # a `multiprocessing` context the user asked for
    # of the consumer's process; another needs another engine, whose processes get it at their start
    rank: RankInfo
    engine: int = 0  # its number
    engines: int = 1

    def part(self, engine: int, engines: int) -> EngineConfig:
        """The configuration of one of several engines, which divide workers, fetches and memory.

        Batches are put in order where those of all engines arrive.
        """
        if engines == 1:
            return self
        options = self.options.copy()
        if options["concurrency"] != "auto":
            share, rest = divmod(options["concurrency"], engines)
            options["concurrency"] = max(1, share + (engine < rest))
        if options["memory_budget"] is not None:
            options["memory_budget"] = max(1, options["memory_budget"] // engines)
        return self._replace(options=options, in_order=False, engine=engine, engines=engines)

    @property
    def workers(self) -> range:
        return range(self.engine, self.num_workers, self.engines)

    @property
    def has_processes(self) -> bool:
        return self.num_workers > 0

    @property
    def steps_on_consumers_thread(self) -> bool:
        """Whether functions of a stream are applied there before batching, where this process is the consumer's."""
        return self.kind is DatasetKind.ASYNC_ITERABLE and self.num_workers == 0

    def worker_task(self) -> AssembleTask:
        """The CPU work of a batch in a worker process; a torch dataset is read there too."""
        parts: dict[str, Any] = {"rank": self.rank, "worker_init_fn": self.worker_init_fn}
        if self.kind.is_async:
            return AssembleTask(assembler=self.assembler, **parts)
        return ReadTask(
            assembler=self.assembler,
            **parts,
            seeds=self.options["seed"] is not None,
            dataset=self.dataset,
            iterable=self.kind.is_iterable,
            drop_last=self.drop_last,
            base_seed=self.base_seed,
        )

    @property
    def functions_of_epoch(self) -> bool:
        """Whether an engine is sent the functions with each epoch; otherwise its workers keep the first ones."""
        return self.kind.is_async and not (self.has_processes and self.context is not None)

    @property
    def workers_are_forks(self) -> bool:
        return (
            self.has_processes
            and self.context is not None
            and self.context.get_start_method() == "fork"
        )

    def work(self) -> Any:
        """The assembly of batches outside this thread: a task for workers, or a function for a thread."""
        task = self.worker_task()
        if self.has_processes:
            return task
        # a thread does not wait until it is sent
        return replace(task, copies=not is_default(self.assembler.collate))

    def without_functions(self) -> EngineConfig:
        return self._replace(
            assembler=replace(self.assembler, transforms=(), collate=list), worker_init_fn=None
        )

    def same_engine(self, other: EngineConfig) -> bool:
        """Whether one engine can run both: they differ in nothing but what belongs to an epoch."""
        mine, theirs = (
            (config.without_functions() if config.functions_of_epoch else config)._replace(
                dataset=None, base_seed=0
            )
            for config in (self, other)
        )
        return self.dataset is other.dataset and mine == theirs


_MAKE_LATER = (
    "Worker processes need a copy of it, and it holds something that cannot leave this process (a lock, a socket, an "
    "open file): make that inside the function, at its first call, or use num_workers=0. Take primitives of "
    "multiprocessing from get_context('spawn'), or use multiprocessing_context='fork'."
)
_OPEN_LATER = (
    "The loader's process needs a copy of it: open connections by headrace.per_loop, "
    "or use placement='thread'."
)


def name_unpicklable(config: EngineConfig, error: Exception) -> NoReturn:
    """Raise the error that says what in the config cannot be pickled; `error` itself if each part can."""
    for what, part in (
        *((f"transform {function!r}", function) for function in config.assembler.transforms),
        (f"collate_fn {config.assembler.collate!r}", config.assembler.collate),
        (f"worker_init_fn {config.worker_init_fn!r}", config.worker_init_fn),
        (f"dataset {type(config.dataset).__name__}", config.dataset),
    ):
        if (reason := why_not_picklable(part)) is not None:
            fetched = part is config.dataset and config.kind.is_async
            raise NotPicklableError(
                what=what, reason=reason, remedy=_OPEN_LATER if fetched else _MAKE_LATER
            ) from error
    raise error
