"""`placement=hr.RayPlacement(...)`: batches through Ray beside bare calls of an actor, Ray Data, and a local engine.

    python benchmarks/engines_on_ray.py

Two nodes of Ray on this machine: the program is on one, without CPUs, the actors are on the other.
Each batch is an array of one value for each sample, which the consumer checks and adds to. A bare
call makes the same array in an actor and returns it, one call after the other or as many at once as
the loader plans ahead; results are copied, to be written to. Loaders make it in a worker. Ray Data
makes it by `map_batches`, and `iter_torch_batches` returns it.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import time

import numpy as np
import ray
import ray.data
import torch
from harness import claim, describe_machine, interleave, parse_arguments
from ray.cluster_utils import Cluster

import headrace as hr

AHEAD = 6  # calls under way; the loader's own choice with these options
# name: bytes of a sample, samples of a batch, batches of an epoch, as one of bare calls, as asked
WORK = {
    "4 KB": (4096, 1, 2000, 0.5),
    "1 MB": (16384, 64, 100, 0.8),
    "38 MB": (600_000, 64, 16, 0.8),
}


class Numbers(hr.AsyncDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    async def agets(self, indices):
        return indices


class Made:
    """Makes the batch of some samples, as one array.

    Args:
        size: bytes of a sample.
    """

    def __init__(self, size):
        self.size = size

    def __call__(self, samples):
        column = np.array(samples, dtype=np.int64)[:, None]
        return torch.from_numpy((column % 251).astype(np.uint8).repeat(self.size, axis=1))

    def of_rows(self, rows):
        return {"data": self(rows["id"]).numpy()}


class Maker:
    """An actor that returns the batch of some samples."""

    def __init__(self, size):
        self.made = Made(size)

    def batch(self, samples):
        return self.made(samples).numpy()


def check(batch, number, size, samples):
    batch += 1
    expected = np.arange(number * samples, (number + 1) * samples) % 251 + 1
    if (
        batch.shape != (samples, size)
        or (batch[:, 0].numpy() != expected).any()
        or batch[-1, -1] != expected[-1]
    ):
        raise AssertionError(f"batch {number} is wrong")


def measured(batches, size, samples, count):
    """Batches/s without the first, which waits for the start."""
    number, began = 0, 0.0
    for number, batch in enumerate(batches):
        if number == 1:
            began = time.perf_counter()
        check(batch, number, size, samples)
    if number != count - 1:
        raise AssertionError(f"{number + 1} of {count} batches")
    return (count - 1) / (time.perf_counter() - began)


def by_bare_calls(actor, samples, count, ahead=AHEAD):
    ready = collections.deque()
    numbers = iter(range(count))
    for _ in range(count):
        for number in itertools.islice(numbers, ahead - len(ready)):
            ready.append(
                actor.batch.remote(range(number * samples, (number + 1) * samples))
            )
        yield torch.from_numpy(ray.get(ready.popleft()).copy())


def by_ray_data(size, samples, count):
    data = ray.data.range(samples * count).map_batches(
        Made(size).of_rows, batch_size=samples
    )
    for batch in data.iter_torch_batches(batch_size=samples, prefetch_batches=AHEAD):
        yield batch["data"].clone()  # read-only otherwise


def by_loader(size, samples, count, **options):
    return hr.DataLoader(
        Numbers(samples * count),
        samples,
        collate_fn=Made(size),
        concurrency=4,
        memory_budget=None,
        num_workers=1,
        **options,
    )


def compare(name, batches, rounds):
    size, samples, count, asked = WORK[name]
    count = min(count, batches)
    actor = ray.remote(Maker).remote(size)
    on_ray = by_loader(size, samples, count, placement=hr.RayPlacement())
    here = by_loader(size, samples, count, placement="process")
    ways = {
        "bare calls, one by one": lambda: by_bare_calls(actor, samples, count, ahead=1),
        "bare calls": lambda: by_bare_calls(actor, samples, count),
        "RayPlacement": lambda: on_ray,
        "Ray Data": lambda: by_ray_data(size, samples, count),
        "a local engine": lambda: here,
    }
    print(f"\nbatches of {name}")
    rates = interleave(
        {
            way: lambda make=make: measured(make(), size, samples, count)
            for way, make in ways.items()
        },
        rounds=rounds,
        unit=f"batches/s of {name}",
    )
    rates.show(against="bare calls, one by one")
    on_ray.close()
    here.close()
    ray.kill(actor)
    one_by_one = rates.share("RayPlacement", "bare calls, one by one", at_least=asked)
    claim(f"{name} through Ray", one_by_one, rates.share("RayPlacement", "bare calls"))
    claim(
        f"{name} beside Ray Data", rates.share("RayPlacement", "Ray Data", at_least=1.0)
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=2000, help="at most, of an epoch")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, batches=4, rounds=1)
    node = {"object_store_memory": 2_000_000_000}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, **node},
    )
    cluster.add_node(num_cpus=4, **node)
    ray.init(address=cluster.address, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    print(describe_machine("ray"))
    for name in WORK:
        compare(name, arguments.batches, arguments.rounds)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
