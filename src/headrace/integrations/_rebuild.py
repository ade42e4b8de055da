"""A loader with the arguments of another."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from headrace._core.order.samplers import SeededRandomSampler
from headrace._core.text import dataset_repr
from headrace.loader import DataLoader
from headrace.options import OPTIONS
from headrace.samplers import ElasticSampler

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


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
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
    try:
        return type(loader)(**{**arguments, **changes})
    except TypeError as error:
        changed = " and ".join(f"{name}=" for name in changes)
        raise TypeError(
            f"{type(loader).__name__} cannot be made anew with other values of {changed}, since its constructor takes "
            f"other arguments than headrace.DataLoader's: {error}. Give it {changed} where it is made."
        ) from error


def elastic_sampler(loader: DataLoader[Any], *, ranks: int) -> ElasticSampler | None:
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
