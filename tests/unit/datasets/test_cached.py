"""`dataset.cache(folder)`: the same samples as without it, fetched once."""

import pickle

import pytest
import torch
from obstore.store import from_url

import headrace as hr
from tests.unit.shards.resuming import in_folder, in_memory

COUNT = 10


KEYS = [*map(str, range(COUNT))]
OBJECTS = {f"train/{number}": bytes([number]) * number for number in range(COUNT)}


def objects(server, **more):
    return hr.ObjectDataset(server.store("train"), **more)


@pytest.mark.parametrize("keys", [None, KEYS], ids=["listed", "given"])
def test_samples_are_the_same_and_are_fetched_once(server, tmp_path, keys):
    dataset = objects(server, keys=keys)
    expected = [dataset[index] for index in range(COUNT)]
    cached = dataset.cache(tmp_path / "cache")
    assert len(cached) == COUNT
    assert cached.sample_key(3) == dataset.sample_key(3)
    assert repr(dataset) in repr(cached)
    assert [cached[index] for index in range(COUNT)] == expected
    before = server.requests()["GET"]
    again = pickle.loads(pickle.dumps(cached))
    for either in (cached, again, dataset.cache(tmp_path / "cache")):
        assert [either[index] for index in range(-COUNT, COUNT)] == expected * 2
    assert server.requests()["GET"] == before


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_map_after_cache_runs_in_workers_in_each_epoch(server, tmp_path, placement):
    cached = objects(server, labels=int).cache(tmp_path / "cache")
    mapped = torch.utils.data.Subset(
        cached.map(lambda sample: len(sample.data) * 100 + sample.label), range(5)
    )
    with hr.DataLoader(
        mapped, batch_size=5, num_workers=1, placement=placement
    ) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 101, 202, 303, 404]]
        counts = loader.stats().requests
    # The sample without bytes needs neither a request nor a file.
    assert (counts.requests, counts.cache_misses, counts.cache_hits) == (4, 4, 4)


def test_labels_are_not_cached(server, tmp_path):
    assert (
        objects(server, labels=lambda key: "old").cache(tmp_path / "cache")[3].label
        == "old"
    )
    before = server.requests()["GET"]
    assert (
        objects(server, labels=lambda key: "new").cache(tmp_path / "cache")[3].label
        == "new"
    )
    assert server.requests()["GET"] == before


def test_store_objects_are_identified_by_their_configuration(server, tmp_path):
    ready = from_url(f"{server.url}/train", **server.store_options)
    other = from_url(f"{server.url}/tokens", **server.store_options)
    one = hr.ObjectDataset(hr.Store("name", backend=ready), keys=["3"]).cache(
        tmp_path / "cache"
    )
    assert bytes(one[0].data) == b"\3\3\3"
    with pytest.raises(hr.errors.ObjectNotFoundError):
        hr.ObjectDataset(hr.Store("name", backend=other), keys=["3"]).cache(
            tmp_path / "cache"
        )[0]


def test_file_store_is_cached(tmp_path):
    for content in (b"first", b"second"):
        folder = in_folder(tmp_path / "data", {"a": content})
        assert (
            bytes(hr.ObjectDataset(folder).cache(tmp_path / "cache")[0].data) == content
        )


def test_subclass_may_define_sample_of_but_not_aget(server, tmp_path):
    class Length(hr.ObjectDataset):
        def sample_of(self, index, data):
            return len(data)

    class Wrong(hr.ObjectDataset):
        async def aget(self, index):
            return len((await super().aget(index)).data)

    lengths = Length(server.store("train"))
    cached = lengths.cache(tmp_path / "cache")
    for dataset in (lengths, cached, cached):
        assert [dataset[index] for index in range(COUNT)] == list(range(COUNT))
    with pytest.raises(TypeError, match=r"Wrong defines aget.*sample_of"):
        Wrong(server.store("train")).cache(tmp_path / "cache")


def test_store_in_memory_and_size_limit_that_is_not_positive_are_refused(
    server, tmp_path
):
    with pytest.raises(ValueError, match="max_bytes"):
        objects(server).cache(tmp_path / "cache", max_bytes=0)
    with pytest.raises(ValueError, match="in the memory of this process"):
        hr.ObjectDataset(in_memory({"a": b"abc"})).cache(tmp_path / "cache")
