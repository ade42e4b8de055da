"""The comparison's two loaders get the same batches, and only what they deliver counts."""

import contextlib

import pytest
import torch
from torch.utils.data import Dataset

import headrace as hr
from demo.timing import BlockingGets, FixedOrder, batches_within, time_epoch, torch_loader
from object_server import ObjectServer

OBJECTS = {f"{number:02d}": bytes([number]) for number in range(12)}
KEYS = sorted(OBJECTS)
BATCHES = [[3, 1], [0, 11], [7, 5], [2]]


@pytest.fixture
def server():
    with ObjectServer(OBJECTS) as server:
        yield server


def by_torch(server, keys=KEYS):
    return contextlib.closing(BlockingGets(server.http_url, keys, lambda data: torch.tensor(data[0]), int))


def as_pair(sample):
    return torch.tensor(sample.data[0]), sample.label


@pytest.mark.parametrize("whose", ["torch", "headrace"])
def test_both_loaders_deliver_the_given_batches_in_order(server, whose):
    seen = []
    order = FixedOrder(2)
    if whose == "torch":
        with by_torch(server) as dataset, torch_loader(dataset, order, 0) as loader:
            timing = time_epoch(loader, order, BATCHES, workers=0, on_batch=lambda *now: seen.append(now))
            delivered = [labels.tolist() for _, labels in loader]
    else:
        objects = hr.ObjectDataset(hr.Store(server.url, options=server.store_options), labels=int)
        with hr.DataLoader(objects, batch_sampler=order, transform=as_pair) as loader:
            timing = time_epoch(loader, order, BATCHES, workers=0, on_batch=lambda *now: seen.append(now))
            delivered = [labels.tolist() for _, labels in loader]
    assert (timing.samples, timing.labels) == (7, sum(map(sum, BATCHES)))
    assert [number for number, _ in seen] == [1, 2, 3, 4]
    assert delivered == BATCHES


def test_torch_dataset_of_the_comparison_uses_no_headrace(server):
    with by_torch(server) as dataset:
        assert isinstance(dataset, Dataset)
        assert not hasattr(dataset, "__getitems__")
        assert not hasattr(dataset, "aget")
        assert [dataset[index] for index in (5, 2)] == [(5, 5), (2, 2)]
        assert len(dataset) == 12


def test_object_that_is_missing_is_an_error(server):
    with by_torch(server, ["99"]) as dataset, pytest.raises(OSError, match="HTTP status 404"):
        dataset[0]


def test_as_many_batches_are_loaded_as_time_allows():
    batches = [[0] * 10 for _ in range(20)]
    assert batches_within(1e9, batches, latency=0.02, workers=2) == batches
    assert 0 < len(batches_within(1.0, batches, latency=0.05, workers=2)) < 20
    assert len(batches_within(0.0, batches, latency=0.05, workers=2)) == 2
    assert len(batches_within(0.0, batches, latency=0.05, workers=0)) == 1
