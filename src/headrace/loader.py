"""The public class `DataLoader`."""

from __future__ import annotations

import copy
import typing
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, Unpack

import torch
from torch.utils.data import DistributedSampler, Sampler

from headrace._base.text import check_function, whole_number
from headrace._consumer import rewind
from headrace._consumer.control import LoaderControl, trainers
from headrace._consumer.epoch import AsyncBatchIterator, BatchIterator, LateIterator
from headrace._device.streams import resolve
from headrace._links.select import check_automatic, check_engines
from headrace._order.samplers import (
    RankSampler,
    SeededRandomSampler,
    check_mixed,
    own_sampler,
)
from headrace._order.spec import LoaderSpec, TorchLoader
from headrace._order.state import states_from_dict, states_to_dict
from headrace._records.error_policy import error_policy
from headrace._streams.kinds import DatasetKind, kind_of
from headrace._streams.torch_views import torch_readable, unwrap, without_adapter
from headrace._torchcompat.portable_collate import (
    PortableCollate,
    same,
    without_transform,
)
from headrace.collate import default_collate
from headrace.options import (
    OPTIONS,
    LoaderOptions,
    Samples,
    checked_options,
    shown_in_signature,
)
from headrace.telemetry.counters import LoaderStats

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # of `typing` from Python 3.13 on

    from headrace.telemetry.report import Report

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    T_co = typing.TypeVar("T_co", covariant=True)

__all__ = ["DataLoader"]


