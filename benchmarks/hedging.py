"""What hedging saves where 2 % of requests stall for a second.

4,000 objects of 4 KB, 20 ms to the first byte, 64 fetches in flight, batches of 50 in order. In the same run: without
stalls, with stalls, and with stalls and ``hedge="auto"``; and how many requests hedging added.

    python benchmarks/hedging.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from harness import describe_machine, interleave

import headrace as hr
from headrace.testing import Fault, ObjectServer

SIZE = 4_000
LATENCY = 0.020
STALLS = Fault("stall", share=0.02, seconds=1.0)


def count_bytes(samples: list[hr.ObjectSample]) -> int:
    return sum(len(sample.data) for sample in samples)


def rate(server: ObjectServer, loader: hr.DataLoader[Any], objects: int, *faults: Fault) -> float:
    server.misbehave(*faults)
    began = time.perf_counter()
    received = sum(loader)
    elapsed = time.perf_counter() - began
    if received != objects * SIZE:
        raise RuntimeError(f"{received} bytes came, {objects * SIZE} were expected: this run does not count")
    return objects / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    contents = {f"{i:06d}.bin": bytes(SIZE) for i in range(arguments.objects)}
    with ObjectServer(contents, latency=LATENCY) as server:
        objects = hr.ObjectDataset(server.url, store_options=server.store_options)
        told: dict[str, Any] = {"batch_size": 50, "collate_fn": count_bytes, "concurrency": 64, "prefetch_factor": None}
        with hr.DataLoader(objects, **told) as plain, hr.DataLoader(objects, hedge="auto", **told) as hedged:
            rounds = interleave(
                {
                    "no stalls": lambda: rate(server, plain, len(objects)),
                    "stalls": lambda: rate(server, plain, len(objects), STALLS),
                    "stalls, hedged": lambda: rate(server, hedged, len(objects), STALLS),
                },
                rounds=arguments.rounds,
                unit="objects/s",
            )
            counts = hedged.stats().requests
    fetches = arguments.objects * (arguments.rounds + 1)
    print(f"{arguments.objects} objects of {SIZE} bytes, {LATENCY * 1000:.0f} ms, 64 in flight")
    print(describe_machine())
    rounds.show(against="no stalls")
    print(
        f"hedging added {counts.hedges / fetches:.1%} requests ({counts.hedges}), of which {counts.hedges_won} came "
        f"first; {counts.requests} requests for {fetches} objects"
    )


if __name__ == "__main__":
    main()
