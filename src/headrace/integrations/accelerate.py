"""Integration with Hugging Face accelerate."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

import accelerate
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.state import GradientState
from accelerate.utils import broadcast_object_list
from torch.utils.data import BatchSampler, DistributedSampler

from headrace._base.text import dataset_repr
from headrace._ranks.rankinfo import RankInfo, temporary_rank
from headrace._streams.kinds import splits_by_rank
from headrace._streams.torch_views import unwrap, without_adapter
from headrace._torchcompat.portable_collate import PortableCollate, without_transform
from headrace.integrations._shared import (
    BatchwiseSampler,
    copied_to,
    load_state,
    save_state,
)
from headrace.loader import DataLoader

__all__ = ["PreparedLoader", "prepare"]

T_co = TypeVar("T_co", covariant=True)

_END = object()


def prepare(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any]
) -> PreparedLoader[Any]:
    """Prepare a headrace loader for accelerate.

    `Accelerator.prepare` turns other loaders into plain torch loaders, and leaves a loader prepared
    by this function unchanged. A prepared loader still fetches with headrace, and does the work of
    accelerate's loader:

    - The ranks share a map-style dataset batch by batch. Any number of ranks can continue an
      epoch. A `DistributedSampler` and a stream divide samples without accelerate.
    - Batches are copied to the accelerator's device, unless the accelerator was made with
      ``device_placement=False``.
    - `save_state` and `load_state` of the accelerator include the position of the loader.

    Args:
        accelerator: the accelerator.
        loader: the loader. The loader stays unchanged, and must not be iterated over. A prepared
            loader is returned unchanged.

    Returns:
        A loader of the same class. `accelerator.prepare` accepts the loader too.

    Raises:
        TypeError: `loader` is not a headrace loader.
        ValueError: the ranks would get the same samples; or the accelerator has
            `split_batches=True`, `dispatch_batches=True` or `even_batches=False`, or needs loaders
            of its own.

    Example:
        >>> import accelerate                                                  # doctest: +SKIP
        >>> import headrace as hr                                              # doctest: +SKIP
        >>> from headrace.integrations.accelerate import prepare               # doctest: +SKIP
        >>> accelerator = accelerate.Accelerator()                             # doctest: +SKIP
        >>> loader = hr.DataLoader(dataset, 32, shuffle=True, seed=0)          # doctest: +SKIP
        >>> loader = prepare(accelerator, loader)                              # doctest: +SKIP
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            "expected a headrace.DataLoader before accelerator.prepare(), "
            f"but got a {type(loader).__name__}"
        )
    prepared = _divided(accelerator, loader)
    if next(_loaders(accelerator), None) is None:
        accelerator.register_save_state_pre_hook(functools.partial(_save, accelerator))
        accelerator.register_load_state_pre_hook(functools.partial(_load, accelerator))
    accelerator.prepare_data_loader(prepared)  # adds the loader to the accelerator's list
    return prepared


def _loaders(
    accelerator: accelerate.Accelerator,
) -> Iterator[tuple[str, PreparedLoader[Any]]]:
    """Yield the prepared loaders of an accelerator, with file names."""
    for number, loader in enumerate(accelerator._dataloaders):
        if isinstance(loader, PreparedLoader):
            yield f"headrace_loader_{number}", loader


def _save(
    accelerator: accelerate.Accelerator, models: Any, weights: Any, folder: str
) -> None:
    for name, loader in _loaders(accelerator):
        save_state(loader.state_dict(), folder, name, loader._rank.rank)


def _load(accelerator: accelerate.Accelerator, models: Any, folder: str) -> None:
    for name, loader in _loaders(accelerator):
        state = load_state(folder, name, loader._rank)
        if state is not None:
            loader.load_state_dict(state)
        else:
            warnings.warn(
                f"{folder} has no {name}: the loader's next epoch begins anew",
                UserWarning,
                stacklevel=3,
            )


