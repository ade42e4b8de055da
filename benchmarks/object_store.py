"""Throughput of small objects from a store with latency: headrace against other loaders.

Objects of 56 KB, or of `--size`, over HTTP, S3's protocol, 20 ms to the first byte, batches of 64.
Each loader runs with 64 GETs in flight in all, if it can be set so, and at its own best setting,
which is searched first; then all run in turn, round after round. The limits run with them:
concurrency ÷ latency, and a bare loop of obstore's ranged GETs, without and with `If-Match`, which
headrace sends by default, and in a thread of its own. Where the cores are the limit, a loader is as
fast as its CPU time for an object is short, which is shown too: that of its process and those that
it has started.

Every byte of every object is compared with the stored one, in the loader's own collate function; a
run with an object that is missing, duplicated, wrong, out of a promised order, or cached from an
earlier epoch does not count. The clock runs from `iter()` to the last batch of an epoch; an
uncounted epoch before it starts the workers and connections that a loader keeps between epochs.
Each loader has a process of its own, as a training program is one.

WebDataset reads tar shards, not objects: see tar_stream.py.

    python benchmarks/object_store.py
    python benchmarks/object_store.py --size 4000 --only headrace torchdata.nodes
    python benchmarks/object_store.py --quick --only headrace SPDL
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from contents import LONGEST, content_of, numbers_of
from contestants import BATCH, Setting, rate
from harness import Rounds, claim, describe_machine, is_quick, parse_arguments
from peers import FAMILIES
from processes import Cpu, descendants
from store import Store, serve

SIZE = 56_000  # bytes of an object: a JPEG of 500 × 375 pixels
LATENCY = 0.020  # seconds to the first byte
EQUAL = 64  # GETs in flight at equal concurrency
OBJECTS = 16_384  # an epoch of more than a second for the fastest
HANGS = 120  # seconds; time-out of an epoch: one of s3torchconnector's hung
EPOCH = 2.0  # seconds of an epoch at few requests in flight, which reads fewer objects
BARE, BARE_IF_MATCH, TORCH = (
    "bare obstore loop",
    "bare obstore loop, If-Match",
    "torch, 2 workers",
)
BARE_THREAD = "bare obstore loop, in a thread"
# The least share asked of each: of the bare loop at best, and of the best peer. Without `If-Match`
# headrace sends the same requests as the peers and the bare loop.
OWN = "headrace"
OURS = {OWN: (0.92, 1.0), "headrace, if_match=False": (0.95, 1.1)}
OTHER_SIZES = 0.9  # of the bare loop at best
IN_PROCESSES = ("headrace, 2 engines", "headrace, if_match=False, 2 engines")
PEER_IN_PROCESSES = "torchdata.nodes, 2 processes"
STORED = 2 << 30  # bytes of all objects at most
LIMIT = "concurrency ÷ latency"


def count_for(setting: Setting, objects: int) -> int:
    """How many objects an epoch has: whole batches, at least two for each worker."""
    by_latency = (
        int(setting.in_flight / LATENCY * EPOCH) if setting.in_flight else objects
    )
    count = max(min(objects, by_latency), 2 * BATCH * setting.workers)
    return -(-count // BATCH) * BATCH


@dataclass(frozen=True)
class Contestant:
    """A loader in a process of its own, so that its heap is not filled by others.

    Attributes:
        line: pipe to the process; a message starts an epoch.
        process: the process.
    """

    line: Connection
    process: BaseProcess

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, store: Store, name: str, setting: Setting, count: int
    ) -> Iterator[Contestant]:
        """Start the process; it ends with the block."""
        context = multiprocessing.get_context("spawn")
        line, its = context.Pipe()
        # Not a daemon: it has workers.
        process = context.Process(
            target=compete, args=(its, store, name, setting, count), daemon=False
        )
        process.start()
        its.close()
        try:
            yield cls(line, process)
        finally:
            line.close()
            process.join()

    def run(self) -> tuple[float, float]:
        """Objects a second in one epoch, and µs of CPU for each; raises `RuntimeError` with the failure."""
        try:
            self.line.send(None)
            if not self.line.poll(HANGS):
                self.process.kill()  # its workers end when they see that
                raise RuntimeError(f"an epoch took more than {HANGS} s")
            reply = self.line.recv()
        except (EOFError, OSError):
            raise RuntimeError("its process ended") from None
        if isinstance(reply, str):
            raise RuntimeError(reply)
        objects, cpu = reply
        return float(objects), float(cpu)


def compete(
    line: Connection, store: Store, name: str, setting: Setting, count: int
) -> None:
    """Main function of a contestant's process: an epoch for each message, answered with its rate and CPU time."""
    family = FAMILIES[name]
    with contextlib.suppress(EOFError):
        line.recv()
        try:
            with family.open(store, setting, count) as epoch:
                while True:
                    spent = Cpu(descendants(os.getpid()))
                    reached = rate(store, family, epoch, count)
                    line.send((reached, sum(spent()) / count * 1e6))
                    line.recv()
        except EOFError:
            raise
        except Exception as error:  # the other loaders continue
            line.send(reason(error))


