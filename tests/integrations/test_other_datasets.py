"""Datasets of other libraries inside headrace's loader: their samples, workers, ranks and positions."""

import contextlib
import functools
import json
import warnings

import numpy as np
import pytest
import torch
import torch.distributed
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler

import headrace as hr
from object_server import ObjectServer
from tests.unit.shards import tars

WHY = "make test-integrations"
litdata = pytest.importorskip("litdata", reason=WHY)
s3torchconnector = pytest.importorskip("s3torchconnector", reason=WHY)
nodes = pytest.importorskip("torchdata.nodes", reason=WHY)
webdataset = pytest.importorskip("webdataset", reason=WHY)

IMPORTS = ("webdataset", "litdata", "s3torchconnector", "torchdata.nodes")
SAMPLES = 40
SAME, WORKERS, RANKS, RESUME = (
    "same samples as in torch's loader",
    "with workers",
    "each sample once, on two ranks",
    "exact resume in mid-epoch",
)
# webdataset's shards
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
NOT_PROVEN = {("torchdata.nodes", WORKERS): "nodes have workers of their own"}


class Shards(webdataset.WebDataset):
    """Shards in an order that depends on the epoch alone."""

    def set_epoch(self, epoch):
        for stage in self.pipeline:
            if isinstance(stage, webdataset.detshuffle):
                stage.epoch = epoch - 1  # it counts from there when it starts


def shards(folder, **options):
    dataset = Shards(
        [f"{folder}/{shard}.tar" for shard in range(4)],
        shardshuffle=4,
        detshuffle=True,
        seed=1,
        **options,
    )
    return (
        dataset.compose(webdataset.detshuffle(5, seed=2))
        .decode()
        .to_tuple("cls")
        .map(first)
    )


def first(sample):
    return sample[0]


class Numbers(litdata.StreamingDataset):
    def __next__(self):
        return int(super().__next__()["number"])


class Nodes(nodes.Loader):
    """A pipeline of nodes, read by a thread of its own."""

    def __init__(self):
        info = hr.get_rank_info()
        self.sampler = DistributedSampler(
            range(SAMPLES), num_replicas=info.world_size, rank=info.rank, seed=3
        )
        root = nodes.SamplerWrapper(self.sampler)
        super().__init__(nodes.Prefetcher(nodes.Mapper(root, int), prefetch_factor=3))


def number_of(reader):
    return int(reader.read())