class PreparedLoader(DataLoader[T_co]):
    """A headrace loader prepared for accelerate.

    `headrace.integrations.accelerate.prepare` creates prepared loaders, and `Accelerator.prepare`
    leaves a prepared loader unchanged. accelerate needs to know the last batch of an epoch. So the
    loader receives the following batch before giving out a batch. `state_dict()` does not count the
    following batch.

    Attributes:
        end_of_dataloader: whether the batch given out last is the last batch of the epoch.
        remainder: number of samples of all ranks in the last step, without padding; 0 if the last
            step is full, -1 if unknown.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = False  # accelerate would save a single state for all ranks
    end_of_dataloader = False
    remainder = -1
    # The data-parallel rank; `headrace.get_rank_info` returns the same rank inside the loader.
    _rank: RankInfo
    _iteration: object = None  # the iteration begun last
    _ahead = 0  # number of `next()` calls after the batch given out last

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        """Begin the next epoch, or continue the restored epoch."""
        position = self._control.position
        restored = position.resumed
        if not restored:
            self.set_epoch(position.next_epoch)  # as accelerate does for each epoch
        remainder = -1
        if isinstance(self.sampler, BatchwiseSampler) and not self.drop_last:
            remainder = self.sampler.remainder(restored[0].cursor if restored else 0)
        self._ahead = 0
        with self._as_rank():
            batches = super().__iter__()
        self._iteration = iteration = object()
        return self._one_ahead(batches, iteration, remainder)

    __aiter__ = None  # type: ignore[assignment]  # accelerate's loops are synchronous

    def _as_rank(self) -> contextlib.AbstractContextManager[None]:
        return (
            temporary_rank(self._rank)
            if self._rank.world_size > 1
            else contextlib.nullcontext()
        )

    def _one_ahead(
        self, batches: Iterator[Any], iteration: object, remainder: int
    ) -> Iterator[Any]:
        """Yield each batch after receiving the following batch."""
        state, position = GradientState(), self._control.position

        def last_point() -> Any:
            # `__iter__` of a subclass may be a generator, which begins the epoch later.
            return None if position.progress is None else position.progress.last_point

        state._add_dataloader(self)
        self.end_of_dataloader, self.remainder = False, remainder
        batch: Any
        error = None
        try:
            with self._as_rank():
                batch = next(batches, _END)
            while batch is not _END and error is None:
                before = last_point()
                following: Any = None
                try:
                    with self._as_rank():
                        following = next(batches, _END)
                except Exception as raised:
                    # Raised below, in the turn of the failed batch.
                    error = raised
                self.end_of_dataloader = following is _END
                if self._iteration is iteration:
                    self._ahead = int(following is _END or last_point() is not before)
                yield batch
                batch = following
            if self._iteration is iteration:
                self._ahead = 0
            if error is not None:
                raise error
        finally:
            state._remove_dataloader(self)

    def state_dict(self, lag: int = 0) -> dict[str, Any]:
        """Return the position after the batch given out last.

        See `headrace.DataLoader.state_dict`.
        """
        return super().state_dict(lag + self._ahead)

    def _portable(self, collate_fn: Callable[[Any], object]) -> Callable[[Any], object]:
        transform = self._control.spec.options["transform"]
        return PortableCollate(
            without_transform(collate_fn),
            transform,
            batched=self._auto_collation,
            warn=_refuse,
        )


def _refuse() -> NoReturn:
    raise RuntimeError(
        "a plain torch DataLoader was rebuilt from a prepared headrace loader, "
        "without headrace's engine. Iterate over the prepared loader itself, without "
        "skip_first_batches: accelerator.load_state() restores the loader's position."
    )


def _divided(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any]
) -> PreparedLoader[Any]:
    """Return a prepared copy of a loader.

    The copy gives this rank's batches, on this rank's device. A prepared loader is returned
    unchanged.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if (kind := accelerator.distributed_type.value) in ("XLA", "MEGATRON_LM"):
        raise ValueError(
            f"headrace loaders cannot be prepared for {kind}, which needs loaders of its own"
        )
    if (
        accelerator.split_batches
        or accelerator.dispatch_batches
        or not accelerator.even_batches
    ):
        raise ValueError(
            "each rank reads equal numbers of whole batches: headrace loaders do not support "
            "split_batches=True, dispatch_batches=True and even_batches=False"
        )
    made: Any = copied_to(
        loader, accelerator.device if accelerator.device_placement else None
    )
    cls: Any = type(loader)
    made.__class__ = (
        PreparedLoader
        if cls is DataLoader
        else type(
            f"Prepared{cls.__name__}",
            (PreparedLoader, cls),
            {"__module__": cls.__module__},
        )
    )
    _divide(made, accelerator)
    return cast(PreparedLoader[Any], made)


