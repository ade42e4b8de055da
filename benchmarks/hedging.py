"""Hedging when 2 % of requests stall for a second, and the effect of such stalls on loaders that keep the order.

Objects of 4 KB, 20 ms to the first byte, 64 fetches in flight, batches of 64 in order. In the same
run: headrace without stalls, with stalls, and with stalls and ``hedge="auto"``; two peers that keep
the order too, without stalls and with them; and how many requests each made for an object, as the
server counted them. Every byte is compared with what was stored.

The store is the library's own test server, which can inject stalls; it shares the machine's cores
with the loader under test.

    python benchmarks/hedging.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable

from contents import contents
from contestants import BATCH, Epoch, Family, Setting, rate
from harness import Figure, claim, describe_machine, interleave_figures, parse_arguments
from peers import FAMILIES, headrace
from servers import Fault, ObjectServer
from store import BUCKET, Store

SIZE = 4_000
LATENCY = 0.020
STALLS = Fault("stall", share=0.02, seconds=1.0)
# objects for those whom the stalls slow, and their like without: they take seconds for it
FEW = 960
OURS, HEDGED = "headrace", "headrace, hedged, stalls"
PEERS = {"torchdata.nodes": Setting(64), "torch, threads in workers": Setting(64, 2)}


def figures(
    server: ObjectServer,
    store: Store,
    family: Family,
    epoch: Epoch,
    count: int,
    *faults: Fault,
) -> tuple[float, float]:
    """Objects a second, and requests for each object."""
    server.misbehave(*faults)
    reached = rate(store, family, epoch, count)
    return reached, len(server.seen()) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, objects=128, rounds=1)
    count = arguments.objects
    absent = {
        name: f"{FAMILIES[name].package} is not installed"
        for name in PEERS
        if not FAMILIES[name].is_there
    }
    ours = FAMILIES[OURS]
    few = min(FEW, count)
    entries: dict[str, tuple[Family, Setting, int, tuple[Fault, ...]]] = {
        OURS: (ours, Setting(64), count, ()),
        HEDGED: (
            Family(functools.partial(headrace, hedge="auto"), []),
            Setting(64),
            count,
            (STALLS,),
        ),
        f"{OURS}, stalls": (ours, Setting(64), few, (STALLS,)),
    }
    for name in (name for name in PEERS if name not in absent):
        entries[name] = (FAMILIES[name], PEERS[name], few, ())
        entries[f"{name}, stalls"] = (FAMILIES[name], PEERS[name], few, (STALLS,))
    contestants: dict[str, Callable[[], tuple[float, float]]] = {}
    with contextlib.ExitStack() as open_now:
        server = open_now.enter_context(
            ObjectServer(contents(count, SIZE), bucket=BUCKET, latency=LATENCY)
        )
        store = Store(server.endpoint, "headrace's test server", SIZE)
        for name, (family, setting, number, faults) in entries.items():
            epoch = open_now.enter_context(family.open(store, setting, number))
            contestants[name] = functools.partial(
                figures, server, store, family, epoch, number, *faults
            )
        rates, requests = interleave_figures(
            contestants,
            rounds=arguments.rounds,
            units=("objects/s", "requests for each object"),
        )
    print(
        f"{count} objects of {SIZE} bytes, {LATENCY * 1000:.0f} ms, 64 in flight, batches of {BATCH} in order"
    )
    print(
        f"the store: {store.kind}; it shares the machine's cores; of its requests 2 % stall for a second"
    )
    print(describe_machine("torchdata"))
    rates.show(against=OURS, absent=absent)
    print()
    requests.show(against=OURS)
    for name in (OURS, *PEERS):
        if name not in absent:
            print(
                f"stalls leave {name} {rates.ratio(f'{name}, stalls', name):.2f} of its rate without them"
            )
    more = [100 * (each - 1) for each in requests.values[HEDGED]]
    claim(
        "2 % of requests stall for a second, hedged",
        rates.share(HEDGED, OURS, "of the rate without stalls", at_least=0.9),
        Figure("% more requests", more, at_most=5),
    )


if __name__ == "__main__":
    main()