def objects(kind, url, **options):
    """A dataset of the objects below a prefix of the bucket at `url`."""
    endpoint, _, bucket = url.rpartition("/")
    return kind.from_prefix(
        f"s3://{bucket}/",
        region="us-east-1",
        endpoint=endpoint,
        transform=number_of,
        s3client_config=s3torchconnector.S3ClientConfig(
            unsigned=True, force_path_style=True
        ),
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of 10 samples for webdataset, and chunks of 5 for litdata."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "tar").mkdir()
    for shard in range(4):
        numbers = range(shard * 10, shard * 10 + 10)
        tar = tars.members(
            *((f"{number:02}.cls", b"%02d" % number) for number in numbers)
        )
        (folder / "tar" / f"{shard}.tar").write_bytes(tar)
    writer = litdata.streaming.Cache(str(folder / "chunks"), chunk_size=5)
    for number in range(SAMPLES):
        writer[number] = {"number": np.int64(number)}
    writer.done()
    writer.merge()
    return folder


@pytest.fixture(scope="module")
def url():
    with ObjectServer(
        {f"{number:02}": b"%d" % number for number in range(SAMPLES)}
    ) as server:
        yield server.http_url


@pytest.fixture
def places(folder, url):
    """What makes each dataset, by column of the table."""
    return makers(str(folder), url)


def makers(folder, url):
    return {
        "webdataset": functools.partial(
            shards, f"{folder}/tar", nodesplitter=webdataset.split_by_node
        ),
        "litdata": functools.partial(Numbers, f"{folder}/chunks", shuffle=True, seed=3),
        "s3torchconnector, map-style": functools.partial(
            objects, s3torchconnector.S3MapDataset, url
        ),
        "s3torchconnector, stream": functools.partial(
            objects, s3torchconnector.S3IterableDataset, url, enable_sharding=True
        ),
        "torchdata.nodes": Nodes,
    }


COLUMNS = (
    "webdataset",
    "litdata",
    "s3torchconnector, map-style",
    "s3torchconnector, stream",
    "torchdata.nodes",
)


def numbers(loader):
    return [batch.tolist() for batch in loader]


class ForTorch(torch.utils.data.IterableDataset):
    """A stream that torch's loader does not take as it is."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        return iter(self.stream)


def for_torch(dataset):
    return ForTorch(dataset) if isinstance(dataset, Nodes) else dataset


def proving(row, *more):
    return [
        pytest.param(column, *more, marks=pytest.mark.proves(column, row))
        for column in COLUMNS
    ]


@pytest.mark.parametrize(
    ("column", "workers"), [*proving(SAME, 0), *proving(WORKERS, 2)[:-1]]
)
def test_samples_are_those_of_torchs_loader(places, column, workers):
    torchs = numbers(TorchDataLoader(for_torch(places[column]()), 4, num_workers=workers))
    with hr.DataLoader(places[column](), 4, num_workers=workers) as loader:
        assert numbers(loader) == torchs
    assert sorted(number for batch in torchs for number in batch) == [*range(SAMPLES)]


def restored(make, epoch):
    """The batches of an epoch: of an uninterrupted run, and of one that was stopped after three and restored."""

    def loader():
        dataset = make()
        options = (
            {"shuffle": True, "seed": 5}
            if isinstance(dataset, s3torchconnector.S3MapDataset)
            else {}
        )
        return hr.DataLoader(dataset, 4, **options)

    with loader() as uninterrupted, loader() as stopped, loader() as continued:
        for number in range(epoch + 1):
            uninterrupted.set_epoch(number)
            whole = numbers(uninterrupted)
        for number in range(epoch):
            stopped.set_epoch(number)
            numbers(stopped)
        stopped.set_epoch(epoch)
        batches = iter(stopped)
        given = [next(batches).tolist() for _ in range(3)]
        continued.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        continued.set_epoch(epoch)
        return whole, given + numbers(continued)


@pytest.mark.parametrize("column", proving(RESUME))
def test_restored_loader_continues_in_mid_epoch_and_warns_of_a_stream_that_is_read_again(
    places, column
):
    warning = "it is read again from its start, .* must be the same, in the same order"
    stateless = column in ("webdataset", "litdata", "s3torchconnector, stream")
    with (
        pytest.warns(UserWarning, match=warning)
        if stateless
        else contextlib.nullcontext()
    ):
        first, again = restored(places[column], epoch=0)
        assert first == again
        second, again = restored(places[column], epoch=1)
        assert second == again
    # It is not shuffled.
    assert (first != second) == (column != "s3torchconnector, stream")


def read_in_ranks(folder, url):
    """The samples of this rank for each dataset, with torch's loader and headrace's, and the warnings of headrace's."""
    torch.distributed.init_process_group("gloo")
    report = {}
    undivided = {
        "webdataset without a split": functools.partial(
            shards, f"{folder}/tar", nodesplitter=None
        ),
        "s3torchconnector without a split": functools.partial(
            objects, s3torchconnector.S3IterableDataset, url
        ),
    }
    for name, make in {**makers(folder, url), **undivided}.items():
        for workers in (
            (0, 2)
            if name in ("webdataset", "litdata", "s3torchconnector, stream")
            else (0,)
        ):
            for kind in (TorchDataLoader, hr.DataLoader):
                dataset = for_torch(make()) if kind is TorchDataLoader else make()
                sampler = (
                    DistributedSampler(dataset)
                    if isinstance(dataset, s3torchconnector.S3MapDataset)
                    else None
                )
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    loader = kind(dataset, 4, num_workers=workers, sampler=sampler)
                    given = [number for batch in loader for number in batch.tolist()]
                    del loader
                said = [
                    str(each.message)
                    for each in caught
                    if "each of 2 ranks reads all of" in str(each.message)
                ]
                report[name, workers, kind is hr.DataLoader] = given, len(said)
    try:
        numbers(
            hr.DataLoader(
                webdataset.WebDataset([f"{folder}/tar/0.tar"], shardshuffle=False), 4
            )
        )
    except ValueError as error:
        report["webdataset by default"] = str(error)
    torch.distributed.destroy_process_group()
    return report


@pytest.fixture(scope="module")
def of_ranks(launcher, folder, url):
    return launcher.run(read_in_ranks, str(folder), url, ranks=2)


@pytest.mark.parametrize("column", proving(RANKS))
def test_ranks_share_the_samples(of_ranks, column):
    settings = [key for key in of_ranks[0] if key[0] == column]
    assert len(settings) >= 2
    for key in settings:
        assert sorted(of_ranks[0][key][0] + of_ranks[1][key][0]) == [*range(SAMPLES)], key
        assert of_ranks[0][key][0] == of_ranks[0][*key[:2], False][0], (
            "not as in torch's loader"
        )
        assert of_ranks[0][key][1] == 0, "a warning that is not true"


def test_stream_that_is_not_split_is_read_by_each_rank_as_in_torch(of_ranks):
    for rank in of_ranks:
        for name in ("webdataset without a split", "s3torchconnector without a split"):
            assert (
                sorted(rank[name, 0, False][0])
                == sorted(rank[name, 0, True][0])
                == [*range(SAMPLES)]
            )
        assert "explicit nodesplitter" in rank["webdataset by default"]


def test_webdataset_reads_packed_shards(tmp_path):
    fields = [
        {"cls": n, "npy": np.full(3, n), "json": {"n": [n]}, "seg.txt": f"é{n}"}
        for n in range(SAMPLES)
    ]
    samples = [
        {"__key__": f"a/{number:02}", **each} for number, each in enumerate(fields)
    ]
    assert hr.pack(samples, tmp_path, samples_per_shard=20).shards > 1
    names = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    for found, sample in zip(
        webdataset.WebDataset(names, shardshuffle=False).decode(), samples, strict=True
    ):
        assert found.pop("npy").tolist() == sample.pop("npy").tolist()
        assert {name: found[name] for name in sample} == sample
