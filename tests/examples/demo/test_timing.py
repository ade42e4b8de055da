"""The comparison's two loaders get the same batches, and only what they deliver counts."""

import contextlib

import torch

import headrace as hr
from demo.timing import BlockingGets, FixedOrder, batches_within, time_epoch, torch_loader
from object_server import ObjectServer

OBJECTS = {f"{number:02d}": bytes([number]) for number in range(12)}
KEYS = sorted(OBJECTS)
BATCHES = [[3, 1], [0, 11], [7, 5], [2]]


def test_both_loaders_deliver_the_given_batches_in_order():
    def timed(loader, seen):
        timing = time_epoch(
            loader, order, BATCHES, workers=0, on_batch=lambda *now: seen.append(now)
        )
        return timing, [number for number, _ in seen], [labels.tolist() for _, labels in loader]

    order = FixedOrder(2)
    with ObjectServer(OBJECTS) as server:
        gets = BlockingGets(server.http_url, KEYS, lambda data: torch.tensor(data[0]), int)
        objects = hr.ObjectDataset(hr.Store(server.url, options=server.store_options), labels=int)
        with (
            contextlib.closing(gets) as dataset,
            torch_loader(dataset, order, 0) as torchs,
            hr.DataLoader(
                objects,
                batch_sampler=order,
                transform=lambda sample: (torch.tensor(sample.data[0]), sample.label),
            ) as ours,
        ):
            for loader in (torchs, ours):
                timing, numbers, delivered = timed(loader, [])
                assert (timing.samples, timing.labels) == (7, sum(map(sum, BATCHES)))
                assert numbers == [1, 2, 3, 4]
                assert delivered == BATCHES


def test_as_many_batches_are_loaded_as_time_allows():
    batches = [[0] * 10 for _ in range(20)]
    assert batches_within(1e9, batches, latency=0.02, workers=2) == batches
    assert 0 < len(batches_within(1.0, batches, latency=0.05, workers=2)) < 20
    assert len(batches_within(0.0, batches, latency=0.05, workers=2)) == 2
    assert len(batches_within(0.0, batches, latency=0.05, workers=0)) == 1
