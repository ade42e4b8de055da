"""Runs many programs of the model in several processes: `python -m tests.model.run --count 10000 --processes 2000`."""

import argparse
import logging
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.hangs import HangError, ends_within
from tests.model import programs

SLOWEST = 120  # seconds of one program, after which it has hung


def program(seed, *, processes):
    """The program that a seed stands for."""
    return programs.draw(random.Random(seed), processes=processes)


def report(case, seconds=60):
    """What differs, in the smallest program that is found in a minute."""
    until = time.monotonic() + seconds
    return programs.explain(programs.smallest(case, until))


def check(seeds, *, processes):
    """Run the programs of some seeds; returns the number of those that differ, and prints each."""
    wrong = 0
    for seed in seeds:
        case = program(seed, processes=processes)
        try:
            with ends_within(SLOWEST):
                differs = programs.difference(case) is not None
        except HangError as error:
            wrong += 1
            print(f"=== seed {seed}: {error}\n{programs.paste(case)}", flush=True)
            continue
        if differs:
            wrong += 1
            print(f"=== seed {seed}\n{report(case)}", flush=True)
    return wrong


def share(seeds, with_processes):
    """Run the programs of one job."""
    # Workers that are killed are warnings.
    logging.getLogger("headrace").setLevel(logging.ERROR)
    return check(seeds, processes=False) + check(with_processes, processes=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", type=int, default=1000, help="programs without processes"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=200,
        help="programs with workers or the loader's process",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of the first; by default another one each time",
    )
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    print(
        f"seed {seed}: {given.count} programs, and {given.processes} with processes",
        flush=True,
    )
    seeds, with_processes = (
        [range(seed + job, seed + count, given.jobs) for job in range(given.jobs)]
        for count in (given.count, given.processes)
    )
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as jobs:
        wrong = sum(jobs.map(share, seeds, with_processes))
    print(f"{wrong} programs differ", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