def search(
    store: Store, name: str, objects: int, settings: Iterable[Setting]
) -> dict[Setting, int | str]:
    """Objects per second of each setting, the better of two epochs after a first, or the failure."""
    found: dict[Setting, int | str] = {}
    for setting in settings:
        with Contestant.opened(
            store, name, setting, count_for(setting, objects)
        ) as contestant:
            try:
                if not is_quick():
                    contestant.run()
                found[setting] = round(
                    max(contestant.run()[0] for _ in range(1 if is_quick() else 2))
                )
            except RuntimeError as error:
                found[setting] = f"failed: {error}"
    return found


def race(
    store: Store, entries: Iterable[tuple[str, Setting]], objects: int, rounds: int
) -> tuple[Rounds, Rounds, dict[str, str]]:
    """Run all in turn, each opened once; returns the rates, the CPU times, and the failure of each that failed."""
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as open_now:
        runs: dict[str, Callable[[], tuple[float, float]]] = {}
        for name, setting in dict.fromkeys(entries):
            opening = Contestant.opened(store, name, setting, count_for(setting, objects))
            runs[entry(name, setting)] = open_now.enter_context(opening).run
        for number in range(rounds + 1):  # the first warms up
            for name, run in runs.items():
                if name in failed:
                    continue
                try:
                    reached, spent = run()
                except RuntimeError as error:
                    failed[name] = f"failed in round {number}: {error}"
                    rates.pop(name, None)
                    cpu.pop(name, None)
                    continue
                if number:
                    rates.setdefault(name, []).append(reached)
                    cpu.setdefault(name, []).append(spent)
    return Rounds("objects/s", rates), Rounds("µs of CPU for an object", cpu), failed


