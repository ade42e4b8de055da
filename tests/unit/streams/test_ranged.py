"""Neighbouring byte ranges are read by one request, also through compositions, unless a subclass defines `aget`."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader

import headrace as hr
from headrace._streams.kinds import capabilities
from object_server import ObjectServer
from tests.servers import store_of

TOKENS = np.arange(40_000, dtype="<u2")
ORDER = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def server():
    with ObjectServer(
        {
            f"{number}.bin": TOKENS[number * 20_000 :][:20_000].tobytes()
            for number in range(2)
        }
    ) as server:
        yield server


def windows(server, kind=hr.TokenDataset):
    return kind(
        ["0.bin", "1.bin"],
        seq_len=40,
        store=store_of(server),
    )


def gets_of(server, loader):
    before = server.requests()["GET"]
    batches = list(loader)
    return batches, server.requests()["GET"] - before


def expected(order):
    return torch.from_numpy(TOKENS.astype(np.int64)).view(1000, 40)[torch.tensor(order)]


@pytest.mark.parametrize(("placement", "num_workers"), [("thread", 0), ("process", 2)])
def test_shuffled_epoch_within_the_look_ahead_takes_few_requests(
    server, placement, num_workers
):
    dataset = windows(server)
    sampler = hr.BlockShuffleSampler(dataset, block_size=250, blocks_at_once=4, seed=0)
    options = {
        "batch_size": 10,
        "sampler": sampler,
        "placement": placement,
        "num_workers": num_workers,
    }
    with hr.DataLoader(dataset, **options) as loader:
        batches, gets = gets_of(server, loader)
    sampler.set_epoch(0)
    assert torch.equal(torch.cat(batches), expected(list(sampler)))
    # At most ten for the first batch, and one for each shard.
    assert gets <= 12


def plus_one(window):
    return window + 1


def test_torch_concatenation_keeps_joined_reads(server):
    store = store_of(server)
    parts = [hr.TokenDataset(f"{i}.bin", seq_len=40, store=store) for i in (0, 1)]
    both = ConcatDataset([parts[0], parts[1].map(plus_one), Subset(parts[0], [7, 3])])
    order = [*ORDER, 1000, 1001]
    with hr.DataLoader(
        both, batch_size=10, sampler=order, num_workers=1, prefetch_factor=101
    ) as loader:
        batches, gets = gets_of(server, loader)
    mapped = torch.tensor([[500 <= index < 1000] for index in order])
    assert torch.equal(torch.cat(batches), expected([*ORDER, 7, 3]) + mapped)
    assert gets <= 14


class Pairs(hr.TokenDataset):
    async def aget(self, index):
        window = await super().aget(index)
        return window[:-1], window[1:]


@pytest.mark.parametrize(
    "loader_of", [hr.DataLoader, TorchDataLoader], ids=["headrace", "torch"]
)
def test_subclass_with_its_own_aget_is_read_by_it(server, loader_of):
    dataset = windows(server, Pairs)
    assert not capabilities(dataset).ranges
    assert not capabilities(hr.concat([dataset])).ranges
    inputs, targets = next(iter(loader_of(dataset, batch_size=10, sampler=ORDER)))
    assert torch.equal(inputs, expected(ORDER[:10])[:, :-1])
    assert torch.equal(targets, expected(ORDER[:10])[:, 1:])


def test_reads_of_single_samples_are_joined(server):
    order = {"batch_size": None, "sampler": ORDER[:100]}
    with hr.DataLoader(
        windows(server), **order, memory_budget=None
    ) as loader:  # nothing waits for the first size
        samples, gets = gets_of(server, loader)
    assert torch.equal(torch.stack(samples), expected(ORDER[:100]))
    assert gets <= 4


def test_missing_shard_fails_only_its_samples_each_by_name(server):
    dataset = windows(server)
    server.delete("1.bin")
    with hr.DataLoader(
        dataset, batch_size=10, sampler=ORDER[:60], on_error="skip"
    ) as loader:
        delivered = torch.cat(list(loader))
        failures = loader.stats().skipped
    good = [index for index in ORDER[:60] if index < 500]
    assert torch.equal(delivered, expected(good))
    assert len(failures) <= 100  # all of them are listed
    assert sorted(failure.index for failure in failures) == sorted(
        set(ORDER[:60]) - set(good)
    )
    assert {failure.key for failure in failures} == {
        dataset.sample_key(failure.index) for failure in failures
    }
    assert all(f"index {failure.index}" in failure.message for failure in failures)
