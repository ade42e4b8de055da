"""Ray Train: loaders in the workers of a `ray.train.torch.TorchTrainer`."""

from __future__ import annotations

from typing import Any

import ray.train
import ray.train.torch

from headrace.integrations._rebuild import elastic_sampler, rebuilt
from headrace.loader import DataLoader

__all__ = ["prepare_data_loader"]


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
        sampler = elastic_sampler(loader, ranks=ray.train.get_context().get_world_size())
        if sampler is not None:
            changes["sampler"] = sampler
    if move_to_device and loader._control.spec.options["device"] is None:
        device = ray.train.torch.get_device()
        if device.type != "cpu":
            changes["device"] = device
    return rebuilt(loader, **changes) if changes else loader