def reason(error: Exception) -> str:
    """The error as one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def table(
    rounds: Rounds, entries: Mapping[str, str], *, in_flight: int | None = None
) -> Rounds:
    """The figures of some contestants under the given names, and the limit by latency."""
    values = {shown: rounds.values[name] for shown, name in entries.items()}
    if in_flight is not None:
        values = {LIMIT: [in_flight / LATENCY] * len(values[BARE]), **values}
    return Rounds(rounds.unit, values)


def checking_cost(size: int) -> float:
    """Seconds that comparing one object takes."""
    batch = [content_of(number, size) for number in range(BATCH)]
    began = time.perf_counter()
    for _ in range(20):
        numbers_of(batch, size)
    return (time.perf_counter() - began) / 20 / BATCH


def report(
    size: int,
    rounds: Rounds,
    cpu: Rounds,
    equal: Mapping[str, Setting],
    best: Mapping[str, Setting],
    absent: Mapping[str, str],
) -> None:
    """Print the three tables and the claims."""
    alike = table(
        rounds,
        {name: entry(name, setting) for name, setting in equal.items()},
        in_flight=EQUAL,
    )
    print(f"\n{EQUAL} in flight in all")
    alike.show(against=LIMIT)
    tuned = table(rounds, {name: entry(name, setting) for name, setting in best.items()})
    entries = {
        entry(name, setting): entry(name, setting) for name, setting in best.items()
    }
    print("\neach at its best setting")
    table(rounds, entries).show(against=entry(BARE, best[BARE]), absent=absent)
    table(cpu, entries).show(against=entry(BARE, best[BARE]))
    lowest = [min(EQUAL / LATENCY, bare) for bare in alike.values[BARE]]
    alike = Rounds(alike.unit, {**alike.values, "limit": lowest})
    peers = [
        name
        for name in best
        if name
        not in (BARE, BARE_IF_MATCH, BARE_THREAD, *OURS, *IN_PROCESSES, PEER_IN_PROCESSES)
    ]
    objects = f"objects of {size / 1000:.0f} KB"
    for ours, (of_bare, of_peer) in OURS.items():
        if ours not in best or ours not in equal:
            continue
        claim(
            f"{objects}, {ours}",
            alike.share(
                ours, "limit", f"of a bare loop at {EQUAL} in flight", at_least=0.95
            ),
            tuned.share(
                ours,
                BARE,
                "of a bare loop, each at its best",
                at_least=of_bare if size == SIZE else OTHER_SIZES,
            ),
        )
        if peers:
            leader = max(peers, key=tuned.median)
            print(f"the best peer at its best: {entry(leader, best[leader])}")
            claim(
                f"{objects}, {ours}, against the best peer at its best",
                tuned.share(ours, leader, "× the best peer", at_least=of_peer),
            )
        if TORCH in best:
            claim(
                f"{objects}, {ours}, against {TORCH}, one GET at a time each",
                tuned.share(ours, TORCH, "× torch", at_least=100),
            )
    if OWN in best and BARE_IF_MATCH in best:
        claim(
            f"{objects}, {OWN}",
            tuned.share(
                OWN, BARE_IF_MATCH, "of a bare loop with If-Match, each at its best"
            ),
        )
    unconditional = "headrace, if_match=False"
    if unconditional in best and BARE_THREAD in best:
        claim(
            f"{objects}, {unconditional}",
            tuned.share(
                unconditional,
                BARE_THREAD,
                "of a bare loop in a thread of its own, each at its best",
            ),
        )
    for ours, (_, of_peer) in zip(IN_PROCESSES, OURS.values(), strict=True):
        if ours in best and PEER_IN_PROCESSES in best:
            claim(
                f"{objects}, {ours}",
                tuned.share(
                    ours, PEER_IN_PROCESSES, f"× {PEER_IN_PROCESSES}", at_least=of_peer
                ),
            )


def entry(name: str, setting: Setting) -> str:
    return name if len(FAMILIES[name].settings) == 1 else f"{name} ({setting})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=OBJECTS)
    parser.add_argument(
        "--size",
        type=int,
        default=SIZE,
        help=f"bytes of an object, a multiple of 8 up to {LONGEST}",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FAMILIES,
        default=list(FAMILIES),
        help="the bare loop always runs",
    )
    parser.add_argument(
        "--test-server",
        action="store_true",
        help="the library's own server, be nginx there or not",
    )
    arguments = parse_arguments(parser, objects=256, rounds=1)
    size = arguments.size
    if size % 8 or not 8 <= size <= LONGEST:
        parser.error(f"--size must be a multiple of 8, from 8 to {LONGEST}")
    objects = min(arguments.objects, STORED // size)
    chosen = {
        name: family
        for name, family in FAMILIES.items()
        if name in {BARE, *arguments.only}
    }
    absent = {
        name: f"{family.package} is not installed"
        for name, family in chosen.items()
        if not family.is_there
    }
    absent |= {"WebDataset": "reads tar shards, not objects: tar_stream.py"}
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a thousand connections for each contestant
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    settings = {
        name: each.settings[:1] if arguments.quick else each.settings
        for name, each in chosen.items()
    }
    stored = max(
        count_for(setting, objects) for tried in settings.values() for setting in tried
    )

    with serve(stored, size, latency=LATENCY, nginx=not arguments.test_server) as store:
        print(
            f"{objects} objects of {size} bytes, {LATENCY * 1000:.0f} ms to the first byte, batches of {BATCH}"
        )
        print(f"the store: {store.kind}; it shares the machine's cores")
        print(
            f"comparing every byte of an object takes {checking_cost(size) * 1e6:.1f} µs, for all"
        )
        print(
            describe_machine(
                "torchdata", "spdl-core", "grain", "s3torchconnector", "litdata"
            )
        )
        print("\nthe search for each one's best setting [objects/s]")
        equal: dict[str, Setting] = {}
        best: dict[str, Setting] = {}
        for name, family in chosen.items():
            if name in absent:
                continue
            found = search(store, name, objects, settings[name])
            print(
                f"{name}: "
                + "; ".join(f"{setting}: {result}" for setting, result in found.items()),
                flush=True,
            )
            rates = {
                setting: result
                for setting, result in found.items()
                if isinstance(result, int)
            }
            if not rates:
                absent[name] = str(next(iter(found.values())))
                continue
            best[name] = max(rates, key=rates.__getitem__)
            if (first := family.settings[0]) in rates and first.in_flight == EQUAL:
                equal[name] = first
        if arguments.quick:
            if failures := {
                name: why for name, why in absent.items() if why.startswith("failed")
            }:
                sys.exit(f"these failed: {failures}")
            print("a quick run: no race, nothing is claimed")
            return
        rounds, cpu, failed = race(
            store, [*equal.items(), *best.items()], objects, arguments.rounds
        )
    for name, why in failed.items():
        print(f"{name} {why}")
    equal = {
        name: setting
        for name, setting in equal.items()
        if entry(name, setting) in rounds.values
    }
    best = {
        name: setting
        for name, setting in best.items()
        if entry(name, setting) in rounds.values
    }
    if without := [name for name in (BARE, *OURS) if name in chosen and name not in best]:
        sys.exit(
            f"no figures of {', '.join(without)}: {'; '.join((absent | failed).values())}"
        )
    report(size, rounds, cpu, equal, best, absent | failed)


if __name__ == "__main__":
    main()
