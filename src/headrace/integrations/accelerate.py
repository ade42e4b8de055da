"""Hugging Face accelerate: loaders that `Accelerator.prepare` leaves as they are, and which do their part."""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import accelerate
import torch
from accelerate.utils import DistributedType

from headrace._core.device.streams import resolve
from headrace.integrations._accelerate_checkpoints import load_states, save_states
from headrace.integrations._accelerate_division import divide
from headrace.integrations._accelerate_loader import PreparedLoader, prepared_class
from headrace.loader import DataLoader
from headrace.options import AllOptions

__all__ = ["PreparedLoader", "prepare", "skip_first_batches"]

_attached: weakref.WeakSet[accelerate.Accelerator] = weakref.WeakSet()


def prepare(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any], *, device_placement: bool | None = None
) -> PreparedLoader[Any]:
    """Prepare a headrace loader for accelerate; headrace goes on fetching.

    `Accelerator.prepare` makes a plain torch loader of any loader but of one from here. What it would do is done:

    - A map-style dataset is divided among the ranks batch by batch, by `even_batches`, `split_batches` and `drop_last`.
      In order or shuffled (by the loader's `seed`; without one by `data_seed` of the accelerator, or 0), any number
      of ranks can continue an epoch. A sampler of another kind is divided by accelerate's `BatchSamplerShard`. A
      `DistributedSampler` and a stream divide themselves, and are not divided again.
    - Batches are copied to the accelerator's device, by headrace (see `device=` of the loader).
    - Gradient accumulation, `gather_for_metrics` and `join_uneven_inputs` know the last batch and its size.
    - `save_state` and `load_state` include the position, of every rank, whatever `use_stateful_dataloader` is: the next
      iteration continues the epoch. `skip_first_batches` skips without fetching, except in streams.
    - `free_memory`, `clear` and `end_training` end the loader's threads and processes.

    The accelerator's methods `skip_first_batches`, `free_memory` and `end_training` are replaced for that.

    Args:
        accelerator: the accelerator.
        loader: the loader; it is not changed, and not to be iterated over. A prepared loader is returned as it is.
        device_placement: whether batches are copied to the accelerator's device; by default as the accelerator does.

    Returns:
        A loader of the same class, which may also be given to `accelerator.prepare`.

    Raises:
        TypeError: `loader` is not one of headrace.
        ValueError: the accelerator is configured for something that needs a rebuilt loader; the ranks would get the
            same samples; or another device or division than the accelerator's was given.

    Example:
        >>> import accelerate                                                             # doctest: +SKIP
        >>> import headrace as hr                                                         # doctest: +SKIP
        >>> from headrace.integrations.accelerate import prepare                          # doctest: +SKIP
        >>> accelerator = accelerate.Accelerator()                                        # doctest: +SKIP
        >>> loader = hr.DataLoader(dataset, batch_size=32, shuffle=True, seed=0)          # doctest: +SKIP
        >>> loader = prepare(accelerator, loader)                                         # doctest: +SKIP
    """
    if not isinstance(loader, PreparedLoader):
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"prepare() is for headrace loaders before accelerator.prepare(), but got a {type(loader).__name__}; "
                f"other loaders are prepared by accelerator.prepare()"
            )
        _check_configuration(accelerator)
        loader = _prepared(accelerator, loader, device_placement)
    accelerator.prepare_data_loader(loader)  # which keeps it in its list
    _attach(accelerator)
    return loader


def skip_first_batches(loader: torch.utils.data.DataLoader[Any], num_batches: int = 0) -> Any:
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


def _check_configuration(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.XLA, DistributedType.MEGATRON_LM):
        raise ValueError(f"headrace loaders cannot be prepared for {kind.value}, which needs loaders of its own")
    if accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True lets rank 0 read for all ranks, which a headrace loader does not do: each rank "
            "reads its own part. Leave it out"
        )
    if kind == DistributedType.DEEPSPEED and accelerator.split_batches:
        raise ValueError(
            "split_batches=True cannot be used with DeepSpeed and a headrace loader; let batch_size= be that of a rank"
        )


def _prepared(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any], device_placement: bool | None
) -> PreparedLoader[Any]:
    prepared: Any = copy.copy(loader)
    prepared.__class__ = prepared_class(type(loader))
    prepared.__dict__.update(_iterations=[], _latest=None, _skipped=0)
    if accelerator.device_placement if device_placement is None else device_placement:
        _place(prepared, accelerator.device)
    divide(prepared, accelerator)
    prepared.collate_fn = loader.collate_fn  # which now refuses to collate for a loader that is rebuilt
    return cast("PreparedLoader[Any]", prepared)


def _place(prepared: PreparedLoader[Any], device: torch.device) -> None:
    """Let batches be copied to the accelerator's device."""
    own = prepared._control.spec.options["device"]
    target, given = resolve(device), resolve(own)
    if own is None:
        if target is not None:
            if prepared.__dict__.get("device") is None:  # a subclass may have an attribute of this name
                prepared.__dict__["device"] = device
            spec = prepared._control.spec
            options = cast(AllOptions, {**spec.options, "device": device})
            prepared._control = prepared._control.on_device(dataclasses.replace(spec, options=options, device=target))
        return
    numbers = {each.index for each in (target, given) if each is not None} - {None}
    if (target and target.type) != (given and given.type) or len(numbers) > 1:
        raise ValueError(
            f"the loader has device={own!r}, and the accelerator's device is {device}: leave "
            f"out device=, or give prepare() device_placement=False"
        )


def _attach(accelerator: accelerate.Accelerator) -> None:
    """Let an accelerator save, restore, skip in and close its headrace loaders."""
    if accelerator in _attached:
        return
    _attached.add(accelerator)
    own: Any = accelerator  # whose methods are replaced; those of its class are called
    reference = weakref.ref(accelerator)

    def loaders() -> list[tuple[int, PreparedLoader[Any]]]:
        known = enumerate(getattr(reference(), "_dataloaders", ()))
        return [(number, each) for number, each in known if isinstance(each, PreparedLoader)]

    def closing(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any) -> Any:
            for _, loader in loaders():
                loader.close()
            return method(reference(), *arguments)

        return call

    def save(models: Any, weights: Any, folder: str) -> None:
        save_states(reference(), loaders(), folder)

    def load(models: Any, folder: str) -> None:
        load_states(reference(), loaders(), folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    own.skip_first_batches = skip_first_batches
    own.free_memory = closing(type(accelerator).free_memory)
    own.end_training = closing(type(accelerator).end_training)
