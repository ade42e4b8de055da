"""Integration with Ray Train."""

from __future__ import annotations

from typing import Any

import ray.train
import ray.train.torch
from torch.utils.data import BatchSampler, DistributedSampler

from headrace._base.text import dataset_repr
from headrace.integrations._shared import computed_order, copied_to
from headrace.loader import DataLoader
from headrace.samplers import ElasticSampler

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    loader: DataLoader[Any], add_dist_sampler: bool = True, move_to_device: bool = True
) -> DataLoader[Any]:
    """Prepare a loader in a training function of Ray.

    Call this function in place of `ray.train.torch.prepare_data_loader`. Ray's function would make
    a plain torch loader, without headrace's engine. This function returns `loader` itself, or a
    copy of `loader` with ``sampler=ElasticSampler(dataset)`` and
    ``device=ray.train.torch.get_device()``. The sampler shuffles if `loader` does, with the
    loader's `seed` (0 without a seed). Streams divide samples without a sampler. Calls of
    `set_epoch` are not needed.

    Args:
        loader: a headrace loader, not iterated over yet.
        add_dist_sampler: whether to add a sampler for several workers.
        move_to_device: whether to copy batches to the worker's device.

    Returns:
        The loader to iterate over. Save the state of this loader.

    Raises:
        TypeError: `loader` is not a headrace loader.
        ValueError: the order of the loader's sampler cannot be divided among the workers.

    Example:
        >>> def train(config):                                                 # doctest: +SKIP
        ...     loader = hr.DataLoader(dataset, 32, shuffle=True, seed=0)
        ...     loader = headrace.integrations.ray.prepare_data_loader(loader)
        >>> scaling = ScalingConfig(num_workers=2)                             # doctest: +SKIP
        >>> TorchTrainer(train, scaling_config=scaling).fit()                  # doctest: +SKIP
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"expected a headrace.DataLoader, but got a {type(loader).__name__}"
        )
    ranks = ray.train.get_context().get_world_size()
    sampler = _elastic_sampler(loader, ranks) if add_dist_sampler else None
    device = ray.train.torch.get_device() if move_to_device else None
    placed = copied_to(loader, device)
    if sampler is None:
        return (
            loader
            if placed._control.spec.device == loader._control.spec.device
            else placed
        )
    attributes = placed.__dict__  # torch forbids to set samplers after `__init__`
    attributes["sampler"] = sampler
    if loader.batch_size is not None:
        attributes["batch_sampler"] = BatchSampler(
            sampler, loader.batch_size, loader.drop_last
        )
    return placed


def _elastic_sampler(loader: DataLoader[Any], ranks: int) -> ElasticSampler | None:
    """Return an elastic sampler for the loader's order, or None.

    None if the loader needs no other sampler.
    """
    if loader._control.spec.kind.is_iterable:
        return None  # a stream without a split warns at `iter()`
    order: Any = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        order = loader.batch_sampler
    if isinstance(getattr(order, "sampler", order), DistributedSampler):
        return None
    if (computed := computed_order(order)) and len(order) == len(loader.dataset):
        return ElasticSampler(
            loader.dataset, shuffle=computed.shuffle, seed=computed.seed
        )
    if ranks == 1:
        return None
    raise ValueError(
        f"each of {ranks} ranks would read all of {dataset_repr(loader.dataset)}: "
        f"the order of {type(order).__name__} cannot be divided among them. Give the loader a "
        "sampler that divides its order, as headrace.ElasticSampler; or add_dist_sampler=False, "
        "if each rank has an order of its own."
    )
