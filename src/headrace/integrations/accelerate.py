"""Hugging Face accelerate: loaders that `Accelerator.prepare` leaves as they are, and which do their part."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

import accelerate
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import GradientState
from accelerate.utils import synchronize_rng_states
from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader as TorchDataLoader

from headrace._core.device.streams import resolve
from headrace._core.ranks.rankinfo import RankInfo, provided_rank
from headrace._core.torchcompat.portable_collate import PortableCollate
from headrace.integrations._batchwise import BatchwiseBatches, BatchwiseSampler
from headrace.integrations._rank_files import load_state, save_state
from headrace.loader import DataLoader
from headrace.options import AllOptions

__all__ = ["PreparedLoader", "prepare", "skip_first_batches"]

T_co = TypeVar("T_co", covariant=True)

_END = object()
_attached: weakref.WeakSet[accelerate.Accelerator] = weakref.WeakSet()


def prepare(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any], *, device_placement: bool | None = None
) -> PreparedLoader[Any]:
    """Prepare a headrace loader for accelerate; headrace goes on fetching.

    `Accelerator.prepare` makes a plain torch loader of any loader but of one from here. What it would do is done:

    - A map-style dataset is divided among the ranks batch by batch, by `even_batches`, `split_batches` and `drop_last`.
      Any number of ranks can continue an epoch. The order is that of the loader's `seed`; without one, of `data_seed`
      of the accelerator, or 0. That of another sampler follows from the `initial_seed` of its generator, or else from
      that number, and from the epoch. The batches of a batch sampler are divided by accelerate's `BatchSamplerShard`.
      A `DistributedSampler` and a stream divide themselves, and are not divided again.
    - Batches are copied to the accelerator's device, by headrace (see `device=` of the loader).
    - Gradient accumulation, `gather_for_metrics` and `join_uneven_inputs` know the last batch and its size.
    - `save_state` and `load_state` include the position, of every rank, whatever `use_stateful_dataloader` is: the next
      iteration continues the epoch. `accelerator.skip_first_batches` skips without fetching, except in streams.

    Args:
        accelerator: the accelerator.
        loader: the loader; it is not changed, and not to be iterated over. A prepared loader is returned as it is.
        device_placement: whether batches are copied to the accelerator's device; by default as the accelerator does.

    Returns:
        A loader of the same class, which may also be given to `accelerator.prepare`.

    Raises:
        TypeError: `loader` is not one of headrace.
        ValueError: `split_batches=True`, and the batch size is no multiple of the number of ranks.

    Example:
        >>> import accelerate                                                             # doctest: +SKIP
        >>> import headrace as hr                                                         # doctest: +SKIP
        >>> from headrace.integrations.accelerate import prepare                          # doctest: +SKIP
        >>> accelerator = accelerate.Accelerator()                                        # doctest: +SKIP
        >>> loader = hr.DataLoader(dataset, batch_size=32, shuffle=True, seed=0)          # doctest: +SKIP
        >>> loader = prepare(accelerator, loader)                                         # doctest: +SKIP
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"prepare() is for headrace loaders before accelerator.prepare(), but got a {type(loader).__name__}; "
            f"other loaders are prepared by accelerator.prepare()"
        )
    prepared = divided(accelerator, loader, device_placement)
    accelerator.prepare_data_loader(prepared)  # which keeps it in its list
    if accelerator not in _attached:
        _attached.add(accelerator)
        own = weakref.proxy(accelerator)  # which would otherwise have references to itself
        accelerator.register_save_state_pre_hook(functools.partial(_save, own))
        accelerator.register_load_state_pre_hook(functools.partial(_load, own))
        cast(Any, accelerator).skip_first_batches = skip_first_batches
    return prepared


def skip_first_batches(loader: TorchDataLoader[Any], num_batches: int = 0) -> Any:
    """As `accelerate.skip_first_batches`, also for prepared headrace loaders.

    The epoch that begins next begins after `num_batches` batches, which are not fetched; those of a stream are, and
    dropped. After `load_state`, which restores the position, it does nothing if that is the same.

    Args:
        loader: a prepared loader, of headrace or of accelerate.
        num_batches: number of batches of this rank.

    Returns:
        A headrace loader itself: its next iteration is the rest of the epoch, and the one after it the next epoch. Its
        `len()` is still that of the whole epoch.

    Raises:
        ValueError: `load_state` has restored another position.
    """
    if not isinstance(loader, PreparedLoader):
        return accelerate.skip_first_batches(loader, num_batches)
    loader.skip(num_batches)
    return loader


