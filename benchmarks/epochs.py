"""One epoch after another behind 100 ms to the first byte: how long a loop waits at the border.

Objects of 56 KB in random order, from the second border on, where the next epoch's first batches are fetched while the
last of this one are consumed; and the same loader without that. A loop of steps of 50 ms, which the loader keeps up
with, waits for the first batch of an epoch from the end of the last step on: in batches, that is in steps. A loop
without steps takes batches as they come, with 64 fetches in flight, from a store whose latencies differ as those of
real stores do (log-normal, spread 0.8): the time of its epochs is compared, too. Every byte is compared.

    python benchmarks/epochs.py
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from contents import check_set
from harness import claim, describe_machine, interleave_figures, parse_arguments
from peers import collate_samples_for
from store import Store, nginx_is_installed, serve

import headrace as hr

SIZE = 56_000  # bytes: a JPEG of 500 × 375 pixels
LATENCY = 0.100  # seconds to the first byte
EARLY, LATE = "fetched before the epoch", "fetched when it begins"


def run(store: Store, objects: int, early: bool, step: float, **options: Any) -> Sequence[float]:
    """Gap and batch in ms, and seconds of an epoch: medians of the epochs from the third on."""
    dataset = hr.ObjectDataset(hr.Store(store.url, options=store.options))
    collate = collate_samples_for(store)
    gaps, batches, epochs = [], [], []
    with hr.DataLoader(dataset, shuffle=True, seed=0, collate_fn=collate, **options) as loader:
        loader._control._reads_next = early
        ended = time.perf_counter()
        for _ in range(5):
            began, found = ended, []
            for batch in loader:
                arrived = time.perf_counter()
                (batches if found else gaps).append(arrived - ended)
                found.append(batch)
                time.sleep(step)  # the step on an accelerator: no core is used
                ended = time.perf_counter()
            check_set(found, objects)
            epochs.append(ended - began)
    return 1e3 * statistics.median(gaps[2:]), 1e3 * (statistics.mean(batches) + step), statistics.median(epochs[2:])


def compare(what: str, objects: int, rounds: int, step: float, spread: float, **options: Any) -> None:
    """One loop: its tables, and the claim."""
    with serve(objects, SIZE, latency=LATENCY, spread=spread) as store:
        contestants = {
            name: functools.partial(run, store, objects, name == EARLY, step, **options) for name in (EARLY, LATE)
        }
        units = "ms of the gap", "ms of a batch", "s of an epoch"
        gap, batch, epoch = interleave_figures(contestants, rounds=rounds, units=units)
    print(f"\n{what}; the store: {store.kind}")
    for table in (gap, batch, epoch):
        table.show(against=LATE)
    shares = [g / b for g, b in zip(gap.values[EARLY], batch.values[EARLY], strict=True)]
    claim(
        f"one epoch after another, {what}",
        gap.figure(EARLY, "ms"),
        gap.figure(LATE, "ms without"),
        epoch.share(EARLY, LATE, "of an epoch's time without"),
        reached=f"{statistics.median(shares):.2f} batches ({min(shares):.2f} to {max(shares):.2f})",
        aim="≤ 1 batch",
        met=statistics.median(shares) <= 1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, objects=256, rounds=1)
    print(describe_machine())
    compare("steps of 50 ms", arguments.objects, arguments.rounds, 0.05, 0.0, batch_size=32)
    spread = 0.8 if nginx_is_installed() else 0.0
    compare(
        "no steps, 64 in flight", arguments.objects // 2, arguments.rounds, 0.0, spread, batch_size=8, concurrency=64
    )


if __name__ == "__main__":
    main()