class DataLoader(TorchLoader, Generic[T_co]):
    """Load batches from async datasets and from torch datasets.

    `DataLoader` is a drop-in superset of `torch.utils.data.DataLoader`, for `for` and `async for`.
    Torch's arguments come first, with torch's meaning and errors. The loader reads an async dataset
    on its own event loop. A torch dataset is read where torch would read it: in the caller's thread
    or in workers. docs/reference/options.md explains each argument.

    Args:
        dataset: an async dataset (`aget` and `__len__`, or `__aiter__`), or a torch dataset.
        batch_size: number of samples in a batch; None for no batching.
        shuffle: whether to draw a new random order for each epoch. The order of an indexed dataset
            is random by blocks (docs/shards.md).
        sampler: yields single indices.
        batch_sampler: yields the list of indices of each batch.
        num_workers: number of CPU processes for `transform` and `collate_fn`, and for a torch
            dataset. 0: the caller's thread does the work, inside `next()`. ``"auto"``: the loader
            begins with a single worker and finds the best number while running.
        collate_fn: combines a list of samples into a batch; by default `headrace.default_collate`.
        pin_memory: whether the thread that calls `next()` copies batches to pinned memory.
        drop_last: whether to leave out an incomplete last batch.
        timeout: seconds to wait for a batch; 0 for no limit.
        worker_init_fn: called in each worker process with the number of the worker.
        multiprocessing_context: start method or context for the workers.
        generator: random generator for the order of `shuffle`.
        prefetch_factor: number of batches to plan ahead for each worker.
        persistent_workers: whether workers of a torch dataset outlive the epoch. Workers of an
            async dataset always outlive the epoch.
        pin_memory_device: accepted for compatibility, and deprecated as in torch.
        in_order: whether batches come in the sampler's order. False: batches come in the order of
            completion. Batches of async streams always come in order.

    Fetching:
        concurrency: number of samples in flight, across batches. ``"auto"``: the loader finds the
            best number for the source.
        memory_budget: limit of the bytes fetched, or in flight, and not taken; None for no limit.
        retry: a `RetryPolicy` for requests of headrace's datasets, or the most attempts.
        hedge: ``"auto"``: the loader repeats slow fetches of the next two batches, for at most 5 %
            more fetches. None: no hedging.

    Placement:
        placement: where to fetch: ``"thread"``, ``"process"``, ``"auto"``, or a `RayPlacement`.
        engines: number of fetching processes, for more objects/s than a single interpreter serves.

    Results:
        transform: CPU work on each sample, in the workers.
        on_error: ``"raise"``, ``"skip"``, a `SkipErrors` with limits, or a function of a
            `headrace.types.Failure`.
        seed: seed of the order and of the random numbers of each batch. None: torch's generator
            gives both, but the order of an indexed dataset then has seed 0.

    Device:
        device: device of the batches. ``"auto"``: the accelerator if present, else host memory.
        device_prefetch: number of batches that may be copied ahead, beside the batch in use.

    Ranks:
        data_parallel: the ranks that get different batches: a process group, ``mesh["dp"]``, or a
            function without arguments that returns either.
        coordinated: whether the epoch ends at the same step on all ranks. The first rank without
            a further batch ends the epoch.

    Raises:
        ValueError: an argument is out of range, or excludes another argument. Messages about
            torch's arguments are torch's.
        TypeError: an argument has the wrong type, or `dataset` has no method to fetch with.
        DeviceUnavailableError: `device` is not available.

    Example:
        >>> import headrace as hr
        >>> with hr.DataLoader([1, 2, 3], batch_size=2) as loader:
        ...     for batch in loader: print(batch)
        tensor([1, 2])
        tensor([3])
    """

    dataset: Any
    _control: LoaderControl

    @shown_in_signature
    def __init__(
        self,
        dataset: Samples,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], T_co] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: object = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        **options: Unpack[LoaderOptions],
    ) -> None:
        collate: Any = collate_fn
        # A trainer rebuilds a loader from the attributes of another headrace loader.
        rebuilt = isinstance(collate, PortableCollate)
        if rebuilt and options.get("transform") is None:
            options["transform"] = collate.portable_parts.transform
        collate = without_transform(collate)
        if collate is not None:
            check_function("collate_fn", collate)
        dataset = without_adapter(dataset)
        # An argument of torchdata's StatefulDataLoader.
        options.pop("snapshot_every_n_steps", None)  # type: ignore[typeddict-item]
        checked = checked_options(options)
        device = resolve(checked["device"])
        source, maps = unwrap(dataset)
        kind = kind_of(source)
        policy = error_policy(checked["on_error"])
        spec = LoaderSpec(source, kind, maps, checked, policy, device)
        self._control = LoaderControl(spec)
        workers = num_workers
        if workers == "auto":
            check_automatic(kind, checked, multiprocessing_context)
            workers = self._control.search.number
        check_engines(checked, kind, workers)
        seed = checked["seed"]
        shown = torch_readable(dataset, kind)
        check_mixed(source, sampler, batch_sampler, generator)
        given = sampler is not None or batch_sampler is not None or generator is not None
        if not (given or kind.is_iterable):
            sampler = own_sampler(source, shown, shuffle=bool(shuffle), seed=seed or 0)
            if sampler is None and shuffle and seed is not None:
                sampler = SeededRandomSampler(shown, seed=seed)
            shuffle = shuffle and sampler is None
        elif type(sampler) is DistributedSampler and seed is not None and rebuilt:
            sampler = RankSampler(
                sampler.dataset,  # type: ignore[arg-type]
                shuffle=sampler.shuffle,
                seed=seed,
                rank=sampler.rank,
                world_size=sampler.num_replicas,
                drop_last=sampler.drop_last,
            )
        if collate is None and batch_size is not None and kind.is_async:
            collate = default_collate
        if shuffle and kind is DatasetKind.ASYNC_ITERABLE:
            text = (
                "DataLoader with IterableDataset: "
                f"expected unspecified shuffle option, but got shuffle={shuffle}"
            )
            refused = ValueError(text)
            refused.add_note(
                "headrace: shuffle the stream, by its .shuffle(buffer_size); "
                "shards by their shuffle=True"
            )
            raise refused
        super().__init__(
            shown,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            workers,
            collate,
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
        # Keep both arguments as given. A trainer that rebuilds the loader from these attributes
        # then gets the same search and the same look-ahead.
        self.__dict__.update(num_workers=num_workers, prefetch_factor=prefetch_factor)
        # Torch forbids to set `dataset` after `__init__`, and keeps a wrapper of a DataPipe.
        self.__dict__["dataset"] = shown
        # Code that rebuilds a loader reads the options. A subclass may define the same names.
        for name, value in checked.items():
            if not hasattr(self, name):
                self.__dict__[name] = value
        self._control.start_early(self)

    @property
    def num_workers(self) -> int:
        """Number of workers; with ``"auto"`` the present number."""
        given = self.__dict__["num_workers"]
        return self._control.search.number if given == "auto" else given

    @num_workers.setter
    def num_workers(self, number: int) -> None:
        self.__dict__["num_workers"] = number

    @property
    def prefetch_factor(self) -> int | None:
        """Number of batches to plan ahead for each worker.

        As in torch, the default is 2 with workers, and None without workers.
        """
        given = self.__dict__["prefetch_factor"]
        return 2 if given is None and self.num_workers > 0 else given

    @prefetch_factor.setter
    def prefetch_factor(self, batches: int | None) -> None:
        self.__dict__["prefetch_factor"] = batches

    @property
    def _iterator(self) -> Any:
        """Iterator of a subclass, or None.

        Trainers set the attribute to None to end the workers of a torch loader. Here None closes
        the epochs and the engine.
        """
        return self.__dict__.get("_iterator")

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.__dict__["_iterator"] = value
        if value is None:
            DataLoader.close(self)  # a subclass may have another `close`, not usable yet

    def __setattr__(self, attr: str, val: Any) -> None:
        if attr == "collate_fn" and "_control" in self.__dict__:
            val = self._portable(val)
        elif attr in OPTIONS and type(self) is DataLoader and attr in self.__dict__:
            warnings.warn(
                f"{attr}= is read once, when a DataLoader is made: setting it later has no effect. "
                "Make a new loader.",
                RuntimeWarning,
                stacklevel=2,
            )
        super().__setattr__(attr, val)

    def _portable(self, collate_fn: Callable[[Any], object]) -> Callable[[Any], object]:
        spec = self._control.spec
        transform = spec.options["transform"]
        collate_fn = without_transform(collate_fn)
        # A plain torch loader would ignore options of this kind.
        ignored = any(
            spec.options[name] != OPTIONS[name].default for name in ("on_error", "device")
        )
        loses = transform is not None or spec.kind.is_async or ignored
        if not loses and spec.options["seed"] is None:
            return collate_fn  # a torch loader gives the same batches
        return PortableCollate(
            collate_fn,
            transform,
            batched=self._auto_collation,
            warn=None if loses else same,
        )

    def __getstate__(self) -> dict[str, object]:
        # A copy of a loader starts an engine of its own.
        return {**self.__dict__, "_control": copy.copy(self._control)}

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        """Begin the next epoch and return a blocking iterator."""
        return self._get_iterator()

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        if self._control.spec.options["data_parallel"] is None:
            return super().__len__()
        with self._control.ranked():
            return super().__len__()

    def _get_iterator(self) -> Iterator[T_co]:  # type: ignore[override]
        """Return the iterator of an epoch.

        `torch.utils.data.DataLoader.__iter__` calls this method. Subclasses may call or override
        the method.
        """
        if any(trainer.begins(self) for trainer in trainers):
            return iter(())
        with self._control.ranked() as rank:
            late = bool(trainers) or type(self.sampler) is RankSampler
            return self._control.begin(BatchIterator, self, rank, late_epoch=late)

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Return an async iterator of the next epoch, for any event loop.

        The epoch begins at the first `anext`.
        """
        if type(self)._get_iterator is not DataLoader._get_iterator:
            kind = type(self).__name__
            raise TypeError(
                f"{kind} has a _get_iterator() of its own, "
                "which `async for` would leave out: use `for`"
            )
        return LateIterator(self._begin_async)

    def _begin_async(self) -> AsyncBatchIterator[T_co]:
        with self._control.ranked() as rank:
            return self._control.begin(AsyncBatchIterator, self, rank)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, counted from 0.

        The samplers and the dataset get the number too. Without `set_epoch`, each iteration is the
        next epoch.
        """
        self._control.set_epoch(self, whole_number("epoch", epoch))

    def state_dict(self, lag: int = 0) -> dict[str, Any]:
        """Return the position after the last batch of `next()`.

        The position belongs to the iteration begun last. Batches fetched ahead do not count. Before
        the first iteration, and after the end of an epoch, the position is the beginning of the
        next epoch. `state_dict` starts no process or thread, and does not communicate. See
        docs/resuming.md.

        Args:
            lag: number of calls of `next()` to go back, 0 to 8, for a caller that reads ahead.

        Returns:
            A state for `load_state_dict`.

        Raises:
            ValueError: the position before `lag` calls is not known.

        Example:
            >>> import headrace as hr
            >>> batches = iter(loader := hr.DataLoader([1, 2, 3, 4], batch_size=2))
            >>> first, state = next(batches), loader.state_dict()
            >>> loader.load_state_dict(state)
            >>> list(loader)
            [tensor([3, 4])]
        """
        return states_to_dict(self._control.position.states(self, lag))

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue from a result of `state_dict`.

        The next iteration gives the rest of the saved epoch.

        Raises:
            StateError: the state is damaged, or does not fit this loader. Some states fail only at
                `iter()` or `next()`, with the same error.
        """
        self._control.position.restore(self, states_from_dict(state_dict))

    def batch_at(
        self,
        epoch: int,
        step: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> T_co:
        """Compute the batch of any step, bit for bit.

        The step may be in the past or in the future. The loader needs `seed`. See
        docs/resuming.md.

        Args:
            epoch: number of the epoch, counted from 0.
            step: number of the batch in the epoch, counted from 0.
            rank: the rank that gets the batch; by default the rank of this process.
            world_size: number of ranks at the step; by default the number in the loaded state, or
                the present number for steps after the state.

        Returns:
            The batch that `next()` returned, or will return, at this step.

        Raises:
            IndexError: the epoch ends before this step.
            StateError: the number of ranks, the batch size or the exclusions were different at this
                step.
            TypeError: the dataset is a stream.
            ValueError: the order or the randomness does not follow from a seed.

        Example:
            >>> import headrace as hr
            >>> loader = hr.DataLoader([1, 2, 3, 4], batch_size=2, shuffle=True, seed=0)
            >>> loader.batch_at(0, 1).equal(list(loader)[1]), loader.samples_at(0, [0, 1])
            (True, [[3, 2], [1, 0]])
        """
        batch: T_co = rewind.batch_at(self, epoch, step, rank, world_size)
        return batch

    def samples_at(
        self,
        epoch: int,
        steps: Iterable[int],
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> list[list[Any]]:
        """Return the keys of the samples of steps.

        Samples of a dataset without keys are named by index. Arguments and errors are as for
        `batch_at`, with numbers of several batches.

        Returns:
            A list of keys for each step.
        """
        return rewind.samples_at(self, epoch, steps, rank, world_size)

    def exclude(
        self,
        *,
        steps: Mapping[int, Iterable[int]] | None = None,
        keys: Iterable[Any] = (),
    ) -> None:
        """Leave out samples from the next iteration on.

        For instance, leave out the samples of steps at which the loss spiked. The next iteration
        continues after the last batch, or from the loaded state. The remaining samples move up:
        batches stay full, and steps are numbered anew. Exclusions are part of the state. Call
        `exclude` on every rank with the same arguments. See docs/resuming.md.

        Args:
            steps: for each epoch, numbers of batches to leave out on all ranks, counted as for
                `batch_at`.
            keys: keys from `samples_at`, or indices, of samples to leave out of all epochs.

        Raises:
            IndexError: a step or an index does not exist.
            KeyError: a key does not exist.
            ValueError: the order does not follow from a seed, or the dataset is a stream (use
                `.filter`).

        Example:
            >>> import headrace as hr
            >>> loader = hr.DataLoader(range(8), batch_size=2, shuffle=True, seed=0)
            >>> loader.exclude(steps={0: [1]}, keys=[7])
            >>> [batch.tolist() for batch in loader]
            [[3, 4], [6, 2], [5]]
        """
        rewind.exclude(self, steps or {}, keys)

    def stats(self) -> LoaderStats:
        """Return counts of batches, samples, requests and waiting times."""
        return copy.copy(self._control.counters.stats)

    def report(self) -> Report:
        """Report where the time of the last iteration went.

        The report names the limit of the loader and a change that helps. The report covers at most
        the last 4,096 batches. Calls during an iteration are allowed. See docs/my-gpu-waits.md.
        """
        from headrace.telemetry.report import make_report

        return make_report(self._control.counters.records(), self._control.setup(self))

    def close(self) -> None:
        """End every iteration, the workers and the engine.

        `close` blocks until all have ended. Leaving a `with` block closes the loader, and so does
        dropping the last reference. A closed loader can be iterated again.
        """
        self._control.close_epochs()
        self._control.close_engine()

    async def aclose(self) -> None:
        """Close the loader without blocking the caller's event loop."""
        self._control.close_epochs()
        import anyio.to_thread  # takes 3 ms, and only async programs need anyio

        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._control.close_engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()
