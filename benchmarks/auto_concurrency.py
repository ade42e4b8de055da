"""`concurrency="auto"` against the best fixed setting of a sweep, on four stores.

12,000 objects of 4 KB, batches of 64, from a local server that responds after 0, 20 and 100 ms, and
from one of 20 ms that responds 503 above 2,000 requests/s. First every fixed setting of the sweep
runs; then the best of them and "auto", in turn, each round with new loaders and two epochs: the
first includes connecting and the search; the second starts with the number found. Every byte is
compared with the stored one.

The store is the library's own test server, which can inject throttling; it shares the machine's
cores with the loader.

    python benchmarks/auto_concurrency.py
"""

from __future__ import annotations

import argparse
import functools

from contents import contents
from contestants import BATCH, Setting, rate
from harness import claim, describe_machine, interleave_figures, parse_arguments
from peers import FAMILIES
from servers import Fault, ObjectServer
from store import BUCKET, Store

SIZE = 4_000
OURS = FAMILIES["headrace"]
AUTO = Setting(0, variant="auto")
# Objects for each setting of the sweep: whether it is the best shows in as many.
SWEPT = 2_000
# Latency, faults, and the settings that are tried; those that cannot be the best take most of the
# time.
STORES: dict[str, tuple[float, tuple[Fault, ...], list[int]]] = {
    "0 ms": (0.0, (), [8, 16, 40, 128]),
    "20 ms": (0.020, (), [64, 128, 256, 512]),
    "100 ms": (0.100, (), [128, 256, 512, 1024]),
    "throttled": (
        0.020,
        (Fault("throttle", rate=2000.0, at=50),),
        [16, 32, 40, 64],
    ),  # 128 reached 75 objects/s
}


def epochs(
    server: ObjectServer, store: Store, setting: Setting, count: int, *faults: Fault
) -> tuple[float, ...]:
    """Objects a second in a new loader's first epoch and in its second, and requests for each object."""
    server.misbehave(*faults)
    with OURS.open(store, setting, count) as epoch:
        first, later = (rate(store, OURS, epoch, count) for _ in range(2))
    return first, later, len(server.seen()) / count / 2


def compare(name: str, count: int, rounds: int) -> None:
    """One store: print its tables, and claim."""
    latency, faults, sweep = STORES[name]
    with ObjectServer(contents(count, SIZE), bucket=BUCKET, latency=latency) as server:
        store = Store(server.endpoint, "headrace's test server", SIZE)
        swept = {
            fixed: epochs(server, store, Setting(fixed), min(SWEPT, count), *faults)[1]
            for fixed in sweep
        }
        best = max(sweep, key=swept.__getitem__)
        fixed = f"{best} in flight"
        contestants = {"auto": AUTO, fixed: Setting(best)}
        first, later, requests = interleave_figures(
            {
                shown: functools.partial(epochs, server, store, setting, count, *faults)
                for shown, setting in contestants.items()
            },
            rounds=rounds,
            units=(
                "objects/s, first epoch",
                "objects/s, second epoch",
                "requests for each object",
            ),
        )
    print(
        f"\n{name}: the sweep: "
        + ", ".join(f"{setting}: {reached:.0f}" for setting, reached in swept.items())
    )
    for table in (first, later, requests):
        table.show(against=fixed)
    claim(
        f'concurrency="auto", {name}, of the best fixed setting',
        first.share(
            "auto", fixed, "in the first epoch", at_least=0.9 if name == "100 ms" else 0.8
        ),
        later.share("auto", fixed, "in the second", at_least=0.9),
        requests.figure("auto", "requests for each object"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    arguments = parse_arguments(
        parser, objects=256, rounds=1, stores=["20 ms", "throttled"]
    )
    print(f"{arguments.objects} objects of {SIZE} bytes in batches of {BATCH}")
    print(describe_machine())
    for name in arguments.stores:
        compare(name, arguments.objects, arguments.rounds)


if __name__ == "__main__":
    main()
