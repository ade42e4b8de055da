"""The order and the batches of the Trainer's loaders, from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler

from headrace._core.order.samplers import SeededRandomSampler
from headrace._core.streams.kinds import DatasetKind, kind_of
from headrace._core.text import dataset_repr
from headrace.integrations._dealt_order import DealtSampler
from headrace.loader import DataLoader
from headrace.samplers import ElasticSampler

SamplerOf = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation loader gives.

    Attributes:
        batch_size: samples in a batch of all ranks.
        samples: number of samples of all ranks; None if it need not be known before the end.
        divided: whether each rank reads the batches of all ranks, of which it takes its part.
    """

    batch_size: int
    samples: int | None
    divided: bool


def seed_of(args: Any) -> int:
    """The seed of the loaders' order and random numbers."""
    seed: int = args.seed if args.data_seed is None else args.data_seed
    return seed


def check_arguments(trainer: Any) -> None:
    """Raise `ValueError` for training arguments with which the Trainer's loaders cannot be headrace's."""
    args = trainer.args
    config = args.accelerator_config
    remedy = "Use transformers.Trainer, or leave out this argument."
    if config.dispatch_batches:
        raise ValueError(f"accelerator_config has dispatch_batches=True, but each rank reads its own batches. {remedy}")
    if not config.even_batches:
        raise ValueError(f"accelerator_config has even_batches=False, but ranks have equal numbers of steps. {remedy}")
    if config.split_batches and (args.train_batch_size % args.world_size or args.eval_batch_size % args.world_size):
        raise ValueError(f"split_batches=True needs batches that {args.world_size} ranks divide equally")
    sizes = {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    for name, size in sizes.items():
        if size > 1:
            raise ValueError(f"{name} parallelism of {size} ranks, which need the same batches. {remedy}")


def check_divided(loader: DataLoader[Any], ranks: int) -> None:
    """Raise `ValueError` for a loader of which every rank would read all."""
    if loader._control.spec.kind.is_iterable:
        return  # which warns at `iter()`
    if type(loader.sampler) in (SequentialSampler, RandomSampler, SeededRandomSampler) and (
        loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    ):
        raise ValueError(
            f"each of {ranks} ranks would train on all of {dataset_repr(loader.dataset)}: give the loader that "
            f"get_train_dataloader returns sampler=headrace.ElasticSampler(dataset, seed=...) in place of shuffle="
        )


def train_order(args: Any, dataset: Any, batch_size: int, sampler_of: SamplerOf) -> tuple[Any, dict[str, Any]]:
    """The dataset of this rank, and the loader's arguments for its order and batches."""
    rank, ranks, drop_last = args.process_index, args.world_size, args.dataloader_drop_last
    order = {"batch_size": batch_size, "drop_last": drop_last}
    kind = kind_of(dataset)
    if kind.is_iterable:
        if args.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={args.train_sampling_strategy!r} needs a dataset with a length and with "
                f"indices, but {type(dataset).__name__} is a stream"
            )
        if kind is DatasetKind.ITERABLE and ranks > 1:
            dataset = _part_of_rank(dataset, batch_size, drop_last, rank, ranks)
        return dataset, order
    sampler = sampler_of(dataset)
    if sampler is None:
        raise ValueError(f"{type(dataset).__name__} has no length, so that no order can be drawn")
    if isinstance(sampler, BatchRebalanceSampler):
        return dataset, {"batch_sampler": sampler}
    if isinstance(sampler, DistributedSampler):
        return dataset, {"sampler": sampler, **order}
    place = {"seed": seed_of(args), "rank": rank, "world_size": ranks, "drop_last": drop_last}
    dealt: ElasticSampler
    if type(sampler) is SequentialSampler:
        dealt = ElasticSampler(dataset, shuffle=False, **place)
    elif type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(dataset):
        dealt = ElasticSampler(dataset, **place)
    else:
        dealt = DealtSampler(sampler, **place)
    return dataset, {"sampler": dealt, **order}


def evaluation_order(
    args: Any, dataset: Any, batch_size: int, sampler_of: SamplerOf
) -> tuple[dict[str, Any], Evaluated]:
    """The loader's arguments for its order and batches; as accelerate's, so that results are in the dataset's order."""
    rank, ranks, drop_last = args.process_index, args.world_size, args.dataloader_drop_last
    whole = batch_size * ranks
    if kind_of(dataset).is_iterable:
        if ranks > 1 and getattr(dataset, "_distributed", None) is not None:
            raise ValueError(
                "the dataset to evaluate was divided by datasets.distributed.split_dataset_by_node: give the whole "
                "one, of which each rank then evaluates its part of each batch"
            )
        return {"batch_size": whole, "drop_last": drop_last}, Evaluated(whole, None, divided=ranks > 1)
    sampler = sampler_of(dataset) or SequentialSampler(dataset)
    if ranks == 1:
        order = {"sampler": sampler, "batch_size": batch_size, "drop_last": drop_last}
        return order, Evaluated(whole, None, divided=False)
    batches = BatchSamplerShard(BatchSampler(sampler, batch_size, drop_last), ranks, rank)
    return {"batch_sampler": batches}, Evaluated(whole, len(sampler), divided=False)


def _part_of_rank(dataset: Any, batch_size: int, drop_last: bool, rank: int, ranks: int) -> Any:
    """The part of a torch stream: of Hugging Face's by its own function, of others as accelerate divides them."""
    if not hasattr(dataset, "_distributed"):
        return IterableDatasetShard(dataset, batch_size, drop_last, ranks, rank)
    if dataset._distributed is not None:
        return dataset
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, rank, ranks)
