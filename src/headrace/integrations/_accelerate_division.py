"""The division of a loader's samples among the ranks, as `Accelerator.prepare` would divide them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import accelerate
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import DistributedType
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from headrace._core.order.samplers import SeededRandomSampler
from headrace._core.ranks.rankinfo import RankInfo, provided_rank
from headrace._core.streams.kinds import splits_by_rank
from headrace._core.streams.torch_views import unwrap, without_adapter
from headrace._core.text import dataset_repr
from headrace.integrations._accelerate_loader import Division, PreparedLoader
from headrace.integrations._batchwise import BatchwiseBatches, BatchwiseSampler


def divide(loader: PreparedLoader[Any], accelerator: accelerate.Accelerator) -> None:
    """Give a loader the sampling of its rank, and a `Division`.

    Raises:
        ValueError: the samples cannot be divided.
    """
    rank = _data_parallel_rank(accelerator)
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    plain = batches is None or type(batches) is BatchSampler
    if loader._control.spec.kind.is_iterable:
        _check_stream(loader, rank)
        _keep(loader, accelerator, rank)
    elif isinstance(batches, DistributedSampler) or isinstance(sampler, DistributedSampler):
        _check_rank(sampler if isinstance(sampler, DistributedSampler) else batches, rank)
        _keep(loader, accelerator, rank)
    elif plain and (order := _order(sampler, loader, accelerator)) is not None:
        _deal(loader, accelerator, rank, sampler.data_source, *order)
    else:
        _shard(loader, accelerator, rank, loader.sampler if batches is None else batches)


def _data_parallel_rank(accelerator: accelerate.Accelerator) -> RankInfo:
    """The rank among those that get different batches: ranks of tensor and context parallelism share theirs."""
    rank, count = accelerator.process_index, accelerator.num_processes
    mesh: Any = accelerator._prepare_device_mesh()
    if mesh:
        sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            shared = sizes.get("tp", 1)
            count //= shared
        else:
            shared = sizes.get("tp", 1) * sizes.get("cp", 1)
            count = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
        rank //= shared
    return RankInfo(rank, count, "accelerate")


def _order(sampler: Any, loader: PreparedLoader[Any], accelerator: accelerate.Accelerator) -> tuple[bool, int] | None:
    """Whether the order is shuffled, and its seed; None where a sampler decides that has to be asked."""
    if type(sampler) is SequentialSampler:
        return False, 0
    if type(sampler) is SeededRandomSampler:
        return True, sampler.seed
    if type(sampler) is not RandomSampler:
        return None
    if not sampler.replacement and sampler._num_samples is None and sampler.generator is None:
        return True, accelerator.dataloader_config.data_seed or 0
    if accelerator.use_seedable_sampler:
        raise ValueError(
            "use_seedable_sampler=True replaces the sampler, which a headrace loader does not do: shuffle by "
            "shuffle=True and seed=, which is as reproducible"
        )
    return None


def _split(loader: PreparedLoader[Any], accelerator: accelerate.Accelerator, size: int, rank: RankInfo) -> int:
    """The batch size of one rank."""
    if not accelerator.split_batches:
        return size
    if size % rank.world_size:
        raise ValueError(
            f"split_batches=True divides each batch among the ranks, but batch_size={size} is no multiple of "
            f"{rank.world_size}"
        )
    return size // rank.world_size


def _rng_types(accelerator: accelerate.Accelerator) -> tuple[str, ...]:
    """The generators to be made equal on all ranks, without the sampler's."""
    names = (str(getattr(each, "value", each)) for each in accelerator.rng_types or ())
    return tuple(name for name in names if name != "generator")


def _deal(
    loader: PreparedLoader[Any],
    accelerator: accelerate.Accelerator,
    rank: RankInfo,
    samples: Sized,
    shuffle: bool,
    seed: int,
) -> None:
    """Deal an order that can be computed."""
    batches: Any = loader.batch_sampler
    attributes = loader.__dict__  # past torch's freeze
    drop_last = batches is not None and batches.drop_last
    size = 1 if batches is None else _split(loader, accelerator, batches.batch_size, rank)
    sampler = BatchwiseSampler(
        samples, size, shuffle, seed, rank.rank, rank.world_size, drop_last, accelerator.even_batches
    )
    attributes.update(sampler=sampler, drop_last=drop_last)
    if batches is not None:
        attributes.update(batch_size=size, batch_sampler=BatchwiseBatches(sampler, size, drop_last))
    loader._division = Division(rank, size, size * rank.world_size, None, _rng_types(accelerator))


