"""How close fetching comes to what the store's latency allows: concurrency ÷ latency.

6,400 objects of 56 KB over HTTP, 20 ms to the first byte, 64 fetches in flight, no transform, no workers. In the same
run: a bare obstore loop of 64 coroutines with ranged GETs (the limit), and torch's own loader with two workers, one
blocking GET at a time in each; it reads fewer objects. Every byte of every object is compared with
what was stored. `object_store.py` has the other loaders, and more in flight.

The store runs in a process of its own and shares the machine's cores with the loader under test.

    python benchmarks/fetch_rate.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable

from contestants import BATCH, Setting, rate
from harness import claim, describe_machine, interleave, parse_arguments
from peers import FAMILIES
from store import serve

SIZE = 56_000  # bytes: a JPEG of 500 × 375 pixels
CONCURRENCY = 64
LATENCY = 0.020  # seconds to the first byte
TORCH_OBJECTS = 4 * BATCH  # its rate does not depend on how many there are
LIMIT, BARE, OURS, TORCH = "concurrency ÷ latency", "bare obstore loop", "headrace", "torch, 2 workers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=6400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, objects=512, rounds=1)
    at_once = Setting(CONCURRENCY)
    entries = {
        BARE: (at_once, arguments.objects),
        OURS: (at_once, arguments.objects),
        TORCH: (Setting(2, 2), TORCH_OBJECTS),
    }
    contestants: dict[str, Callable[[], float]] = {LIMIT: lambda: CONCURRENCY / LATENCY}
    with contextlib.ExitStack() as open_now:
        store = open_now.enter_context(serve(arguments.objects, SIZE, latency=LATENCY))
        for name, (setting, count) in entries.items():
            epoch = open_now.enter_context(FAMILIES[name].open(store, setting, count))
            contestants[name] = functools.partial(rate, store, FAMILIES[name], epoch, count)
        rounds = interleave(contestants, rounds=arguments.rounds, unit="objects/s")
    print(f"{arguments.objects} objects of {SIZE} bytes, {LATENCY * 1000:.0f} ms, {CONCURRENCY} in flight")
    print(f"the store: {store.kind}; it shares the machine's cores")
    print(describe_machine())
    rounds.show(against=LIMIT)
    claim(
        f"fetching at {CONCURRENCY} in flight",
        rounds.share(OURS, LIMIT, at_least=0.85),
        rounds.share(OURS, BARE, "of a bare loop"),
        rounds.share(OURS, TORCH, "× torch"),
    )


if __name__ == "__main__":
    main()
