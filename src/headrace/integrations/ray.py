"""Ray Train: loaders in the workers of a `ray.train.torch.TorchTrainer`."""

from __future__ import annotations

from typing import Any

import ray.train
import ray.train.torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from headrace._core.order.samplers import SeededRandomSampler
from headrace._core.text import dataset_repr
from headrace.loader import DataLoader
from headrace.options import OPTIONS
from headrace.samplers import ElasticSampler

__all__ = ["prepare_data_loader"]

_OF_TORCH = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def prepare_data_loader(
    loader: DataLoader[Any], add_dist_sampler: bool = True, move_to_device: bool = True
) -> DataLoader[Any]:
    """Prepare a loader in a worker's training function, in place of `ray.train.torch.prepare_data_loader`.

    Ray's function makes a plain torch loader, without headrace's engine, around which it puts a wrapper that has no
    state and reads a batch ahead. This one returns a headrace loader: `loader` itself, if it reads its rank's part
    already, and copies to the worker's device. Otherwise one of the same class, with the same arguments, and with

    - ``sampler=ElasticSampler(dataset)``, with the loader's `seed` (0 without) and shuffled as it is, so that any
      number of workers can continue an epoch. Streams divide themselves.
    - ``device=ray.train.torch.get_device()``, unless the loader has a device, or that is the CPU.

    The epochs are counted by the loader: `set_epoch` need not be called.

    Args:
        loader: a headrace loader, not iterated over yet.
        add_dist_sampler: whether a sampler for several workers is added.
        move_to_device: whether batches are copied to the worker's device.

    Returns:
        The loader to iterate over, and whose state is saved.

    Raises:
        TypeError: `loader` is of another class, or of one with a constructor of its own.
        ValueError: the loader's sampler cannot be divided among the workers.

    Example:
        >>> def train(config):                                                            # doctest: +SKIP
        ...     loader = hr.DataLoader(dataset, 32, shuffle=True, seed=0)
        ...     loader = headrace.integrations.ray.prepare_data_loader(loader)
        >>> TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()        # doctest: +SKIP
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"expected a headrace.DataLoader, but got a {type(loader).__name__}")
    changes: dict[str, Any] = {}
    if add_dist_sampler:
        sampler = _elastic_sampler(loader, ranks=ray.train.get_context().get_world_size())
        if sampler is not None:
            changes["sampler"] = sampler
    if move_to_device and loader._control.spec.options["device"] is None:
        device = ray.train.torch.get_device()
        if device.type != "cpu":
            changes["device"] = device
    return _rebuilt(loader, **changes) if changes else loader


def _rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A loader of the same class, with the arguments of `loader` except for `changes`.

    Raises:
        TypeError: the class takes other arguments than `DataLoader`.
    """
    arguments: dict[str, Any] = {name: getattr(loader, name) for name in _OF_TORCH}
    arguments.update({name: loader._control.spec.options[name] for name in OPTIONS})  # type: ignore[literal-required]
    if loader.batch_size is None and loader.batch_sampler is not None:
        arguments["batch_sampler"] = loader.batch_sampler
    else:
        arguments.update(batch_size=loader.batch_size, sampler=loader.sampler, drop_last=loader.drop_last)
    if loader._control.spec.kind.is_iterable:
        arguments.pop("sampler", None)
    return type(loader)(**{**arguments, **changes})


def _elastic_sampler(loader: DataLoader[Any], *, ranks: int) -> ElasticSampler | None:
    """The sampler with which any number of ranks can read a loader's order; None if it needs none.

    Raises:
        ValueError: there are several ranks, and the order is that of a sampler which cannot be divided.
    """
    if loader._control.spec.kind.is_iterable:
        return None  # which warns at `iter()` if it is not split
    order: Any = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        order = loader.batch_sampler
    if isinstance(getattr(order, "sampler", order), DistributedSampler):
        return None
    if type(order) is SequentialSampler:
        return ElasticSampler(loader.dataset, shuffle=False)
    if type(order) is SeededRandomSampler:
        return ElasticSampler(loader.dataset, seed=order.seed)
    if type(order) is RandomSampler and not order.replacement and order._num_samples is None:
        return ElasticSampler(loader.dataset)
    if ranks == 1:
        return None
    raise ValueError(
        f"each of {ranks} ranks would read all of {dataset_repr(loader.dataset)}: the order of {type(order).__name__} "
        f"cannot be divided among them. Give the loader a sampler that divides its order, a headrace.ElasticSampler or "
        f"a torch.utils.data.DistributedSampler for example; or add_dist_sampler=False, if each rank has an order of "
        f"its own."
    )
