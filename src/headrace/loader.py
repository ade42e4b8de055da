"""The DataLoader: arguments in, iterators out."""

from __future__ import annotations

import copy
import typing
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler, Sampler

from headrace._core.consumer import rewind
from headrace._core.consumer.control import LoaderControl, trainers
from headrace._core.consumer.epoch import AsyncBatchIterator, BatchIterator
from headrace._core.device.streams import resolve
from headrace._core.error_policy import error_policy
from headrace._core.links.select import check_automatic, check_engines
from headrace._core.order.samplers import RankSampler, SeededRandomSampler, check_mixed, own_sampler
from headrace._core.order.spec import LoaderSpec
from headrace._core.order.state import states_from_dict, states_to_dict
from headrace._core.streams.kinds import DatasetKind, kind_of
from headrace._core.streams.torch_views import torch_readable, unwrap, without_adapter
from headrace._core.text import whole_number
from headrace._core.torchcompat.portable_collate import PortableCollate, same, without_transform
from headrace.collate import default_collate
from headrace.options import OPTIONS, LoaderOptions, Samples, checked_options, shown_in_signature
from headrace.telemetry.counters import LoaderStats

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # of `typing` from Python 3.13 on

    from headrace.telemetry.report import Report

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    T_co = typing.TypeVar("T_co", covariant=True)

__all__ = ["DataLoader"]