def _keep(loader: PreparedLoader[Any], accelerator: accelerate.Accelerator, rank: RankInfo) -> None:
    """Leave the sampling as it is: the ranks have different samples already."""
    batches: Any = loader.batch_sampler
    size = getattr(batches, "batch_size", None)
    if type(batches) is BatchSampler:
        size = _split(loader, accelerator, batches.batch_size, rank)
        batches = BatchSampler(batches.sampler, size, batches.drop_last)
        batches.even_batches = accelerator.even_batches  # join_uneven_inputs() sets it
        loader.__dict__.update(batch_sampler=batches, batch_size=None if loader.batch_size is None else size)
    elif accelerator.split_batches and rank.world_size > 1:
        raise ValueError("split_batches=True cannot divide the batches of a batch sampler that is divided by rank")
    samples = None
    if not loader._control.spec.kind.is_iterable and _length(loader.dataset, -1) % rank.world_size == 0:
        samples = _length(loader.dataset, None)  # otherwise repeated samples are not all at the end
    total = None if size is None else size * rank.world_size
    loader._division = Division(rank, size, total, samples, _rng_types(accelerator))


def _shard(loader: PreparedLoader[Any], accelerator: accelerate.Accelerator, rank: RankInfo, batches: Any) -> None:
    """Let each rank draw all batches of a sampler, and take its own, as accelerate does."""
    attributes = loader.__dict__
    size = getattr(batches, "batch_size", None)
    sampler: Any = getattr(batches, "sampler", None)
    generator = None
    if rank.world_size > 1:
        if not isinstance(batches, BatchSampler) and loader.batch_sampler is None:
            raise ValueError(
                f"the order of {type(batches).__name__} cannot be divided among {rank.world_size} ranks with "
                f"batch_size=None: give the loader a DistributedSampler, or shuffle=True and seed="
            )
        if hasattr(sampler, "generator"):
            if sampler.generator is None:
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            generator = attributes["generator"] = sampler.generator
        shard = BatchSamplerShard(
            batches, rank.world_size, rank.rank, accelerator.split_batches, accelerator.even_batches
        )
        if loader.batch_sampler is None:
            attributes["sampler"] = shard
        else:
            attributes.update(batch_sampler=shard, batch_size=None, drop_last=False)
    samples = None if getattr(batches, "drop_last", False) else _length(sampler, None)
    total = size if size is None or accelerator.split_batches else size * rank.world_size
    rng_types = _rng_types(accelerator) + (("generator",) if generator is not None else ())
    own_size = total if total is None else total // rank.world_size
    if loader.batch_sampler is None:
        own_size = 1  # of draws
    loader._division = Division(rank, own_size, total, samples, rng_types, generator)


def _length(sized: Any, default: Any) -> Any:
    try:
        return len(sized)
    except TypeError:
        return default


def _check_rank(sampler: DistributedSampler[Any], rank: RankInfo) -> None:
    with provided_rank(rank):
        given = sampler.rank, sampler.num_replicas
    if given != (rank.rank, rank.world_size):
        raise ValueError(
            f"{type(sampler).__name__} was given rank {given[0]} of {given[1]}, and this is rank {rank.rank} of "
            f"{rank.world_size}: samples would be read twice, or not at all. Make it after the Accelerator, without "
            f"these arguments; or leave it out, since prepare() divides the dataset"
        )


def _check_stream(loader: PreparedLoader[Any], rank: RankInfo) -> None:
    stream, _ = unwrap(without_adapter(loader.dataset))
    of_library = isinstance(stream, IterableDatasetShard) or getattr(stream, "_distributed", None) is not None
    if rank.world_size > 1 and not (of_library or splits_by_rank(stream)):  # `_distributed`: of Hugging Face's streams
        raise ValueError(
            f"each of {rank.world_size} ranks would read all of {dataset_repr(loader.dataset)}: split the stream by "
            f"its .split(), or let it read the part of its rank, which headrace.get_rank_info() returns in __aiter__ "
            f"or __iter__, and declare this by an attribute: splits_by_rank = True"
        )
