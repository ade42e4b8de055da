"""Runs many programs of the model in several processes: `python -m tests.model.run --count 10000 --processes 2000`."""

import argparse
import contextlib
import logging
import random
import signal
import subprocess
import sys
import time

from tests.model import programs

SLOWEST = 120  # seconds of one program, after which it has hung


class HangError(BaseException):
    """A program has not ended. Not an Exception: code that catches errors of user code does not catch it."""


@contextlib.contextmanager
def ends_within(seconds):
    def interrupt(signum, frame):
        raise HangError(f"the program has not ended within {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="programs without processes")
    parser.add_argument(
        "--processes", type=int, default=200, help="programs with workers or the loader's process"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first; by default another one each time"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--job", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    if arguments.job is None:
        print(
            f"seed {seed}: {arguments.count} programs, and {arguments.processes} with processes",
            flush=True,
        )
        command = [sys.executable, "-m", "tests.model.run", "--count", str(arguments.count)]
        command += [
            "--processes",
            str(arguments.processes),
            "--seed",
            str(seed),
            "--jobs",
            str(arguments.jobs),
        ]
        children = [
            subprocess.Popen([*command, "--job", str(job)]) for job in range(arguments.jobs)
        ]
        sys.exit(max(child.wait() for child in children))
    logging.getLogger("headrace").setLevel(logging.ERROR)  # workers that are killed are warnings
    own = slice(arguments.job, None, arguments.jobs)
    wrong = check(range(seed, seed + arguments.count)[own], processes=False)
    wrong += check(range(seed, seed + arguments.processes)[own], processes=True)
    print(f"job {arguments.job}: {wrong} programs differ", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
