"""What concurrency="auto" finds, against the best fixed setting of a sweep, on four stores.

Objects of 4 KB from a local server that answers after 0, 20 and 100 ms, and from one of 20 ms that answers 503 above
2,000 requests/s. Batches of 50. Each run lasts a few seconds, the search for the setting included in its first epoch;
later epochs begin with what the one before has found.

    python benchmarks/auto_concurrency.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from harness import describe_machine, interleave

import headrace as hr
from headrace.testing import Fault, ObjectServer

SIZE = 4_000
# Latency, faults, and the settings that are tried: those that cannot be the best take most of the time.
STORES: dict[str, tuple[float, tuple[Fault, ...], list[int]]] = {
    "0 ms": (0.0, (), [8, 16, 40, 128]),
    "20 ms": (0.020, (), [40, 128, 256, 512]),
    "100 ms": (0.100, (), [128, 256, 512]),
    "throttled": (0.020, (Fault("throttle", rate=2000.0, at=50),), [16, 32, 40, 64, 128]),
}


def count_bytes(samples: list[hr.ObjectSample]) -> int:
    return sum(len(sample.data) for sample in samples)


def rate(loader: hr.DataLoader[Any], objects: int) -> float:
    began = time.perf_counter()
    received = sum(loader)
    elapsed = time.perf_counter() - began
    if received != objects * SIZE:
        raise RuntimeError(f"{received} bytes came, {objects * SIZE} were expected: this run does not count")
    return objects / elapsed


def compare(name: str, contents: dict[str, bytes], rounds: int) -> None:
    latency, faults, sweep = STORES[name]
    with ObjectServer(contents, latency=latency) as server:
        server.misbehave(*faults)
        objects = hr.ObjectDataset(server.url, store_options=server.store_options)

        def loader(concurrency: Any) -> hr.DataLoader[Any]:
            return hr.DataLoader(objects, batch_size=50, collate_fn=count_bytes, concurrency=concurrency)

        loaders = {"auto": loader("auto"), **{str(fixed): loader(fixed) for fixed in sweep}}
        try:
            table = interleave(
                {key: lambda one=one: rate(one, len(objects)) for key, one in loaders.items()},  # type: ignore[misc]
                rounds=rounds,
                unit="objects/s",
            )
            asked = {key: one.stats().requests.requests / (len(objects) * (rounds + 1)) for key, one in loaders.items()}
        finally:
            for one in loaders.values():
                one.close()
    best = max((str(fixed) for fixed in sweep), key=table.median)
    print(f"\n{name}: auto reaches {table.ratio('auto', best):.2f} of the best fixed setting, {best}")
    table.show(against=best)
    print("requests for each object: " + ", ".join(f"{key} {share:.2f}" for key, share in asked.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    arguments = parser.parse_args()
    contents = {f"{i:06d}.bin": bytes(SIZE) for i in range(arguments.objects)}
    print(f"{arguments.objects} objects of {SIZE} bytes in batches of 50")
    print(describe_machine())
    for name in arguments.stores:
        compare(name, contents, arguments.rounds)


if __name__ == "__main__":
    main()