def _loaders(accelerator: accelerate.Accelerator) -> Iterator[tuple[str, PreparedLoader[Any]]]:
    """The prepared loaders of an accelerator, and the names of their files."""
    for number, loader in enumerate(accelerator._dataloaders):
        if isinstance(loader, PreparedLoader):
            yield f"headrace_loader_{number}", loader


def _save(accelerator: accelerate.Accelerator, models: Any, weights: Any, folder: str) -> None:
    for name, loader in _loaders(accelerator):
        save_state(loader.state_dict(), folder, name, loader._rank.rank)


def _load(accelerator: accelerate.Accelerator, models: Any, folder: str) -> None:
    for name, loader in _loaders(accelerator):
        state = load_state(folder, name, loader._rank)
        if state is not None:
            loader.load_state_dict(state)
        else:
            warnings.warn(
                f"{folder} has no {name}: the loader's next epoch begins anew. It was saved without "
                f"headrace.integrations.accelerate.prepare(), or with fewer loaders.",
                UserWarning,
                stacklevel=3,
            )


class PreparedLoader(DataLoader[T_co]):
    """A headrace loader that has been prepared for accelerate; made by `headrace.integrations.accelerate.prepare`.

    `Accelerator.prepare` returns it unchanged. While it is iterated over it is the active loader of accelerate's
    `GradientState`, which has to know of a batch that it is the last: therefore one more batch has been received when
    a batch is given out. `state_dict()` does not count it.

    Attributes:
        end_of_dataloader: whether the batch given out last is the last of its epoch.
        remainder: number of samples of all ranks in the last step, without padding; 0 if it is full, -1 if unknown.
        total_batch_size: number of samples of all ranks at one step; None if a batch sampler decides.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = False  # accelerate would save one state for all ranks
    end_of_dataloader = False
    remainder = -1
    total_batch_size: int | None
    _rank: RankInfo
    _rng_types: list[str]
    _ahead = 0  # number of calls of `next()` that the loader's position is ahead
    _skipped = 0  # batches of a stream to be dropped by the next iteration

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        """Begin the next epoch, or continue the restored one."""
        if self._rng_types:
            synchronize_rng_states(self._rng_types)
        pending = self._control.pending
        if pending is None:
            self.set_epoch(self._control.next_epoch)  # as accelerate does for each epoch
        remainder = -1
        if isinstance(self.sampler, BatchwiseSampler) and not self.drop_last:
            remainder = self.sampler.remainder(0 if pending is None else pending.cursor)
        skipped, self._skipped, self._ahead = self._skipped, 0, 0
        with provided_rank(self._rank) if self._rank.world_size > 1 else contextlib.nullcontext():
            batches = super().__iter__()
        return self._given(batches, remainder, skipped)

    def _given(self, batches: Iterator[T_co], remainder: int, skipped: int) -> Iterator[T_co]:
        """Each batch, after the next one was received."""
        self.end_of_dataloader, self.remainder = False, remainder
        state = GradientState()
        state._add_dataloader(self)
        try:
            for _ in range(skipped):
                next(batches, None)
            batch = next(batches, _END)
            while batch is not _END:
                before, error = self._control.last_point, None
                try:
                    following = next(batches, _END)
                except Exception as raised:  # in the turn of the batch that it is raised for
                    error = raised
                self.end_of_dataloader = error is None and following is _END
                self._ahead = int(self.end_of_dataloader or self._control.last_point is not before)
                yield cast(T_co, batch)
                self._ahead = 0
                if error is not None:
                    raise error
                batch = following
        finally:
            state._remove_dataloader(self)

    __aiter__ = None  # type: ignore[assignment]  # accelerate's loops are synchronous

    def state_dict(self, lag: int = 0) -> dict[str, Any]:
        """As `DataLoader.state_dict`: the position after the last batch that was given out."""
        return super().state_dict(lag + self._ahead)

    def skip(self, batches: int) -> None:
        """Let the next iteration begin after a number of batches; see `skip_first_batches`.

        Raises:
            ValueError: a restored position is another one.
        """
        pending = self._control.pending
        if pending is not None and not (pending.over and batches == 0):
            if pending.batches != batches:
                raise ValueError(
                    f"skip_first_batches(loader, {batches}), but load_state() has restored this loader after "
                    f"{pending.batches} batches of epoch {pending.epoch}: leave out skip_first_batches()"
                )
            return
        self._control.skip_rest()
        if self._control.spec.kind.is_iterable:
            self._skipped = batches
        elif batches:
            ranks = self._rank.world_size
            size = None if self.total_batch_size is None else self.total_batch_size // ranks
            self._control.skip(self, batches, batch_size=size, ranks=ranks)

    def _portable(self, collate_fn: Callable[[Any], object]) -> Callable[[Any], object]:
        collate = collate_fn.collate if isinstance(collate_fn, PortableCollate) else collate_fn
        transform = self._control.spec.options["transform"]
        return PortableCollate(collate, transform, batched=self._auto_collation, warn=_refuse)


def _refuse() -> NoReturn:
    raise RuntimeError(
        "a plain torch DataLoader was rebuilt from a prepared headrace loader (accelerate.skip_first_batches() does "
        "so). It does not mark the end of an epoch for accelerate, and headrace's engine does not run. Use "
        "accelerator.skip_first_batches(loader, n), or skip_first_batches of headrace.integrations.accelerate."
    )


def divided(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any], device_placement: bool | None = None
) -> PreparedLoader[Any]:
    """A copy of a loader which gives this rank's part, on its device; a prepared one itself."""
    if isinstance(loader, PreparedLoader):
        return loader
    cls: Any = type(loader)
    made: Any = copy.copy(loader)
    made.__class__ = (
        PreparedLoader
        if cls is DataLoader
        else type(f"Prepared{cls.__name__}", (PreparedLoader, cls), {"__module__": cls.__module__})
    )
    prepared: PreparedLoader[Any] = made
    spec = prepared._control.spec
    placed = accelerator.device_placement if device_placement is None else device_placement
    target = resolve(accelerator.device)
    if placed and spec.options["device"] is None and target is not None:
        prepared.__dict__.setdefault("device", accelerator.device)
        options = cast(AllOptions, {**spec.options, "device": accelerator.device})
        prepared._control = prepared._control.on_device(dataclasses.replace(spec, options=options, device=target))
    _divide(prepared, accelerator)
    prepared.collate_fn = loader.collate_fn  # which now refuses to collate for a loader that is rebuilt
    return prepared


