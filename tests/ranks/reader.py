"""The samples that one rank of a job reads, for each setup of a loader; run by `test_processes.py`, once for each rank.

It prints a JSON object: for each scenario, the samples of each epoch. Datasets and samplers are
made before anything in the process knows its rank, as in a script that makes them before
`trainer.fit()`."""

import itertools
import json
import os
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

import headrace as hr
from tests.datasets import Numbers

EPOCHS = 2
PLACES = list(itertools.product(("thread", "process"), (0, 2)))


class Unsplit(hr.AsyncIterableDataset):
    """A stream that is the same on all ranks."""

    async def __aiter__(self):
        for number in range(40):
            yield number


class AsksItself(hr.AsyncIterableDataset):
    """A stream that determines its rank when reading begins."""

    splits_by_rank = True

    async def __aiter__(self):
        info = hr.get_rank_info()
        for number in range(info.rank, 40, info.world_size):
            yield number


class Infos(Numbers):
    """The result of `get_rank_info` in `aget`."""

    async def aget(self, index):
        return said()


def said():
    info = hr.get_rank_info()
    return [info.rank, info.world_size]


def said_in_transform(sample):
    return [*sample, *said(), *in_worker_init, int(os.environ.get("RANK", -1))]


def said_in_collate(samples):
    return [*samples[0], *said()]


in_worker_init = []


def init_worker(number):
    in_worker_init.extend(said())


def datasets(folder):
    lines = hr.LinesDataset(folder, shuffle=True, buffer_size=5).split()
    whole_shards = hr.LinesDataset(folder, shuffle=True)
    return {
        "lines by samples": lines.map(int),
        "lines by shards": whole_shards.map(int),
        "parquet": hr.ParquetDataset(folder / "rows.parquet")
        .stream(shuffle=True)
        .map(lambda row: row["x"]),
        "split": Unsplit().shuffle(8, seed=1).split(),
        "asks itself": AsksItself(),
    }


def scenarios(folder):
    for (name, dataset), (placement, workers) in itertools.product(
        datasets(folder).items(), PLACES
    ):
        yield (
            f"{name}, {placement}, {workers} workers",
            dataset,
            {"placement": placement, "num_workers": workers},
        )
    for placement, workers in PLACES:
        numbers = Numbers(64)  # which two ranks share evenly in blocks of four
        sampler = hr.BlockShuffleSampler(numbers, block_size=4, blocks_at_once=4, seed=5)
        options = {"sampler": sampler, "placement": placement, "num_workers": workers}
        yield f"blocks, {placement}, {workers} workers", numbers, options


def epochs_of(loader):
    return [list(itertools.chain.from_iterable(batch for batch in loader)) for _ in range(EPOCHS)]


def main():
    folder = Path(os.environ["FOLDER"])
    made = [
        (name, hr.DataLoader(data, 4, collate_fn=list, **options))
        for name, data, options in scenarios(folder)
    ]
    if "GLOO" in os.environ:  # neither the launcher nor the environment says which rank this is
        # the shards are equal
        warnings.filterwarnings("ignore", message="the 2 ranks may get different numbers")
        rank, world_size = map(int, os.environ["GLOO"].split(","))
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    read = {}
    for name, loader in made:
        with loader:
            read[name] = epochs_of(loader)
            if name.startswith(("parquet", "blocks")):
                assert len(read[name][0]) == 4 * len(loader), name
    for placement, workers in PLACES:
        place = {"placement": placement, "num_workers": workers}
        in_worker_init.clear()
        options = {
            "transform": said_in_transform,
            "collate_fn": said_in_collate,
            "worker_init_fn": init_worker,
        }
        with hr.DataLoader(Infos(1), 1, **options, **place) as loader:
            read[f"infos, {placement}, {workers} workers"] = list(loader)
    print(json.dumps(read))
    sys.stdout.flush()
    if "GLOO" in os.environ:
        os._exit(0)  # the ordinary way out now and then aborts in gloo's threads


if __name__ == "__main__":
    main()