def _divide(loader: PreparedLoader[Any], accelerator: accelerate.Accelerator) -> None:
    rank = loader._rank = _data_parallel_rank(accelerator)
    # The collate function becomes a function that refuses to run in a rebuilt loader.
    loader.collate_fn = loader.collate_fn
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler: Any = getattr(order, "sampler", order)
    own = next(
        (each for each in (sampler, order) if isinstance(each, DistributedSampler)), None
    )
    if loader._control.spec.kind.is_iterable or own is not None:
        # The stream or sampler divides samples among ranks.
        _check_ranks(loader, own, rank)
    elif type(loader.batch_sampler) is BatchSampler:
        _share_order(loader, accelerator, loader.batch_sampler)
    elif order is sampler and loader.batch_sampler is None:
        _share_order(loader, accelerator, BatchSampler(sampler, 1, drop_last=False))
    elif rank.world_size > 1 and not splits_by_rank(order):
        raise ValueError(
            f"each of {rank.world_size} ranks would read all batches of {type(order).__name__}: "
            "let it draw from a headrace.ElasticSampler, its attribute `sampler`; or let it give "
            "its rank's batches, by headrace.get_rank_info(), and declare this: "
            "splits_by_rank = True"
        )


def _share_order(
    loader: PreparedLoader[Any],
    accelerator: accelerate.Accelerator,
    batches: BatchSampler,
) -> None:
    """Share the order of a loader among the ranks, batch by batch."""
    seed = loader._control.spec.options["seed"]
    if seed is None:
        seed = accelerator.dataloader_config.data_seed or 0
    generator = getattr(batches.sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        (seed,) = broadcast_object_list([generator.initial_seed()])
    size, drop_last = batches.batch_size, batches.drop_last
    sampler = BatchwiseSampler(
        batches.sampler, size, loader._rank, seed, drop_last=drop_last
    )
    attributes = loader.__dict__  # torch forbids to set samplers after `__init__`
    attributes.update(sampler=sampler, drop_last=drop_last)
    if loader.batch_sampler is not None:
        batch_sampler = BatchSampler(sampler, size, drop_last)
        attributes.update(batch_sampler=batch_sampler, batch_size=size)


def _data_parallel_rank(accelerator: accelerate.Accelerator) -> RankInfo:
    """Return the data-parallel rank.

    Ranks of tensor and context parallelism share batches, and so share a data-parallel rank.
    """
    mesh: Any = accelerator._prepare_device_mesh()
    sizes = (
        {}
        if mesh is None
        else dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    )
    shared = sizes.get("tp", 1) * sizes.get("cp", 1)
    return RankInfo(
        accelerator.process_index // shared,
        accelerator.num_processes // shared,
        "accelerate",
    )


def _check_ranks(
    loader: PreparedLoader[Any], sampler: DistributedSampler[Any] | None, rank: RankInfo
) -> None:
    """Check that the sampler or the stream divides samples among ranks.

    Raises:
        ValueError: this rank would get the samples of other ranks.
    """
    if sampler is not None:
        with temporary_rank(rank):
            own, ranks = sampler.rank, sampler.num_replicas
        if (own, ranks) != (rank.rank, rank.world_size):
            raise ValueError(
                f"{type(sampler).__name__} was given rank {own} of {ranks}, "
                f"and this is rank {rank.rank} of {rank.world_size}: "
                "leave it out, since prepare() divides the dataset"
            )
        return
    stream, _ = unwrap(without_adapter(loader.dataset))
    # Streams of Hugging Face datasets have an attribute `_distributed`.
    of_library = (
        isinstance(stream, IterableDatasetShard)
        or getattr(stream, "_distributed", None) is not None
    )
    if rank.world_size > 1 and not of_library and not splits_by_rank(stream):
        raise ValueError(
            f"each of {rank.world_size} ranks would read all of {dataset_repr(loader.dataset)}: "
            "use its .split(), or let it read its rank's part, by headrace.get_rank_info(), "
            "and declare this: splits_by_rank = True"
        )
