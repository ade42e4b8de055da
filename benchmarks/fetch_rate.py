"""How close fetching comes to what the store's latency allows: concurrency ÷ latency.

2,000 objects of 56 KB from a local HTTP object store that takes 20 ms to the first byte, 64 fetches in flight, no
transform, no workers. In the same run: a bare obstore loop of 64 coroutines with ranged GETs (the limit), and torch's
own loader with two workers, one blocking GET at a time in each, as its users have it.

The store runs in a process of its own and shares the machine's cores with whoever is measured.

    python benchmarks/fetch_rate.py
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import torch
import uvloop
from harness import claim, describe_machine, interleave
from obstore import get_range_async
from obstore.store import from_url

import headrace as hr
from headrace.testing import ObjectServer

OBJECT_SIZE = 56_000  # bytes: a JPEG of 500 × 375 pixels
CONCURRENCY = 64
LATENCY = 0.020  # seconds to the first byte
TORCH_SHARE = 10  # torch is given every tenth object: its rate does not depend on how many there are


class OneAtATime(torch.utils.data.Dataset[int]):
    """A torch dataset as it is usually written: a blocking GET in `__getitem__`."""

    def __init__(self, objects: hr.ObjectDataset, length: int) -> None:
        self.objects = objects
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return len(self.objects[index].data)


def count_bytes(samples: list[hr.ObjectSample]) -> int:
    return sum(len(sample.data) for sample in samples)


def with_headrace(objects: hr.ObjectDataset, loader: hr.DataLoader[Any]) -> float:
    began = time.perf_counter()
    received = sum(loader)
    elapsed = time.perf_counter() - began
    check(received, len(objects))
    return len(objects) / elapsed


def with_bare_obstore(objects: hr.ObjectDataset, server: ObjectServer) -> float:
    store = from_url(server.url, **server.store_options)

    async def run() -> float:
        keys = iter(objects.keys)
        received = 0

        async def fetch() -> None:
            nonlocal received
            for key in keys:
                data = await get_range_async(store, key, start=0, length=OBJECT_SIZE)
                received += len(data)

        began = time.perf_counter()
        await asyncio.gather(*(fetch() for _ in range(CONCURRENCY)))
        elapsed = time.perf_counter() - began
        check(received, len(objects))
        return len(objects) / elapsed

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def with_torch(length: int, loader: torch.utils.data.DataLoader[Any]) -> float:
    batches = iter(loader)
    received = int(next(batches).sum())  # the first batch is not counted: the workers are starting
    counted = -loader.batch_size
    began = time.perf_counter()
    received += sum(int(batch.sum()) for batch in batches)
    elapsed = time.perf_counter() - began
    check(received, length)
    counted += length
    return counted / elapsed


def check(received: int, objects: int) -> None:
    if received != objects * OBJECT_SIZE:
        raise RuntimeError(f"{received} bytes came, {objects * OBJECT_SIZE} were expected: this run does not count")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    contents = {f"{i:06d}.bin": bytes(OBJECT_SIZE) for i in range(arguments.objects)}
    with ObjectServer(contents, latency=LATENCY) as server:
        objects = hr.ObjectDataset(server.url, store_options=server.store_options)
        few = len(objects) // TORCH_SHARE
        torch_loader = torch.utils.data.DataLoader(
            OneAtATime(objects, few),
            batch_size=10,
            num_workers=2,
            multiprocessing_context="spawn",
            persistent_workers=True,
        )
        with hr.DataLoader(objects, batch_size=50, collate_fn=count_bytes, concurrency=CONCURRENCY) as loader:
            limit = CONCURRENCY / LATENCY
            rounds = interleave(
                {
                    "concurrency ÷ latency": lambda: limit,
                    "bare obstore loop": lambda: with_bare_obstore(objects, server),
                    "headrace": lambda: with_headrace(objects, loader),
                    "torch, 2 workers": lambda: with_torch(few, torch_loader),
                },
                rounds=arguments.rounds,
                unit="objects/s",
            )
    print(f"{arguments.objects} objects of {OBJECT_SIZE} bytes, {LATENCY * 1000:.0f} ms, {CONCURRENCY} in flight")
    print(describe_machine())
    rounds.show(against="concurrency ÷ latency")
    against = ("concurrency ÷ latency", "bare obstore loop", "torch, 2 workers")
    share, of_bare, of_torch = (rounds.ratio("headrace", to) for to in against)
    claim(
        f"fetching at {CONCURRENCY} in flight",
        aim="≥ 0.85 of concurrency ÷ latency",
        reached=f"{share:.3f}; {of_bare:.3f} of a bare loop; {of_torch:.0f} × torch",
        met=share >= 0.85,
    )


if __name__ == "__main__":
    main()
