"""How close fetching comes to what the store's latency allows: concurrency ÷ latency.

6,400 objects of 56 KB over HTTP, 20 ms to the first byte, 64 fetches in flight, no transform, no
workers. In the same run: a bare obstore loop of 64 coroutines with ranged GETs (the limit), and
torch's own loader with two workers, one blocking GET at a time in each; it reads fewer objects.
Every byte of every object is compared with what was stored. `object_store.py` has the other
loaders, and more in flight.

Then the same where latencies differ, as those of real stores do: log-normal, a median of 40 ms and
a spread of 0.8 (one request in a hundred takes 6.4 times the median), 256 in flight; the limit is
concurrency ÷ mean latency. headrace and torchdata.nodes deliver in order, the bare loop as samples
arrive. It needs nginx with its Lua module.

The store runs in a process of its own and shares the machine's cores with the loader under test.

    python benchmarks/fetch_rate.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Callable, Mapping

from contestants import BATCH, Family, Setting, rate
from harness import Rounds, claim, describe_machine, interleave, parse_arguments
from peers import FAMILIES, headrace
from store import nginx_is_installed, serve

SIZE = 56_000  # bytes: a JPEG of 500 × 375 pixels
CONCURRENCY = 64
LATENCY = 0.020  # seconds to the first byte
TORCH_OBJECTS = 4 * BATCH  # its rate does not depend on how many there are
LIMIT, BARE, OURS, TORCH = (
    "concurrency ÷ latency",
    "bare obstore loop",
    "headrace",
    "torch, 2 workers",
)
NODES, UNORDERED = "torchdata.nodes", "headrace, out of order"
LOADERS = {
    **FAMILIES,
    UNORDERED: Family(
        functools.partial(headrace, in_order=False),
        [Setting(CONCURRENCY)],
        in_order=False,
    ),
}
# Of log-normal latencies, in seconds; fetches in flight.
SPREAD, MEDIAN, WIDE = 0.8, 0.040, 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=6400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, objects=512, rounds=1)
    one_latency(arguments.objects, arguments.rounds)
    if nginx_is_installed():
        latencies_that_differ(2 * arguments.objects, arguments.rounds)
    else:
        print(
            "nginx with its Lua module is not installed: nothing is measured where latencies differ"
        )


def race(
    entries: Mapping[str, tuple[Setting, int]],
    objects: int,
    rounds: int,
    limit: float,
    latency: float,
    spread: float,
) -> Rounds:
    """The rates of loaders, and the limit."""
    contestants: dict[str, Callable[[], float]] = {LIMIT: lambda: limit}
    with contextlib.ExitStack() as open_now:
        store = open_now.enter_context(
            serve(objects, SIZE, latency=latency, spread=spread)
        )
        for name, (setting, count) in entries.items():
            epoch = open_now.enter_context(LOADERS[name].open(store, setting, count))
            contestants[name] = functools.partial(
                rate, store, LOADERS[name], epoch, count
            )
        found = interleave(contestants, rounds=rounds, unit="objects/s")
    print(f"the store: {store.kind}; it shares the machine's cores")
    print(describe_machine())
    found.show(against=LIMIT)
    return found


def one_latency(objects: int, rounds: int) -> None:
    """All requests take the same time."""
    at_once = Setting(CONCURRENCY)
    entries = {
        BARE: (at_once, objects),
        OURS: (at_once, objects),
        TORCH: (Setting(2, 2), TORCH_OBJECTS),
    }
    print(
        f"{objects} objects of {SIZE} bytes, {LATENCY * 1000:.0f} ms, {CONCURRENCY} in flight"
    )
    found = race(entries, objects, rounds, CONCURRENCY / LATENCY, LATENCY, 0.0)
    claim(
        f"fetching at {CONCURRENCY} in flight",
        found.share(OURS, LIMIT, at_least=0.85),
        found.share(OURS, BARE, "of a bare loop"),
        found.share(OURS, TORCH, "× torch"),
    )


def latencies_that_differ(objects: int, rounds: int) -> None:
    """The slowest requests take many times as long as most others."""
    contestants = [BARE, OURS, UNORDERED, *([NODES] if LOADERS[NODES].is_there else [])]
    mean = MEDIAN * math.exp(SPREAD**2 / 2)
    print(
        f"\n{objects} objects, {MEDIAN * 1000:.0f} ms with a spread of {SPREAD}, {WIDE} in flight"
    )
    entries = {name: (Setting(WIDE), objects) for name in contestants}
    found = race(entries, objects, rounds, WIDE / mean, MEDIAN, SPREAD)
    claim(
        f"fetching at {WIDE} in flight where latencies differ",
        found.share(OURS, BARE, "of a bare loop", at_least=0.9),
        found.share(OURS, LIMIT),
        *(
            [found.share(OURS, NODES, "× torchdata.nodes")]
            if NODES in contestants
            else []
        ),
    )


if __name__ == "__main__":
    main()
