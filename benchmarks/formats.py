"""The same images in the formats of loaders that have one: tar, Parquet, MDS, LitData's chunks; read from local files.

4,000 images of 56 KB in shards of 500, in batches of 64, no decoding and no latency: what is
measured is what a format and its reader cost, in order, or with `--shuffled` in a random order
(streams: of shards, and from a buffer of 1,000 images). Every byte of every image is compared with
the stored one, within the clock, for all. Each reader has a process of its own without workers, but
for Ray, which has a task for each core; it writes its files first, and all read an epoch in turn,
round after round.

A reader whose dependencies exclude those of the others is run by another interpreter. MosaicML
Streaming 0.13 needs NumPy before 2.2:

    python -m venv mosaic && mosaic/bin/pip install mosaicml-streaming torch
    python benchmarks/formats.py --python "Mosaic, MDS=mosaic/bin/python"

Not in it: FFCV, whose 1.0.2 has no wheels (it is built with OpenCV and libjpeg-turbo); DALI, which
decodes as well, and whose wheels are for CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from format_readers import BATCH, READERS, SIZE
from harness import Rounds, claim, describe_machine, is_quick, parse_arguments

OURS = "headrace, indexed tar"
PROGRAM = Path(__file__).with_name("format_readers.py")
PEERS = (
    "webdataset",
    "litdata",
    "mosaicml-streaming",
    "datasets",
    "ray",
    "pyarrow",
    "pylance",
)


class ReaderFailed(Exception):
    """An epoch failed, with the reason."""


class Process:
    """A reader in a process of its own; ends with the block.

    Args:
        python: its interpreter.
        name: of the reader.
        count: number of images.
        program: that it runs, with `name`, `before`, a folder, `count` and `after`.
    """

    def __init__(
        self,
        python: str,
        name: str,
        count: int,
        program: Path = PROGRAM,
        before: Any = (),
        after: Any = (),
    ) -> None:
        self._command = [python, program, name, *before]
        self._rest = [str(count), *after]

    def __enter__(self) -> Process:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-formats-")
        command = [*self._command, self._folder.name, *self._rest]
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )
        return self

    def __call__(self) -> float:
        """Images a second of an epoch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().splitlines()
            raise ReaderFailed(
                f"its process ended with {self._process.returncode}: {lines[-1] if lines else ''}"
            )
        found = json.loads(answer)
        if "error" in found:
            raise ReaderFailed(found["error"])
        return float(found["rate"])

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._errors.close()
        self._folder.cleanup()


def missing(python: str, packages: Sequence[str]) -> str:
    """The first package that an interpreter lacks; empty if there is none."""
    program = (
        "import sys, importlib.metadata as m\nfor name in sys.argv[1:]: m.version(name)"
    )
    done = subprocess.run(
        [python, "-c", program, *packages], capture_output=True, text=True, check=False
    )
    return done.stderr.strip().splitlines()[-1].split()[-1] if done.returncode else ""


def race(
    processes: Mapping[str, Process], rounds: int, unit: str = "images/s"
) -> tuple[Rounds, dict[str, str]]:
    """Run all in turn; the rounds, and the reason of each that failed."""
    values: dict[str, list[float]] = {name: [] for name in processes}
    failed: dict[str, str] = {}
    warm_up = 0 if is_quick() else 1
    for number in range(rounds + warm_up):
        for name, run in processes.items():
            if name in failed:
                continue
            try:
                reached = run()
            except ReaderFailed as error:
                failed[name] = f"failed in round {number}: {error}"
                del values[name]
                continue
            if number >= warm_up:
                values[name].append(reached)
    return Rounds(unit, values), failed


def interpreters(
    given: Sequence[str], names: Collection[str] = READERS
) -> Iterator[tuple[str, str]]:
    for each in given:
        name, _, python = each.partition("=")
        if name not in names or not python:
            sys.exit(
                f"--python takes NAME=INTERPRETER with one of {', '.join(names)}, not {each!r}"
            )
        yield name, python


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=INTERPRETER",
        help="of a reader",
    )
    arguments = parse_arguments(parser, images=640, rounds=1)
    pythons = dict(interpreters(arguments.python))
    chosen = {name: pythons.get(name, sys.executable) for name in arguments.only}
    lacking = {
        name: missing(python, READERS[name].packages) for name, python in chosen.items()
    }
    absent = {
        name: f"{package} is not installed"
        for name, package in lacking.items()
        if package
    }
    if arguments.shuffled:
        absent |= {
            name: "does not shuffle here" for name in chosen if not READERS[name].shuffles
        }
    order = ("shuffled",) if arguments.shuffled else ()
    with contextlib.ExitStack() as open_now:
        processes = {
            name: open_now.enter_context(
                Process(python, name, arguments.images, after=order)
            )
            for name, python in chosen.items()
            if name not in absent
        }
        rounds, failed = race(processes, arguments.rounds)
    print(
        f"{arguments.images} images of {SIZE} bytes, batches of {BATCH}, local files{', shuffled' * arguments.shuffled}"
    )
    print(describe_machine(*PEERS))
    if not rounds.values:
        sys.exit(f"no reader has figures: {absent | failed}")
    rounds.show(
        against=OURS if OURS in rounds.values else next(iter(rounds.values)),
        absent=absent | failed,
    )
    if peers := [name for name in rounds.values if not name.startswith("headrace")]:
        best = max(peers, key=rounds.median)
        if OURS in rounds.values:
            print(f"the fastest of the others: {best}")
            claim(
                f"images in local shards{', shuffled' * arguments.shuffled}",
                rounds.share(OURS, best, "× the fastest of the others"),
            )
    if failed:
        sys.exit(f"these failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
