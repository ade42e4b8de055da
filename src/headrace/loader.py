"""The DataLoader: arguments in, iterators out."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, Self, TypeVar

import anyio
import anyio.to_thread
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterDataPipe, Sampler

from headrace._core.batches import Failure, Stage
from headrace._core.consumer.delivery import Delivery, check_pin_memory_device, should_pin
from headrace._core.consumer.epoch import AsyncBatchIterator, BatchIterator, Epoch, opened
from headrace._core.consumer.planning import Planner
from headrace._core.consumer.sampling import EpochGenerator, SeededRandomSampler
from headrace._core.descriptors import explained
from headrace._core.device.copy import Copier
from headrace._core.device.pinning import Pinning, pinned
from headrace._core.device.stage import DeviceStage
from headrace._core.device.streams import resolve, streams_of
from headrace._core.engine.assemble import Assembler
from headrace._core.engine.engine import Recipe
from headrace._core.error_policy import OnError, error_policy
from headrace._core.interface.compositions import unwrap
from headrace._core.interface.kinds import DatasetKind, capabilities, kind_of
from headrace._core.interface.replication import is_replicated
from headrace._core.interface.reprs import dataset_repr, function_name
from headrace._core.interface.torch_adapters import torch_readable, without_adapter
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.open_session import OpenSession
from headrace._core.rankinfo import RankInfo, get_rank_info
from headrace._core.runtime.assembling import AssemblingSession
from headrace._core.runtime.inline import InlineSession
from headrace._core.runtime.select import PlacementSelector
from headrace._core.runtime.thread import ThreadSession
from headrace._core.seeding import batch_seed
from headrace._core.torchcompat.datapipes import PipeSeeds, divide_pipe, seed_pipe
from headrace._core.torchcompat.portable_collate import PortableCollate
from headrace.collate import default_collate
from headrace.options import (
    MEMORY_BUDGET,
    ExecutorKind,
    Hedge,
    Options,
    Placement,
    RetryPolicy,
    Unset,
    as_policy,
    look_ahead,
)
from headrace.telemetry.counters import Counters, LoaderStats

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)

_OPTIONS = tuple(field.name for field in dataclasses.fields(Options))
_RUNTIME = ("_placements", "_epochs_open")


class _FetchedFrom(Protocol[T_co]):
    async def aget(self, index: Any, /) -> T_co: ...


class _Indexed(Protocol[T_co]):
    def __getitem__(self, index: Any, /) -> T_co: ...


class DataLoader(TorchDataLoader[T_co]):
    """Loads batches from async datasets and from torch's own, for `for` and for `async for`.

    A drop-in superset of `torch.utils.data.DataLoader`: its arguments come first, in its order, with its meaning, its
    defaults and its errors. What headrace adds is keyword-only. I/O parallelism (`concurrency`) and CPU parallelism
    (`num_workers`) are separate numbers.

    An async dataset is fetched from on an event loop of the loader's own, never on the caller's. A torch dataset is
    read where torch would read it: in the caller's thread, or inside the numbered workers.

    Args:
        dataset: an async dataset (`aget` and `__len__`, or `__aiter__`), or one of torch's.
        batch_size: samples in a batch; None for no batching.
        shuffle: whether a new random order is drawn at each epoch.
        sampler: gives the indices, one by one.
        batch_sampler: gives the indices, a batch at a time.
        num_workers: CPU processes for `transform` and `collate_fn`; 0 for the caller's own thread, inside `next()`.
        collate_fn: makes a batch of a list of samples; by default `headrace.collate.default_collate`.
        pin_memory: whether batches are copied to pinned memory, by the thread that takes them; needs an accelerator.
            With `device` there is nothing to pin.
        drop_last: whether a last batch that is not full is left out.
        timeout: seconds to wait for a batch; 0 for ever.
        worker_init_fn: called in each worker process with its number.
        multiprocessing_context: a start method or context for the workers; by default functions are shipped to
            workers forked from a clean helper process, and torch's datasets follow torch's start method. ``"fork"``
            forks the workers of an async dataset from this process, and fetches in a thread of it.
        generator: the random generator that `shuffle` draws from.
        prefetch_factor: batches to plan ahead, for each worker; by default what keeps `concurrency` fetches under way.
        persistent_workers: whether workers with a torch dataset outlive the epoch; those of an async dataset hold
            only functions, and always do.
        pin_memory_device: accepted for compatibility; must not name another device than `device`.
        in_order: whether batches come in the sampler's order, or as they are completed.
        transform: CPU work for each sample, done in the workers.
        concurrency: samples being fetched at once, across batches. ``"auto"`` begins with 64 and finds what the source
            serves best, up to 1,024: more while the rate grows, fewer when it asks for fewer or times out. With `agets`
            it is calls that are found so, at first as many as 64 samples take, and at most the look-ahead.
        memory_budget: bytes that may be fetched, or being fetched, and not yet taken by your loop; 1 GiB by default,
            None for no bound. Sizes are estimated from the samples that came, and the next batch is always fetched.
            For datasets with `aget` or `agets`.
        placement: where fetching runs. ``"thread"``: a daemon thread of this process; nothing needs pickling.
            ``"process"``: a process of its own; the trainer's Python and the loader do not slow each other. ``"auto"``:
            a process for an async dataset with workers, else a thread; `stats()` says why.
        on_error: ``"raise"``: an error of a sample is raised by `next()`, and iteration can go on. ``"skip"``: the
            batch comes without the sample, the first of an epoch is a warning, `stats()` counts all and lists the
            last. A batch that lost all its samples is replaced at the end of the epoch by one that was delivered; where
            nothing can be delivered, `TooManySkippedError` is raised. A `SkipErrors`: the same with limits. A function:
            called in the consumer's thread with each `Failure`; returns ``"skip"`` or ``"raise"``, or raises.
        retry: how headrace's own datasets try failed requests again: a `RetryPolicy`, or the most attempts at one
            request. None leaves it to the dataset.
        hedge: ``"auto"``: a fetch that holds up the next batch and takes longer than 95 % of fetches did is begun a
            second time, the first answer counts, and at most 5 % more fetches are made so. For datasets with `aget`,
            where fetching twice does no harm; of datasets of ranges, for the joined requests.
        executor: what the workers of an async dataset are: ``"process"``; or ``"thread"``, for transforms that release
            the interpreter: threads of the process that fetches (see `placement`). Threads share random generators,
            which are then not seeded.
        seed: makes the order and each batch's randomness reproducible, for any `num_workers`; None derives both from
            torch's generator. Generators that a transform holds are seeded too (docs/tuning.md, "Randomness").
        device: where batches are to be: a `torch.device`, a string or an int, as torch takes them. They are copied on a
            stream of the loader's own while the device computes, and are ready on the stream that is current in
            `next()`. ``"auto"``: the accelerator where there is one, else host memory. None or ``"cpu"``: host memory.
        device_prefetch: for how many batches, beside the one in use, copies may be under way; each takes the memory of
            a batch on the device, and as much look-ahead.

    Raises:
        ValueError: an argument is out of its range, or does not go with another; the messages are torch's.
        TypeError: an argument is of the wrong type, or `dataset` has no method to fetch with.
        DeviceUnavailableError: `device` is not there.

    Example:
        >>> import headrace as hr
        >>> class Squares(hr.AsyncDataset):
        ...     def __len__(self): return 4
        ...     async def aget(self, index): return index * index
        >>> with hr.DataLoader(Squares(), batch_size=2) as loader:
        ...     for batch in loader: print(batch)
        tensor([0, 1])
        tensor([4, 9])
    """

    transform: Callable[[Any], Any] | None
    concurrency: int | Literal["auto"]
    memory_budget: int | None
    placement: Placement
    on_error: OnError
    retry: RetryPolicy | None
    hedge: Hedge | None
    executor: ExecutorKind
    seed: int | None
    device: torch.device | str | int | None
    device_prefetch: int

    def __init__(
        self,
        dataset: Dataset[T_co] | _FetchedFrom[T_co] | AsyncIterable[T_co] | Iterable[T_co] | _Indexed[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        transform: Callable[[Any], Any] | None = None,
        concurrency: int | Literal["auto"] = "auto",
        memory_budget: int | None = MEMORY_BUDGET,
        placement: Placement = "auto",
        on_error: OnError = "raise",
        retry: RetryPolicy | int | None = None,
        hedge: Hedge | None = None,
        executor: ExecutorKind = "process",
        seed: int | None = None,
        device: torch.device | str | int | None = None,
        device_prefetch: int = 2,
    ) -> None:
        if isinstance(collate_fn, PortableCollate):  # another loader's
            transform = collate_fn.transform if transform is None else transform
            collate_fn = collate_fn.collate
        dataset = without_adapter(dataset)
        self._options = Options(
            transform=transform,
            concurrency=concurrency,
            memory_budget=memory_budget,
            placement=placement,
            on_error=on_error,
            retry=None if retry is None else as_policy(retry),
            hedge=hedge,
            executor=executor,
            seed=seed,
            device=device,
            device_prefetch=device_prefetch,
        )
        self._policy = error_policy(on_error)
        self._target_device = resolve(device)
        if self._target_device is not None and pin_memory_device:
            check_pin_memory_device(pin_memory_device, self._target_device)
        self._source, self._maps = unwrap(dataset)
        self._kind = kind_of(self._source)
        if executor == "thread" and not self._kind.is_async:
            raise ValueError('executor="thread" needs an async dataset: a torch dataset is read in worker processes')
        if seed is not None and generator is None:
            generator = EpochGenerator()
            generator.manual_seed(batch_seed(seed, 0, 0) >> 1)
        shown = torch_readable(dataset, self._kind)
        draws_order = shuffle and sampler is None and batch_sampler is None and not self._kind.is_iterable
        if draws_order and seed is not None and isinstance(generator, EpochGenerator):
            sampler, shuffle = SeededRandomSampler(shown, seed=seed, generator=generator), False
        if isinstance(prefetch_factor, Unset):  # another loader's
            prefetch_factor = None
        if collate_fn is None and batch_size is not None and self._kind.is_async:
            collate_fn = default_collate
        super().__init__(
            shown,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.__dict__["dataset"] = shown  # past the freeze; of a DataPipe torch keeps a wrapper
        for name in _OPTIONS:  # for code that rebuilds a loader; a subclass may have attributes of these names
            self.__dict__.setdefault(name, getattr(self._options, name))
        if self.prefetch_factor is not None and prefetch_factor is None:
            self.prefetch_factor = Unset(self.prefetch_factor)
        self._next_epoch = 0
        self._epoch_set = False  # by `set_epoch`, since the last iteration began
        self._split_checked = False
        self._kept_seed: int | None = None
        self._pipe_seeds = PipeSeeds()
        self._counters = Counters()
        self._at_rest()

    def _at_rest(self) -> None:
        """No engine runs, no iterator is open."""
        self._placements = PlacementSelector(self._options.placement)
        # At exit, the placements' own hook closes everything, in order.
        weakref.finalize(self, self._placements.close).atexit = False
        self._epochs_open: weakref.WeakSet[Epoch] = weakref.WeakSet()

    def __setattr__(self, attr: str, val: Any) -> None:
        if attr == "collate_fn" and "_kind" in self.__dict__:
            val = self._portable(val)
        elif attr in _OPTIONS and type(self) is DataLoader:
            warnings.warn(
                f"{attr}= is read once, when a DataLoader is made: setting it later has no effect. Make a new loader.",
                RuntimeWarning,
                stacklevel=2,
            )
        super().__setattr__(attr, val)

    def _portable(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        transform = self._options.transform
        if isinstance(collate_fn, PortableCollate):
            collate_fn = collate_fn.collate
        if transform is None and not self._kind.is_async:
            return collate_fn  # a torch loader does the same with it
        return PortableCollate(collate_fn, transform, batched=self._auto_collation)

    def __repr__(self) -> str:
        shown = [dataset_repr(self.dataset), f"batch_size={self.batch_size}"]
        if self.batch_size is None and self.batch_sampler is not None:
            shown[1] = f"batch_sampler={dataset_repr(self.batch_sampler)}"
        torchs = {"num_workers": 0, "drop_last": False, "pin_memory": False, "persistent_workers": False}
        shown += [f"{name}={value!r}" for name, usual in torchs.items() if (value := getattr(self, name)) != usual]
        for field in dataclasses.fields(self._options):
            if (value := getattr(self._options, field.name)) != field.default:
                shown.append(f"{field.name}={function_name(value) if callable(value) else repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _RUNTIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._at_rest()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the next epoch: an iterator that blocks in `next()`."""
        return BatchIterator(self._begin(), self)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Begin the next epoch: an iterator for `async for`, on any event loop."""
        return AsyncBatchIterator(self._begin(), self)

    def _begin(self) -> Epoch:
        epoch = self._next_epoch
        self._next_epoch += 1
        # The only call; engine and workers are given the result. A process group chosen by the user would be
        # used here.
        rank = get_rank_info()
        if rank.world_size > 1 and self._kind.is_iterable and not self._split_checked:
            self._check_split(rank)
        propagate_epoch(self._index_sampler, epoch, only_wanted=True)
        pipe_seed = self._pipe_seed(epoch)
        try:
            draws = iter(self._index_sampler)
            if self.num_workers and not self._kind.is_async and not self._kept_seed:
                base_seed = self._base_seed()
                draws = iter(self._index_sampler)  # torch does so too; it shows where a sampler draws in `__iter__`
                self._pipe_seed(epoch)  # as does torch, which uses the first
            else:
                base_seed = self._base_seed()
        except Exception as error:  # user code: the sampler
            raise Failure.caught(error, stage=Stage.SAMPLING, batch=0).exception() from error.__cause__
        planner = Planner(draws, batched=self._auto_collation, base_seed=base_seed, epoch=epoch, rank=rank)
        self._counters.begin()
        session = self._open_session(epoch, base_seed, pipe_seed, rank)
        inline = isinstance(session, InlineSession)
        settle: Callable[[Any, int], Any] | None
        if self._target_device is None:
            settle = Pinning(pinned) if should_pin(self.pin_memory, self.pin_memory_device) else None
        else:
            copier = Copier(streams_of(self._target_device), self._options.device_prefetch)
            session = stage = DeviceStage(session, copier, self._options.device_prefetch, opened)
            settle = stage.claim
        begun = Epoch(
            planner,
            session,
            look_ahead=0 if inline else self._look_ahead(),
            together=capabilities(self._source).ranges,
            policy=self._policy,
            stream=self._kind.is_iterable,
            as_torch=not self._kind.is_async,
            timeout=self.timeout,
            finish=self._last_step(settle),
            counters=self._counters,
        )
        self._epochs_open.add(begun)
        return begun

    def _check_split(self, rank: RankInfo) -> None:
        self._split_checked = True
        if is_replicated(self._source):
            warnings.warn(
                f"each of {rank.world_size} ranks reads all of {type(self._source).__name__}: they train on the same "
                f"samples. Split the stream by its .split() or by headrace.split(), or have it read the part of its "
                f"rank, which headrace.get_rank_info() returns in __aiter__ or __iter__. A stream that is not the same "
                f"on all ranks declares this by an attribute: splits_by_rank = True",
                UserWarning,
                stacklevel=4,
            )

    def _pipe_seed(self, epoch: int) -> int | None:
        if not isinstance(self._source, IterDataPipe):
            return None
        seed = self._options.seed
        drawn = self._pipe_seeds.draw(self.generator) if seed is None else batch_seed(seed, epoch, 0) >> 1
        seed_pipe(self._source, drawn)
        return drawn

    def _base_seed(self) -> int:
        if self._options.seed is not None:
            return self._options.seed
        # As torch does, and in the same place, so that the same torch.manual_seed gives the same order: at each iter(),
        # but only once for workers that persist.
        if self._kept_seed is None:
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            if not (self.persistent_workers and not self._kind.is_async):
                return drawn
            self._kept_seed = drawn
        return self._kept_seed

    def _look_ahead(self) -> int:
        # A fetch that is begun again takes twice the usual time and a bit, in which the others must not run dry.
        covered = self._options.fetchers * (3 if self._options.hedge else 1)
        fetchers = {DatasetKind.ASYNC_MAP: covered, DatasetKind.ASYNC_ITERABLE: 1}
        batch_size = self.batch_size or getattr(self.batch_sampler, "batch_size", None)
        ahead = look_ahead(
            prefetch_factor=None if isinstance(self.prefetch_factor, Unset) else self.prefetch_factor,
            num_workers=self.num_workers,
            concurrency=fetchers.get(self._kind, 0),
            batch_size=batch_size,
        )
        if isinstance(self.prefetch_factor, Unset | None) and capabilities(self._source).ranges:
            ahead = max(ahead, getattr(self.sampler, "samples_ahead", 0) // (batch_size or 1))
        # What waits on the device has left the workers nothing to do: it does not count.
        return ahead if self._target_device is None else ahead + self._options.device_prefetch

    def _open_session(self, epoch: int, base_seed: int, pipe_seed: int | None, rank: RankInfo) -> OpenSession:
        # A torch dataset without `wants_epoch` gets the epoch by `loader.set_epoch` alone, as in torch.
        set_epoch, self._epoch_set = self._kind.is_async or self._epoch_set, False
        self._placements.set_epoch(self._source, epoch, only_wanted=not self._kind.is_async)
        options = self._options
        transforms = self._maps if options.transform is None else (*self._maps, options.transform)
        collate_fn = self.collate_fn.collate if isinstance(self.collate_fn, PortableCollate) else self.collate_fn
        assembler = Assembler(transforms, collate_fn, self._auto_collation, self._policy.tolerance)
        if not self._kind.is_async and self.num_workers == 0:
            self._counters.placement = "inline: a torch dataset with num_workers=0 is read in the caller's thread"
            iterable = self._kind.is_iterable
            divide_pipe(self._source, rank)
            return InlineSession(
                self._source, iterable=iterable, assembler=assembler, drop_last=self.drop_last, epoch=epoch, rank=rank
            )
        if options.seed is not None:
            # For workers that seed themselves by torch's rule: they draw differently in each epoch and rank.
            base_seed += (epoch * rank.world_size + rank.rank) * self.num_workers
        deferred = not self.num_workers and options.placement != "process" and assembler.runs_user_code
        recipe = Recipe(
            dataset=self._source,
            kind=self._kind,
            assembler=assembler,
            num_workers=self.num_workers,
            executor=options.executor,
            deferred=deferred,
            concurrency=None if options.concurrency == "auto" else options.concurrency,
            memory_budget=options.memory_budget,
            look_ahead=self._look_ahead(),
            retry=options.retry,
            hedge=options.hedge is not None,
            batched=self._auto_collation,
            drop_last=self.drop_last,
            in_order=self.in_order,
            base_seed=base_seed,
            common_seed=options.seed or 0,
            worker_init_fn=self.worker_init_fn,
            context=self.multiprocessing_context,
            rank=rank,
            pipe_seed=pipe_seed,
        )
        # As in torch, workers that do not persist hold a copy of the dataset as it is now, and end with the epoch.
        persistent = self.persistent_workers
        with explained("start the loader"):
            session: OpenSession = self._placements.open(recipe, epoch, set_epoch=set_epoch, persistent=persistent)
        self._counters.placement = self._placements.where
        if isinstance(session, ThreadSession) and (deferred or recipe.steps_on_consumers_thread):
            return AssemblingSession(session, self._source, assembler, rank)
        return session

    def _last_step(self, settle: Callable[[Any, int], Any] | None) -> Delivery:
        return Delivery(
            settle=settle,
            dataset=without_adapter(self.dataset),
            announced=self._IterableDataset_len_called,  # set by torch's `__len__`, of streams only
            copies=self.num_workers > 0 and not self._kind.is_async,
        )

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, and tell the sampler, the batch sampler and the dataset.

        Args:
            epoch: the epoch's number, from 0. Without this call each iteration is the next epoch.

        Raises:
            ValueError: `epoch` is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, but got {epoch}")
        self._next_epoch = epoch
        self._epoch_set = True
        for part in (self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None)):
            propagate_epoch(part, epoch)
        self._placements.set_epoch(self._source, epoch, only_wanted=False)

    def stats(self) -> LoaderStats:
        """What has been delivered, skipped and waited for, over all epochs so far."""
        return self._counters.snapshot()

    def close(self) -> None:
        """End every iteration, the workers and the engine; blocks until they have ended.

        Iterators that are still open raise `LoaderClosedError` at their next batch. The loader itself can be iterated
        again, and then starts anew. Leaving a `with` block calls this, and so does dropping the loader.
        """
        for epoch in list(self._epochs_open):
            epoch.close()
        self._placements.close()

    async def aclose(self) -> None:
        """As `close`, without blocking the caller's event loop."""
        for epoch in list(self._epochs_open):
            epoch.close()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._placements.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()
