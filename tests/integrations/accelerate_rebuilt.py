"""A program for each rank: the samples of loaders that accelerate has rebuilt, by scenario."""

import os
import warnings

import torch
import torch.distributed
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader as TorchDataLoader

import headrace as hr

SAMPLES = 40


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return SAMPLES

    async def aget(self, index):
        return index


class Stream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for number in range(SAMPLES):
            yield number


class DuckStream:
    async def __aiter__(self):
        for number in range(SAMPLES):
            yield number


class Around(hr.AsyncIterableDataset):
    """A user's stream around another, which is started on the background loop."""

    def __init__(self, inner):
        self.inner = inner

    async def __aiter__(self):
        async for sample in self.inner:
            yield sample


class OwnSplit(hr.AsyncIterableDataset):
    splits_by_rank = True

    async def __aiter__(self):
        info = hr.get_rank_info()
        for number in range(info.rank, SAMPLES, info.world_size):
            yield number


def tenfold(sample):
    return sample * 10


def lines(**options):
    return hr.LinesDataset(os.environ["LINES"], shuffle=True, **options).map(int)


def by_sample():
    return lines(split="samples")


def by_shard():
    return lines(remainder="keep")


def declared():
    return lines(samples_per_rank=SAMPLES // world_size())


def counted():
    return lines(counts=[10] * 4)


STREAMS = [Stream, DuckStream, OwnSplit, by_sample, by_shard, declared, counted, lambda: Around(by_sample())]
NAMES = ["Stream", "DuckStream", "OwnSplit", "by_sample", "by_shard", "declared", "counted", "Around"]
SPAWNED = {None: ("OwnSplit",), False: ("by_sample",)}


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def everything(mine):
    if world_size() == 1:
        return mine
    parts = [None] * world_size()
    torch.distributed.all_gather_object(parts, mine)
    return [sample for part in parts for sample in part]


def numbers(loader):
    return [number for batch in loader for number in batch.tolist()]


def spawned():
    """With workers that are spawned, on two ranks."""
    warnings.simplefilter("ignore")
    report = {}
    for dispatch, names in SPAWNED.items():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        for name in names:
            make = STREAMS[NAMES.index(name)]
            options = {"num_workers": 2, "multiprocessing_context": "spawn"}
            loader = accelerator.prepare(hr.DataLoader(make(), batch_size=2, transform=tenfold, **options))
            report[f"{name}, dispatch {dispatch}"] = everything(numbers(loader))
    torch.distributed.destroy_process_group()
    return report


def main():
    warnings.simplefilter("ignore")
    report = {}
    for dispatch in (None, False):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        for name, make in zip(NAMES, STREAMS, strict=True):
            loader = accelerator.prepare(hr.DataLoader(make(), batch_size=4, transform=tenfold))
            report[f"{name}, dispatch {dispatch}"] = everything(numbers(loader))
        forked = accelerator.prepare(hr.DataLoader(OwnSplit(), batch_size=2, transform=tenfold, num_workers=2))
        report[f"forked, dispatch {dispatch}"] = everything(numbers(forked))
        plain = accelerator.prepare(TorchDataLoader(by_sample().map(tenfold), batch_size=4))
        report[f"torch's loader, dispatch {dispatch}"] = everything(numbers(plain))
    given = lines(split="samples", rank=accelerator.process_index, world_size=world_size())
    loader = accelerator.prepare(hr.DataLoader(given, batch_size=4, transform=tenfold))
    try:
        report["given"] = everything(numbers(loader))
    except ValueError as error:
        report["given"] = str(error)
    for workers in (0, 2):
        loader = accelerator.prepare(
            hr.DataLoader(Numbers(), batch_size=4, shuffle=True, seed=5, num_workers=workers, transform=tenfold)
        )
        report[f"map, {workers} workers"] = [everything(numbers(loader)) for _ in range(2)]
        fresh = accelerator.prepare(hr.DataLoader(Numbers(), batch_size=4, shuffle=True, seed=5, transform=tenfold))
        begun = [sample for batch, _ in zip(fresh, range(2), strict=False) for sample in batch.tolist()]
        fresh = accelerator.prepare(hr.DataLoader(Numbers(), batch_size=4, shuffle=True, seed=5, transform=tenfold))
        report[f"map resumed, {workers} workers"] = everything(begun + numbers(skip_first_batches(fresh, 2)))
    if world_size() == 1:
        with hr.DataLoader(Numbers(), batch_size=4, shuffle=True, seed=5, transform=tenfold) as loader:
            begun = [sample for batch, _ in zip(loader, range(3), strict=False) for sample in batch.tolist()]
        loader = hr.DataLoader(Numbers(), batch_size=4, shuffle=True, seed=5, transform=tenfold)
        loader.set_epoch(0)
        report["unprepared resumed"] = begun + numbers(skip_first_batches(loader, 3))
    if world_size() > 1:
        torch.distributed.destroy_process_group()
    return report
