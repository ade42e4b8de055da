"""Ray Train: loaders in the workers of a `ray.train.torch.TorchTrainer`."""

from __future__ import annotations

from typing import Any

import ray.train
import ray.train.torch
from torch.utils.data import BatchSampler, DistributedSampler

from headrace._core.text import dataset_repr
from headrace.integrations._shared import computed_order, copied
from headrace.loader import DataLoader
from headrace.samplers import ElasticSampler

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    loader: DataLoader[Any], add_dist_sampler: bool = True, move_to_device: bool = True
) -> DataLoader[Any]:
    """Prepare a loader in a worker's training function, in place of `ray.train.torch.prepare_data_loader`.

    Ray's function makes a plain torch loader, without headrace's engine. This one returns a
    headrace loader: `loader` itself, or a copy with ``sampler=ElasticSampler(dataset)``, with the
    loader's `seed` (0 without) and shuffled as it is, and ``device=ray.train.torch.get_device()``.
    Streams divide themselves. `set_epoch` need not be called.

    Args:
        loader: a headrace loader, not iterated over yet.
        add_dist_sampler: whether a sampler for several workers is added.
        move_to_device: whether batches are copied to the worker's device.

    Returns:
        The loader to iterate over, and whose state is saved.

    Raises:
        TypeError: `loader` is of another class.
        ValueError: the loader's sampler cannot be divided among the workers.

    Example:
        >>> def train(config):                                                            # doctest: +SKIP
        ...     loader = hr.DataLoader(dataset, 32, shuffle=True, seed=0)
        ...     loader = headrace.integrations.ray.prepare_data_loader(loader)
        >>> TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()        # doctest: +SKIP
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"expected a headrace.DataLoader, but got a {type(loader).__name__}")
    ranks = ray.train.get_context().get_world_size()
    sampler = _elastic_sampler(loader, ranks) if add_dist_sampler else None
    device = ray.train.torch.get_device() if move_to_device else None
    placed = copied(loader, device)
    if sampler is None:
        return loader if placed._control.spec.device == loader._control.spec.device else placed
    attributes = placed.__dict__  # past torch's freeze
    attributes["sampler"] = sampler
    if loader.batch_size is not None:
        attributes["batch_sampler"] = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return placed


def _elastic_sampler(loader: DataLoader[Any], ranks: int) -> ElasticSampler | None:
    """The sampler with which any number of ranks can read a loader's order; None if it needs none."""
    if loader._control.spec.kind.is_iterable:
        return None  # which warns at `iter()` if it is not split
    order: Any = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        order = loader.batch_sampler
    if isinstance(getattr(order, "sampler", order), DistributedSampler):
        return None
    if (computed := computed_order(order)) and len(order) == len(loader.dataset):
        return ElasticSampler(loader.dataset, shuffle=computed[0], seed=computed[1])
    if ranks == 1:
        return None
    raise ValueError(
        f"each of {ranks} ranks would read all of {dataset_repr(loader.dataset)}: the order of {type(order).__name__} "
        f"cannot be divided among them. Give the loader a sampler that divides its order, as headrace.ElasticSampler; "
        f"or add_dist_sampler=False, if each rank has an order of its own."
    )
