"""One rank of a job of 2 x 2 ranks, data parallel by tensor parallel; run by `test_data_parallel.py`.

It prints a JSON object: for each scenario, the batches of two epochs, or the error. Datasets and
loaders are made before the process group.
"""

import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import headrace as hr
from tests import datasets
from tests.ranks.jobs import answer

LENGTH = 24
mesh = None


class Numbers(datasets.Numbers):
    async def aget(self, index):
        return [index, *said()]


class AsksItself(hr.AsyncIterableDataset):
    splits_by_rank = True

    async def __aiter__(self):
        info = hr.get_rank_info()
        for number in range(info.rank, LENGTH, info.world_size):
            yield [number, *said()]


class TorchStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info, worker = hr.get_rank_info(), torch.utils.data.get_worker_info()
        numbers = range(info.rank, LENGTH, info.world_size)
        for number in (
            numbers if worker is None else numbers[worker.id :: worker.num_workers]
        ):
            yield [number, *said()]


class Lazy(torch.utils.data.Sampler):
    """A sampler of the user's that asks for its rank at its first index, and at each one."""

    def __iter__(self):
        for number in range(LENGTH):
            if number % hr.get_rank_info().world_size == hr.get_rank_info().rank:
                yield number


class TorchNumbers(torch.utils.data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return [index, *said()]


def said():
    info = hr.get_rank_info()
    return [info.rank, info.world_size]


def transform(sample):
    return [*sample, *said(), float(torch.rand(()))]


def loader(dataset, **options):
    return hr.DataLoader(
        dataset, 3, collate_fn=list, data_parallel=lambda: mesh["dp"], seed=5, **options
    )


class Whole(hr.AsyncIterableDataset):
    """A stream that is the same on all ranks."""

    async def __aiter__(self):
        for number in range(LENGTH):
            yield [number, *said()]


def lines():
    return (
        hr.LinesDataset(os.environ["LINES"], shuffle=True, seed=0)
        .map(int)
        .map(lambda number: [number, *said()])
    )


BLOCKS = {"block_size": 3, "blocks_at_once": 2, "seed": 1}
PLACES = {
    "thread": {"placement": "thread"},
    "process": {"placement": "process", "num_workers": 1},
}
ASYNC = {
    "ElasticSampler": (Numbers(LENGTH), {"sampler": hr.ElasticSampler(LENGTH)}),
    "BlockShuffleSampler": (
        Numbers(LENGTH),
        {"sampler": hr.BlockShuffleSampler(LENGTH, **BLOCKS)},
    ),
    "sampler that asks at each index": (Numbers(LENGTH), {"sampler": Lazy()}),
    "stream that asks": (AsksItself(), {}),
    "shards": (lines(), {}),
    "split": (Whole().split(), {}),
}
TORCHS = {
    "torch, ElasticSampler": (TorchNumbers(), {"sampler": hr.ElasticSampler(LENGTH)}),
    "torch, stream": (TorchStream(), {}),
}
LOADERS = {
    **{
        f"{name}, {place}": loader(data, transform=transform, **options, **PLACES[place])
        for name, (data, options) in ASYNC.items()
        for place in PLACES
    },
    **{
        f"{name}, {workers} workers": loader(
            data, transform=transform, num_workers=workers, **options
        )
        for name, (data, options) in TORCHS.items()
        for workers in (0, 2)
    },
}


def epochs(made):
    with made:
        return [list(made) for _ in range(2)]


def error_of(iterate):
    try:
        return iterate()
    except (hr.errors.HeadraceError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def refused(dataset, **options):
    return error_of(
        lambda: iter(
            hr.DataLoader(
                dataset, 3, **{"data_parallel": mesh["dp"], "seed": 5, **options}
            )
        ).close()
    )


def gathered():
    """The states of streams split by shards, of the data-parallel ranks."""
    made = loader(lines())
    iterator = iter(made)
    given = [number for batch in (next(iterator), next(iterator)) for number, *_ in batch]
    iterator.close()
    state = hr.gather_state(made)
    again = loader(lines())
    again.load_state_dict(state)
    return [given, [number for batch in again for number, *_ in batch]]


class Uneven(hr.AsyncIterableDataset):
    """Streams of which the first rank of two has the shorter."""

    splits_by_rank = True

    async def __aiter__(self):
        for number in range(20 if hr.get_rank_info().rank else 7):
            yield [number, *said()]


def said_by_torch():
    try:
        return dist.get_rank()
    except ValueError as error:
        return str(error)


class AsksTorch(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return [dist.is_initialized(), said_by_torch(), *said(), int(os.environ["RANK"])]


class AsksTorchAsync(datasets.Numbers):
    async def aget(self, index):
        return AsksTorch()[index]


def seen_by_datasets():
    """What torch.distributed and headrace say in a dataset, and the transform of the asynchronous one."""
    options = {"collate_fn": list, "seed": 5, "data_parallel": mesh["dp"]}
    both = {**options, "transform": lambda sample: [sample, AsksTorch()[0]]}
    return {
        "thread": list(hr.DataLoader(AsksTorchAsync(1), **both)),
        "process": list(hr.DataLoader(AsksTorchAsync(1), num_workers=1, **both)),
        "torch, inline": list(hr.DataLoader(AsksTorch(), **options)),
        "torch, fork": list(
            hr.DataLoader(
                AsksTorch(), num_workers=1, multiprocessing_context="fork", **options
            )
        ),
    }


def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iter(
            hr.DataLoader([1, 2], data_parallel=mesh["dp"], seed=5, shuffle=True)
        ).close()
    return [str(each.message) for each in caught]


def group_of_first_two():
    """A loader on a group that two of the ranks are not in."""
    return refused(AsksItself(), data_parallel=dist.new_group([0, 1]))


def main():
    global mesh
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    read = {name: epochs(made) for name, made in LOADERS.items()}
    read["length"] = len(LOADERS["ElasticSampler, thread"])
    read["group"] = epochs(
        hr.DataLoader(
            AsksItself(), 3, collate_fn=list, data_parallel=mesh["dp"].get_group(), seed=5
        )
    )
    read["coordinated"] = epochs(loader(Uneven(), coordinated=True))
    read["gathered"] = gathered()
    read["torch.distributed"] = seen_by_datasets()
    read["member"] = group_of_first_two()
    read["two dimensions"] = error_of(lambda: hr.DataLoader([1], data_parallel=mesh))
    read["DistributedSampler"] = refused(
        TorchNumbers(), sampler=torch.utils.data.DistributedSampler(TorchNumbers())
    )
    stream = Whole().split(rank=dist.get_rank(), world_size=4)
    read["rank of a stream"] = error_of(lambda: list(loader(stream)))
    read["no seed"] = refused(AsksItself(), seed=None)
    read["order of completion"] = refused(AsksItself(), in_order=False)
    read["warned"] = warned()
    read["outside"] = said()
    read["rebuilt"] = (
        LOADERS["split, thread"].data_parallel
        is LOADERS["split, thread"]._control.spec.options["data_parallel"]
    )
    answer(read)


if __name__ == "__main__":
    main()