def _divide(loader: PreparedLoader[Any], accelerator: accelerate.Accelerator) -> None:
    """Give a loader the sampling of its rank."""
    mesh: Any = accelerator.torch_device_mesh
    sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    shared = sizes.get("tp", 1) * sizes.get("cp", 1)  # ranks of tensor and context parallelism share their batches
    rank = RankInfo(accelerator.process_index // shared, accelerator.num_processes // shared, "accelerate")
    ranks, attributes = rank.world_size, loader.__dict__  # past torch's freeze
    names = (str(getattr(each, "value", each)) for each in accelerator.rng_types or ())
    rng_types = [name for name in names if name != "generator"]
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    plain = type(batches) is BatchSampler
    stream = loader._control.spec.kind.is_iterable
    size: Any = 1 if batches is None and not stream else getattr(batches, "batch_size", None)
    if accelerator.split_batches and size is not None and batches is not None:
        if size % ranks:
            raise ValueError(
                f"split_batches=True divides each batch among the ranks: batch_size={size} is no multiple of {ranks}"
            )
        size //= ranks
    attributes.update(_rank=rank, _rng_types=rng_types, total_batch_size=None if size is None else size * ranks)
    if stream or hasattr(sampler, "num_replicas") or hasattr(batches, "num_replicas"):
        if plain:  # the ranks have different samples already
            batches = BatchSampler(sampler, size, batches.drop_last)
            batches.even_batches = accelerator.even_batches  # join_uneven_inputs() sets it
            attributes.update(batch_sampler=batches, batch_size=None if loader.batch_size is None else size)
    elif plain or (batches is None and not isinstance(sampler, BatchSampler)):
        drop_last = plain and batches.drop_last
        seed = accelerator.dataloader_config.data_seed or 0
        dealt = BatchwiseSampler(sampler, size, rank, seed, drop_last=drop_last, even_batches=accelerator.even_batches)
        attributes.update(sampler=dealt, drop_last=drop_last)
        if plain:
            attributes.update(batch_size=size, batch_sampler=BatchwiseBatches(dealt, size, drop_last))
    elif ranks > 1:
        whole = sampler if batches is None else batches
        shard = BatchSamplerShard(whole, ranks, rank.rank, accelerator.split_batches, accelerator.even_batches)
        attributes.update({"sampler": shard} if batches is None else {"batch_sampler": shard})