class DataLoader(TorchDataLoader[T_co]):
    """Loads batches from async datasets and from torch's own, for `for` and for `async for`.

    A drop-in superset of `torch.utils.data.DataLoader`: its arguments come first, with its meaning
    and its errors. Async datasets are read on an event loop of the loader's own; torch's are read
    where torch would read them. docs/reference/options.md says more of each argument.

    Args:
        dataset: an async dataset (`aget` and `__len__`, or `__aiter__`), or one of torch's.
        batch_size: samples in a batch; None for no batching.
        shuffle: whether a new random order is drawn at each epoch; of indexed datasets in blocks
            (docs/ranks.md).
        sampler: yields the indices one by one.
        batch_sampler: yields the indices of a batch at a time.
        num_workers: CPU processes for `transform` and `collate_fn`; 0 for the caller's own thread,
            inside `next()`; ``"auto"`` begins with one, and finds the number while the loader runs.
        collate_fn: makes a batch of a list of samples; by default `headrace.default_collate`.
        pin_memory: whether batches are copied to pinned memory, by the thread that takes them.
        drop_last: whether a last batch that is not full is left out.
        timeout: seconds to wait for a batch; 0 for ever.
        worker_init_fn: called in each worker process with its number.
        multiprocessing_context: a start method or context for the workers.
        generator: the random generator that `shuffle` draws from.
        prefetch_factor: batches to plan ahead, for each worker; by default enough for `concurrency`
            fetches.
        persistent_workers: whether workers with a torch dataset outlive the epoch; others always
            do.
        pin_memory_device: accepted for compatibility, and deprecated as in torch.
        in_order: whether batches come in the sampler's order, or as they are completed; async
            streams in order always.
    Fetching:
        concurrency: samples being fetched at once, across batches; ``"auto"`` finds what the source
            serves best.
        memory_budget: bytes that may be fetched, or being fetched, and not yet taken; None for no
            bound.
        retry: how datasets of headrace try failed requests again: a `RetryPolicy`, or the most
            attempts.
        hedge: ``"auto"``: fetches that hold up the next two batches are begun again; at most 5 %
            more.
    Placement:
        placement: where fetching runs: ``"thread"``, ``"process"``, ``"auto"``, or a
            `RayPlacement`.
        engines: number of processes that fetch, for more objects/s than one interpreter serves.
    Results:
        transform: CPU work for each sample, done in the workers.
        on_error: ``"raise"``, ``"skip"``, a `SkipErrors` with limits, or a function of a
            `headrace.types.Failure`.
        seed: makes the order and each batch's randomness reproducible; None derives both from
            torch's generator.
    Device:
        device: where batches are to be; ``"auto"``: the accelerator where there is one.
        device_prefetch: for how many batches, beside the one in use, copies may be under way.
    Ranks:
        data_parallel: the ranks that get different batches: a process group, ``mesh["dp"]``, or a
            function of none.
        coordinated: whether the epoch ends at the same step on all ranks, with the first that has
            no more.

    Raises:
        ValueError: an argument is out of its range, or does not go with another; the messages are
            torch's.
        TypeError: an argument is of the wrong type, or `dataset` has no method to fetch with.
        DeviceUnavailableError: `device` is not there.

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
        rebuilt = isinstance(collate, PortableCollate)  # with the arguments of another loader
        if rebuilt and options.get("transform") is None:
            options["transform"] = collate.portable_parts.transform
        collate = without_transform(collate)
        dataset = without_adapter(dataset)
        options.pop("snapshot_every_n_steps", None)  # type: ignore[typeddict-item]  # of torchdata's StatefulDataLoader
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
        check_engines(checked["engines"], checked["placement"], kind, workers)
        seed = checked["seed"]
        shown = torch_readable(dataset, kind)
        check_mixed(source, sampler, batch_sampler, generator)
        draws_order = (
            sampler is None and batch_sampler is None and not kind.is_iterable and generator is None
        )
        own = None
        if draws_order:
            own = own_sampler(source, shown, shuffle=bool(shuffle), seed=seed or 0)
        if own is not None:
            sampler, shuffle = own, False
        elif draws_order and shuffle and seed is not None:
            sampler, shuffle = SeededRandomSampler(shown, seed=seed), False
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
            text = f"DataLoader with IterableDataset: expected unspecified shuffle option, but got shuffle={shuffle}"
            refused = ValueError(text)
            refused.add_note(
                "headrace: shuffle the stream, by its .shuffle(buffer_size); shards by their shuffle=True"
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
        # As given: a trainer that makes a loader anew from these has the same search, and the same
        # look-ahead.
        self.__dict__.update(num_workers=num_workers, prefetch_factor=prefetch_factor)
        self.__dict__["dataset"] = shown  # past the freeze; of a DataPipe torch keeps a wrapper
        for (
            name,
            value,
        ) in checked.items():  # for code that rebuilds a loader; subclasses may have these names
            if not hasattr(self, name):
                self.__dict__[name] = value
        self._control.start_early(self)

    @property
    def num_workers(self) -> int:
        """The number of workers; with ``"auto"`` the present one."""
        given = self.__dict__["num_workers"]
        return self._control.search.number if given == "auto" else given

    @num_workers.setter
    def num_workers(self, number: int) -> None:
        self.__dict__["num_workers"] = number

    @property
    def prefetch_factor(self) -> int | None:
        """The number of batches to plan ahead for each worker; by default 2 where there are workers, as in torch."""
        given = self.__dict__["prefetch_factor"]
        return 2 if given is None and self.num_workers > 0 else given

    @prefetch_factor.setter
    def prefetch_factor(self, batches: int | None) -> None:
        self.__dict__["prefetch_factor"] = batches

    @property
    def _iterator(self) -> Any:
        """A subclass's own; trainers that are done with a torch loader set it to None, to end its workers."""
        return self.__dict__.get("_iterator")

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.__dict__["_iterator"] = value
        if value is None:
            self._control.close_epochs()
            self._control.close_engine()

    def __setattr__(self, attr: str, val: Any) -> None:
        if attr == "collate_fn" and "_control" in self.__dict__:
            val = self._portable(val)
        elif attr in OPTIONS and type(self) is DataLoader and attr in self.__dict__:
            warnings.warn(
                f"{attr}= is read once, when a DataLoader is made: setting it later has no effect. Make a new loader.",
                RuntimeWarning,
                stacklevel=2,
            )
        super().__setattr__(attr, val)

    def _portable(self, collate_fn: Callable[[Any], object]) -> Callable[[Any], object]:
        spec = self._control.spec
        transform = spec.options["transform"]
        collate_fn = without_transform(collate_fn)
        # Whether a plain torch loader would ignore some of it.
        ignored = any(
            spec.options[name] != OPTIONS[name].default for name in ("on_error", "device")
        )
        loses = transform is not None or spec.kind.is_async or ignored
        if not loses and spec.options["seed"] is None:
            return collate_fn  # a torch loader does the same with it
        return PortableCollate(
            collate_fn, transform, batched=self._auto_collation, warn=None if loses else same
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_control": copy.copy(self._control)}  # an engine is of one loader

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        """Begin the next epoch: an iterator that blocks in `next()`."""
        return self._get_iterator()

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        if self._control.spec.options["data_parallel"] is None:
            return super().__len__()
        with self._control.ranked():
            return super().__len__()

    def _get_iterator(self) -> Iterator[T_co]:  # type: ignore[override]
        """The iterator of an epoch: torch's loader calls it in `__iter__`, and subclasses call and replace it."""
        if any(trainer.begins(self) for trainer in trainers):
            return iter(())
        with self._control.ranked() as rank:
            late = bool(trainers) or type(self.sampler) is RankSampler
            return self._control.begin(BatchIterator, self, rank, late_epoch=late)

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Begin the next epoch: an iterator for `async for`, on any event loop."""
        if type(self)._get_iterator is not DataLoader._get_iterator:
            kind = type(self).__name__
            raise TypeError(
                f"{kind} has a _get_iterator() of its own, which `async for` would leave out: use `for`"
            )
        with self._control.ranked() as rank:
            return self._control.begin(AsyncBatchIterator, self, rank)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, from 0, also for the samplers and the dataset.

        Without this call each iteration is the next epoch.
        """
        self._control.set_epoch(self, whole_number("epoch", epoch))

    def state_dict(self, lag: int = 0) -> dict[str, Any]:
        """The position after the last batch that `next()` returned, in the iteration begun last.

        Batches that were fetched ahead are not part of it. Before the first iteration, and after
        the end of an epoch, it is the beginning of the next epoch. It starts nothing and does not
        communicate. docs/resuming.md says more.

        Args:
            lag: number of calls of `next()` before, up to 8, for a caller that has read ahead.

        Raises:
            ValueError: the state of so many calls before is not known.

        Example:
            >>> import headrace as hr
            >>> batches = iter(loader := hr.DataLoader([1, 2, 3, 4], batch_size=2))
            >>> first, state = next(batches), loader.state_dict()
            >>> loader.load_state_dict(state)
            >>> list(loader)
            [tensor([3, 4])]
        """
        return states_to_dict(self._control.states(self, lag))

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue after a saved position: the next iteration gives the rest of that epoch.

        Args:
            state_dict: from `state_dict`.

        Raises:
            StateError: the state is damaged, or does not fit this loader; `iter()` and `next()` may
                raise it too.
        """
        self._control.restore(self, states_from_dict(state_dict))

    def batch_at(
        self, epoch: int, step: int, *, rank: int | None = None, world_size: int | None = None
    ) -> T_co:
        """The batch that was, or will be, delivered at a step of an epoch, computed again, bit for bit.

        Needs `seed`. `rank` is by default that of this process, and `world_size` what the loaded
        state knows of that step, or that of now. docs/resuming.md says more.

        Raises:
            IndexError: the epoch has not so many steps.
            StateError: ranks, batch size or exclusions were others then.
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
        """The keys of the samples of some steps, without reading them: of a dataset without keys, the indices.

        Arguments and errors are those of `batch_at`.
        """
        return rewind.samples_at(self, epoch, steps, rank, world_size)

    def exclude(
        self, *, steps: Mapping[int, Iterable[int]] | None = None, keys: Iterable[Any] = ()
    ) -> None:
        """Leave samples out, such as those of steps at which the loss has spiked; from the next iteration on.

        The next iteration continues after the last batch, or after the state that was loaded. What
        is left moves up, so that batches stay full, and is numbered anew. The state has the
        exclusions. Call it on every rank, with the same arguments. docs/resuming.md says more.

        Args:
            steps: for each epoch, numbers of batches, on all ranks; as `batch_at` counts them.
            keys: of samples, as `samples_at` gives them, or indices; they are left out of all
                epochs.

        Raises:
            IndexError: there is no such step or index.
            KeyError: there is no such key.
            ValueError: the order does not follow from a seed, or this is a stream: `.filter` it.

        Example:
            >>> import headrace as hr
            >>> loader = hr.DataLoader(range(8), batch_size=2, shuffle=True, seed=0)
            >>> loader.exclude(steps={0: [1]}, keys=[7])
            >>> [batch.tolist() for batch in loader]
            [[3, 4], [6, 2], [5]]
        """
        rewind.exclude(self, steps or {}, keys)

    def stats(self) -> LoaderStats:
        """The raw numbers: counts of batches, samples, skips, requests and waiting, over all epochs so far."""
        return self._control.counters.snapshot()

    def report(self) -> Report:
        """How the time of the last iteration was spent, what limits the loader, and the change that helps.

        It covers the last 4,096 batches at most, and may be called during an iteration; see
        docs/my-gpu-waits.md.
        """
        from headrace.telemetry.report import make_report

        return make_report(self._control.counters.records(), self._control.setup(self))

    def close(self) -> None:
        """End every iteration, the workers and the engine; blocks until they have ended.

        Leaving a `with` block calls this, and so does dropping the loader, which can be iterated
        again.
        """
        self._control.close_epochs()
        self._control.close_engine()

    async def aclose(self) -> None:
        """As `close`, without blocking the caller's event loop."""
        self._control.close_epochs()
        import anyio.to_thread  # 3 ms, for which a program without an event loop need not wait

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
