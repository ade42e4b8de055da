"""Random windows of 4 KB out of 64 MiB shards, against one request a window and against reading the shards in sequence.

The windows (2,048 tokens of two bytes) come in the order of `BlockShuffleSampler`, through a
`DataLoader` whose look-ahead covers twice what is shuffled at once; figures are bytes of the shards
per second. The sequential limit is a bare obstore loop that reads the same shards in ranges of 8
MiB, as many at once, and makes nothing of them; and the same in ranges of 1 MiB, which are nearer
to the requests that windows make.

The stores: one behind a link of so many megabytes per second, which the kernel's token bucket keeps
to for all connections together, in a network namespace of the benchmark's own (`unshare`, `ip` and
`tc`, as root); and one as fast as loopback, where the two cores are the limit. What the tensors
alone cost there is measured by a bare loop that reads the ranges of 8 MiB and makes, of the windows
of each, batches in a random order, without a loader; in the thread that checks them, and in
another. Windows one by one are those of the first shard alone.

    python benchmarks/random_windows.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch
import uvloop
from harness import Figure, claim, describe_machine, interleave_figures, parse_arguments
from obstore import get_range_async
from obstore.store import from_url
from served import served

import headrace as hr

SHARD = 64 * 2**20  # bytes
TOKENS = 2048  # in a window
WINDOW = 2 * TOKENS  # bytes
BATCH = 64
BLOCK = 256  # windows: 1 MiB
POOL = 32  # blocks at once
SPAN = 8 * 2**20  # bytes, of the sequential limit's requests
CONCURRENCY = 8  # requests that everybody has in flight
# MB/s; clouds give a machine of two cores 60 to 160 for as long as it likes, and 1,250 in bursts
LINKS = (100, 200, 400)


def shard(number: int) -> bytes:
    """Tokens of which every window begins with its number."""
    tokens = np.random.default_rng(number).integers(
        0, 65_536, size=SHARD // 2, dtype=np.uint16
    )
    windows = tokens.reshape(-1, TOKENS)
    first = number * len(windows)
    windows[:, 0] = np.arange(first, first + len(windows)) & 0xFFFF
    windows[:, 1] = np.arange(first, first + len(windows)) >> 16
    return tokens.tobytes()


class Everything:
    """What must have come: each window once, with the sum of its tokens."""

    def __init__(self, shards: list[bytes]) -> None:
        self.sums = np.concatenate(
            [
                np.frombuffer(data, np.uint16)
                .reshape(-1, TOKENS)
                .sum(axis=1, dtype=np.int64)
                for data in shards
            ]
        )
        self.total = (
            sum(
                int(np.frombuffer(data, np.uint64).sum(dtype=np.uint64))
                for data in shards
            )
            % 2**64
        )

    def check(self, windows: torch.Tensor, sums: torch.Tensor) -> None:
        if not torch.equal(windows.sort().values, torch.arange(len(self.sums))):
            raise RuntimeError("not every window came once: this run does not count")
        if not np.array_equal(self.sums[windows.numpy()], sums.numpy()):
            raise RuntimeError("wrong tokens came: this run does not count")

    def figures(self, elapsed: float, requests: int) -> tuple[float, float]:
        """MB/s, and requests for a thousand windows."""
        windows = len(self.sums)
        return windows * WINDOW / elapsed / 1e6, requests / windows * 1000


def in_sequence(
    span: int, url: str, concurrency: int, shards: int, everything: Everything
) -> tuple[float, float]:
    async def run() -> tuple[float, float]:
        store = from_url(url, client_options={"allow_http": True})
        ranges = iter(
            [
                (f"{number:04d}.bin", at)
                for number in range(shards)
                for at in range(0, SHARD, span)
            ]
        )
        total = requests = 0

        async def one() -> None:
            nonlocal total, requests
            for key, start in ranges:
                data = await get_range_async(store, key, start=start, length=span)
                total += int(np.frombuffer(data, np.uint64).sum(dtype=np.uint64))
                requests += 1

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(concurrency)))
        elapsed = time.perf_counter() - began
        if total % 2**64 != everything.total:
            raise RuntimeError("wrong bytes came: this run does not count")
        return everything.figures(elapsed, requests)

    return uvloop.run(run())


class Sums:
    """What has come: the number of each window, and the sum of its tokens."""

    def __init__(self) -> None:
        self._windows: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def add(self, batch: torch.Tensor) -> None:
        self._windows.append(batch[:, 0] + (batch[:, 1] << 16))
        self._sums.append(batch.sum(1))

    def check(self, everything: Everything) -> None:
        everything.check(torch.cat(self._windows), torch.cat(self._sums))


async def make_windows(
    url: str, concurrency: int, shards: int, put: Callable[[torch.Tensor], object]
) -> int:
    """As `in_sequence`, with its windows as a loader's: int64, in batches, in a random order within a request."""
    store = from_url(url, client_options={"allow_http": True})
    ranges = iter(
        [
            (f"{number:04d}.bin", at)
            for number in range(shards)
            for at in range(0, SHARD, SPAN)
        ]
    )
    random = np.random.default_rng(0)
    requests = 0

    async def one() -> None:
        nonlocal requests
        for key, start in ranges:
            windows = np.frombuffer(
                await get_range_async(store, key, start=start, length=SPAN), np.uint16
            )
            windows = windows.reshape(-1, TOKENS)
            requests += 1
            for chosen in random.permutation(len(windows)).reshape(-1, BATCH):
                put(torch.from_numpy(windows[chosen].astype(np.int64)))

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return requests


