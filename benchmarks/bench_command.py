"""The setting that `headrace bench` finds, against the best of a sweep, on three stores.

Objects of 20 KB from a local server that responds after 20 ms; from one of 20 ms that responds 503 above 2,000
requests/s; and from one of 20 ms that sends 16 MB/s in all. The command runs as a user starts it, in a process of its
own, and its time is taken, with the import of PyTorch. Then each setting of the sweep runs, two epochs each; then the
best of them, the neighbours of the best, and the found one, in turn, round after round, each time with a new loader of
two epochs, of which the second counts. Every byte is compared with the stored one.

The store is the library's own test server, which can inject throttling; it shares the machine's cores with the loader.

    python benchmarks/bench_command.py
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from typing import Any

from contents import contents
from contestants import BATCH, Setting, rate
from harness import Figure, claim, describe_machine, interleave, parse_arguments
from peers import FAMILIES
from servers import Fault, ObjectServer
from store import BUCKET, Store

SIZE = 20_000
LATENCY = 0.020
OURS = FAMILIES["headrace"]
AIM, MOST_SECONDS = 0.9, 60.0
# Faults, objects of an epoch, and the settings of the sweep, from far below the best to far above.
STORES: dict[str, tuple[tuple[Fault, ...], int, list[int]]] = {
    "20 ms": ((), 2_500, [16, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024]),
    "throttled": ((Fault("throttle", rate=2000.0, at=50),), 1_500, [8, 16, 23, 32, 36, 40, 45, 50, 57, 64, 80]),
    "bandwidth": ((Fault("bandwidth", rate=16e6),), 800, [4, 8, 11, 13, 16, 19, 23, 32, 45, 64, 128]),
}


def run_command(store: Store, seconds: float) -> tuple[dict[str, Any], float]:
    """The results of the command, and its seconds."""
    options = {
        "endpoint": store.endpoint,
        "skip_signature": True,
        "virtual_hosted_style_request": False,
        "client_options": {"allow_http": True},
    }
    command = [sys.executable, "-m", "headrace", "bench", store.url, "--json", "--seconds", str(seconds)]
    command += ["--store-options", json.dumps(options)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), time.perf_counter() - began


def second_epoch(server: ObjectServer, store: Store, count: int, faults: tuple[Fault, ...], in_flight: int) -> float:
    """Objects a second of a new loader's second epoch."""
    server.misbehave(*faults)
    with OURS.open(store, Setting(in_flight), count) as epoch:
        rate(store, OURS, epoch, count)
        return rate(store, OURS, epoch, count)


def compare(name: str, rounds: int, seconds: float, *, quick: bool) -> None:
    """One store: print its tables, and claim."""
    faults, count, sweep = STORES[name]
    if quick:
        count, sweep = count // 10, sweep[1:7:3]
    with ObjectServer(contents(count, SIZE), bucket=BUCKET, latency=LATENCY) as server:
        store = Store(server.endpoint, "headrace's test server", SIZE)
        server.misbehave(*faults)
        found, elapsed = run_command(store, seconds)
        chosen = found["best"]["concurrency"]
        swept = {each: second_epoch(server, store, count, faults, each) for each in sweep}
        best = max(sweep, key=swept.__getitem__)
        position = sweep.index(best)
        near = {*sweep[max(0, position - 1) : position + 2], chosen}
        table = interleave(
            {
                f"{each} in flight": functools.partial(second_epoch, server, store, count, faults, each)
                for each in sorted(near)
            },
            rounds=rounds,
            unit="objects/s",
        )
    fastest = max(table.values, key=table.median)
    print(f"\n{name}: the sweep: " + ", ".join(f"{each}: {reached:.0f}" for each, reached in swept.items()))
    given, limit = found["best"], found["limit"]
    rates = f"{given['rate']:.0f} objects/s ({given['lowest_rate']:.0f} to {given['highest_rate']:.0f})"
    print(f"headrace bench: {chosen} in flight, {rates}, limit: {limit}, {elapsed:.0f} s")
    table.show(against=fastest)
    claim(
        f"`headrace bench`, {name}: the setting found",
        table.share(f"{chosen} in flight", fastest, "of the best of a sweep", at_least=AIM),
        Figure("s", [elapsed], at_most=MOST_SECONDS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each run of the command (its default)")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    arguments = parse_arguments(parser, rounds=1, seconds=5.0, stores=["20 ms"])
    print(f"objects of {SIZE} bytes in batches of {BATCH}")
    print(describe_machine())
    for name in arguments.stores:
        compare(name, arguments.rounds, arguments.seconds, quick=arguments.quick)


if __name__ == "__main__":
    main()
