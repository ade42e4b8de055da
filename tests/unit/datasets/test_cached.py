"""`dataset.cache(folder)`: the same samples as without it, fetched once."""

import pickle

import numpy as np
import pytest
import torch
from obstore.store import MemoryStore, from_url

import headrace as hr
from object_server import ObjectServer
from tests.unit.shards import tars

COUNT = 10


@pytest.fixture
def server():
    tokens = np.arange(100, dtype=np.uint16).tobytes()
    tar = tars.shard(
        range(COUNT), a=lambda number: b"a" * 100 * number, b=lambda number: b"b" * 100 * number
    )
    objects = {f"train/{number}": bytes([number]) * number for number in range(COUNT)}
    with ObjectServer({**objects, "tokens/0.bin": tokens, "tars/0.tar": tar}) as server:
        yield server


def objects(server, **more):
    return hr.ObjectDataset(hr.Store(f"{server.url}/train", options=server.store_options), **more)


DATASETS = {
    "objects": objects,
    "objects by keys": lambda server: objects(
        server, keys=[str(number) for number in range(COUNT)]
    ),
    "windows": lambda server: hr.TokenDataset(
        f"{server.url}/tokens/0.bin",
        seq_len=10,
        store=hr.Store(server.url, options=server.store_options),
    ),
    "an indexed tar": lambda server: hr.TarDataset.index(
        f"{server.url}/tars/0.tar", store=hr.Store(server.url, options=server.store_options)
    ),
}


@pytest.fixture(params=DATASETS)
def dataset(request, server):
    return DATASETS[request.param](server)


def plain(sample):
    """A sample as something that compares."""
    if isinstance(sample, torch.Tensor):
        return sample.tolist()
    return sample if isinstance(sample, dict) else (sample.key, bytes(sample.data), sample.label)


def test_samples_are_the_same_and_are_fetched_once(dataset, server, tmp_path):
    expected = [plain(dataset[index]) for index in range(len(dataset))]
    cached = dataset.cache(tmp_path / "cache")
    assert len(cached) == len(dataset) == COUNT
    assert [plain(cached[index]) for index in range(COUNT)] == expected
    before = server.requests()["GET"]
    again = pickle.loads(pickle.dumps(cached))
    for either in (cached, again, dataset.cache(tmp_path / "cache")):
        assert [plain(either[index]) for index in range(-COUNT, COUNT)] == expected * 2
    assert server.requests()["GET"] == before


def test_errors_of_the_dataset_are_unchanged(dataset, tmp_path):
    cached = dataset.cache(tmp_path / "cache")
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match="out of range"):
            cached[index]
    assert cached.sample_key(3) == dataset.sample_key(3)
    assert repr(dataset) in repr(cached)


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_map_after_cache_runs_in_workers_in_each_epoch(server, tmp_path, placement):
    cached = objects(server, labels=int).cache(tmp_path / "cache")
    mapped = torch.utils.data.Subset(
        cached.map(lambda sample: len(sample.data) * 100 + sample.label), range(5)
    )
    with hr.DataLoader(mapped, batch_size=5, num_workers=1, placement=placement) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 101, 202, 303, 404]]
        counts = loader.stats().requests
    # The sample without bytes needs neither a request nor a file.
    assert (counts.requests, counts.cache_misses, counts.cache_hits) == (4, 4, 4)


def test_subset_concat_and_a_stock_loader_read_the_cache(server, tmp_path):
    cached = objects(server).cache(tmp_path / "cache")
    both = hr.concat([torch.utils.data.Subset(cached, range(3)), cached])
    stock = torch.utils.data.DataLoader(
        both, batch_size=13, collate_fn=lambda samples: [s.key for s in samples]
    )
    assert list(stock) == [["0", "1", "2", *map(str, range(COUNT))]]


def test_labels_are_not_cached(server, tmp_path):
    assert objects(server, labels=lambda key: "old").cache(tmp_path / "cache")[3].label == "old"
    before = server.requests()["GET"]
    assert objects(server, labels=lambda key: "new").cache(tmp_path / "cache")[3].label == "new"
    assert server.requests()["GET"] == before


def test_version_distinguishes_objects_without_an_entity_tag(server, tmp_path):
    keys = [str(number) for number in range(COUNT)]
    assert bytes(objects(server, keys=keys).cache(tmp_path / "cache")[3].data) == b"\3\3\3"
    server.put("train/3", b"new")
    assert bytes(objects(server, keys=keys).cache(tmp_path / "cache")[3].data) == b"\3\3\3"
    assert bytes(objects(server, keys=keys).cache(tmp_path / "cache", version=2)[3].data) == b"new"


def test_store_objects_are_identified_by_their_configuration(server, tmp_path):
    ready = from_url(f"{server.url}/train", **server.store_options)
    other = from_url(f"{server.url}/tokens", **server.store_options)
    one = hr.ObjectDataset(hr.Store("name", backend=ready), keys=["3"]).cache(tmp_path / "cache")
    assert bytes(one[0].data) == b"\3\3\3"
    with pytest.raises(hr.errors.ObjectNotFoundError):
        hr.ObjectDataset(hr.Store("name", backend=other), keys=["3"]).cache(tmp_path / "cache")[0]


def test_file_store_is_cached(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"first")
    url = (tmp_path / "data").as_uri()
    assert bytes(hr.ObjectDataset(url).cache(tmp_path / "cache")[0].data) == b"first"
    (tmp_path / "data" / "a").write_bytes(b"second")
    assert bytes(hr.ObjectDataset(url).cache(tmp_path / "cache")[0].data) == b"second"


def test_subclass_may_define_sample_of_but_not_aget(server, tmp_path):
    class Length(hr.ObjectDataset):
        def sample_of(self, index, data):
            return len(data)

    class Wrong(hr.ObjectDataset):
        async def aget(self, index):
            return len((await super().aget(index)).data)

    lengths = Length(hr.Store(f"{server.url}/train", options=server.store_options))
    cached = lengths.cache(tmp_path / "cache")
    for dataset in (lengths, cached, cached):
        assert [dataset[index] for index in range(COUNT)] == list(range(COUNT))
    with pytest.raises(TypeError, match=r"Wrong defines aget.*sample_of"):
        Wrong(hr.Store(f"{server.url}/train", options=server.store_options)).cache(
            tmp_path / "cache"
        )


def test_store_in_memory_and_size_limit_that_is_not_positive_are_refused(server, tmp_path):
    with pytest.raises(ValueError, match="max_bytes"):
        objects(server).cache(tmp_path / "cache", max_bytes=0)
    store = MemoryStore()
    store.put("a", b"abc")
    with pytest.raises(ValueError, match="in the memory of this process"):
        hr.ObjectDataset(hr.Store("memory://", backend=store)).cache(tmp_path / "cache")