def in_bare_windows(
    url: str, concurrency: int, shards: int, everything: Everything
) -> tuple[float, float]:
    """What the tensors cost, made and checked by one thread."""
    sums = Sums()
    began = time.perf_counter()
    requests = uvloop.run(make_windows(url, concurrency, shards, sums.add))
    elapsed = time.perf_counter() - began
    sums.check(everything)
    return everything.figures(elapsed, requests)


def in_a_thread(
    url: str, concurrency: int, shards: int, everything: Everything
) -> tuple[float, float]:
    """The same, made by a thread and checked by another, as with a loader."""
    sums = Sums()
    queue: SimpleQueue[torch.Tensor | None] = SimpleQueue()
    with ThreadPoolExecutor(1) as thread:
        began = time.perf_counter()
        running = thread.submit(
            lambda: uvloop.run(make_windows(url, concurrency, shards, queue.put))
        )
        running.add_done_callback(lambda _: queue.put(None))
        while (batch := queue.get()) is not None:
            sums.add(batch)
        elapsed = time.perf_counter() - began
        requests = running.result()
    sums.check(everything)
    return everything.figures(elapsed, requests)


class OneByOne(hr.TokenDataset):
    """Windows of which each is a request."""

    async def aget(self, index: int) -> torch.Tensor:
        return await super().aget(index)


def in_windows(
    kind: type[hr.TokenDataset],
    url: str,
    concurrency: int,
    shards: int,
    everything: Everything,
) -> tuple[float, float]:
    dataset = kind(
        [f"{url}/{number:04d}.bin" for number in range(shards)], seq_len=TOKENS
    )
    sampler = hr.BlockShuffleSampler(
        dataset, block_size=BLOCK, blocks_at_once=POOL, seed=0
    )
    sums = Sums()
    with hr.DataLoader(
        dataset, batch_size=BATCH, sampler=sampler, concurrency=concurrency
    ) as loader:
        began = time.perf_counter()
        for batch in loader:
            sums.add(batch)
        elapsed = time.perf_counter() - began
        requests = loader.stats().requests.requests
    sums.check(everything)
    return everything.figures(elapsed, requests)


def compare(store: str, rounds: int, shards: int, aim: float) -> None:
    """Measure all of them on the store that loopback is now; `aim` is the share of the sequential limit."""
    data = [shard(number) for number in range(shards)]
    everything, first = Everything(data), Everything(data[:1])
    with served({f"{number:04d}.bin": each for number, each in enumerate(data)}) as (
        url,
        server,
    ):
        print(
            f"\n{store}: {server}; {shards} shards, {len(everything.sums):,} windows",
            flush=True,
        )
        given = (url, CONCURRENCY, shards, everything)
        contestants = {
            "in sequence, 8 MiB ranges": lambda: in_sequence(SPAN, *given),
            "in sequence, 1 MiB ranges": lambda: in_sequence(1 << 20, *given),
            "windows, bare loop": lambda: in_bare_windows(*given),
            "windows, bare loop in a thread": lambda: in_a_thread(*given),
            "windows, joined": lambda: in_windows(hr.TokenDataset, *given),
            "windows, one by one": lambda: in_windows(
                OneByOne, url, CONCURRENCY, 1, first
            ),  # a tenth as fast
        }
        rates, requests = interleave_figures(
            contestants, rounds=rounds, units=("MB/s", "requests for 1,000 windows")
        )
    rates.show(against="in sequence, 8 MiB ranges")
    requests.show(against="windows, one by one")
    fewer = requests.ratios("windows, one by one", "windows, joined")
    claim(
        f"random windows of 4 KB, {store}",
        rates.share("windows, joined", "in sequence, 8 MiB ranges", at_least=aim),
        rates.share("windows, joined", "in sequence, 1 MiB ranges"),
        rates.share(
            "windows, bare loop", "in sequence, 8 MiB ranges", "by a bare loop of windows"
        ),
        rates.share(
            "windows, bare loop in a thread",
            "in sequence, 8 MiB ranges",
            "by one in a thread of its own",
        ),
        Figure("× fewer requests", fewer, at_least=10),
    )


def behind_a_link(rate: int, rounds: int, shards: int) -> None:
    """Measure all of them where loopback carries `rate` MB/s: in a network namespace that ends with its process."""
    # The bucket holds 10 ms, or the timer's ticks would show; what waits for it is at most a fifth
    # of a second.
    bucket = f"tbf rate {8 * rate}mbit burst {rate * 10_000} latency 200ms"
    own = [
        sys.executable,
        __file__,
        "--within",
        str(rate),
        "--rounds",
        str(rounds),
        "--shards",
        str(shards),
    ]
    setup = f'ip link set lo up && tc qdisc add dev lo root {bucket} && exec "$@"'
    subprocess.run(["unshare", "--net", "sh", "-c", setup, "sh", *own], check=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--shards", type=int, default=8)
    arguments.add_argument(
        "--links",
        type=int,
        nargs="*",
        default=LINKS,
        help="MB/s of the links that are tried",
    )
    # the MB/s of the link that loopback now is
    arguments.add_argument("--within", type=int, help=argparse.SUPPRESS)
    given = parse_arguments(arguments, rounds=1, shards=1, links=[400])
    # the sums that check a batch are small: OpenMP's second thread would only spin for them
    torch.set_num_threads(1)
    if given.within:
        compare(f"a store behind {given.within} MB/s", given.rounds, given.shards, 0.9)
        return
    print(describe_machine(), flush=True)
    missing = [tool for tool in ("unshare", "ip", "tc") if not shutil.which(tool)]
    missing += ["the rights of root"] if os.geteuid() else []
    if missing:
        print(f"stores behind a link are left out: they need {', '.join(missing)}")
    for rate in () if missing else given.links:
        behind_a_link(rate, given.rounds, given.shards)
    compare("a store as fast as loopback", given.rounds, given.shards, 0.6)


if __name__ == "__main__":
    main()
