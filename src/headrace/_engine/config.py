"""The configuration of an engine, in this or another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from headrace._engine.assemble import Assembler
from headrace._engine.worker_tasks import AssembleTask, ReadTask
from headrace._ranks.rankinfo import RankInfo
from headrace._streams.kinds import DatasetKind
from headrace._transport.shared_pickle import SharedPickle, raise_unpicklable
from headrace.options import LoaderOptions


class EngineConfig(NamedTuple):
    dataset: Any  # the dataset to fetch from, without functions queued by `map`
    kind: DatasetKind
    assembler: Assembler
    # Workers of all engines. With 0, a helper thread assembles, or the consumer if `deferred`.
    num_workers: int
    options: LoaderOptions  # options for the engine
    deferred: bool  # whether the CPU work is left to the consumer's thread
    look_ahead: int  # maximum number of batches planned and not yet taken
    drop_last: bool
    in_order: bool
    base_seeds: Mapping[int | None, int]  # by worker, for workers of torch datasets
    worker_init_fn: Callable[[int], Any] | None
    context: Any  # the user's `multiprocessing` context, or None
    # The rank of the consumer's process. Another rank needs another engine, because worker
    # processes receive the rank at their start.
    rank: RankInfo
    engine: int = 0  # the number of this engine
    engines: int = 1

    def part(self, engine: int, engines: int) -> EngineConfig:
        """Return the configuration of an engine among several engines.

        The engines divide workers, fetches and memory. Each engine delivers batches out of order;
        the receiver of all engines' batches restores the order.
        """
        if engines == 1:
            return self
        options = self.options.copy()
        if options["concurrency"] != "auto":
            share, rest = divmod(options["concurrency"], engines)
            options["concurrency"] = max(1, share + (engine < rest))
        if options["memory_budget"] is not None:
            options["memory_budget"] = max(1, options["memory_budget"] // engines)
        return self._replace(
            options=options, in_order=False, engine=engine, engines=engines
        )

    @property
    def workers(self) -> range:
        return range(self.engine, self.num_workers, self.engines)

    @property
    def has_processes(self) -> bool:
        return self.num_workers > 0

    @property
    def functions_on_consumers_thread(self) -> bool:
        """Whether the consumer's thread applies functions before batching.

        True for a stream without workers, if the engine runs in the consumer's process.
        """
        return self.kind is DatasetKind.ASYNC_ITERABLE and self.num_workers == 0

    def worker_task(self) -> AssembleTask:
        """Return the CPU work of a batch, for a worker or a thread of a sidecar.

        A worker also reads a torch dataset.
        """
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
            base_seeds=self.base_seeds,
        )

    @property
    def functions_of_epoch(self) -> bool:
        """Whether an engine receives the functions with each epoch.

        Otherwise the workers keep the first functions.
        """
        return self.kind.is_async and not (
            self.has_processes and self.context is not None
        )

    @property
    def workers_are_forks(self) -> bool:
        return (
            self.has_processes
            and self.context is not None
            and self.context.get_start_method() == "fork"
        )

    def without_functions(self) -> EngineConfig:
        return self._replace(
            assembler=replace(self.assembler, transforms=(), collate=list),
            worker_init_fn=None,
        )

    def same_engine(self, other: EngineConfig) -> bool:
        """Whether an engine can run both configurations.

        The configurations may only differ in parts that belong to an epoch.
        """
        mine, theirs = (
            (
                config.without_functions() if config.functions_of_epoch else config
            )._replace(dataset=None, base_seeds={})
            for config in (self, other)
        )
        return self.dataset is other.dataset and mine == theirs


def pickled_config(config: EngineConfig, *, portable: bool = False) -> SharedPickle:
    """Return the pickled configuration without functions.

    Raises:
        NotPicklableError: the dataset cannot be pickled.
    """
    try:
        return SharedPickle.dumps(config.without_functions(), portable=portable)
    except Exception as error:
        name_unpicklable(config, error)


MAKE_LATER = (
    "Worker processes need a copy of it, and it holds something that cannot leave this process "
    "(a lock, a socket, an open file): make that inside the function, at its first call, or use "
    "num_workers=0. Take primitives of multiprocessing from get_context('spawn'), or use "
    "multiprocessing_context='fork'."
)
_OPEN_LATER = (
    "The loader's process needs a copy of it: open connections by headrace.per_loop, "
    "or use placement='thread'."
)


def name_unpicklable(config: EngineConfig, error: Exception) -> NoReturn:
    """Raise an error about the unpicklable part of a configuration.

    If each part can be pickled, raise `error`.
    """
    assembler, dataset = config.assembler, config.dataset
    parts: list[tuple[str, object, str]] = [
        (f"transform {each!r}", each, MAKE_LATER) for each in assembler.transforms
    ]
    parts += [
        (f"collate_fn {assembler.collate!r}", assembler.collate, MAKE_LATER),
        (f"worker_init_fn {config.worker_init_fn!r}", config.worker_init_fn, MAKE_LATER),
        (
            f"dataset {type(dataset).__name__}",
            dataset,
            _OPEN_LATER if config.kind.is_async else MAKE_LATER,
        ),
    ]
    raise_unpicklable(parts, error)
