r"""Formats of other libraries in a store of 20 ms: headrace, other readers, and bare GETs of the same ranges.

An epoch of samples of 20 KB in shards of 256, shuffled where the reader can, from an empty cache
and without a connection: with indices and constructors. The library's own loader has two workers.
The bare loop reads the ranges that headrace read, 64 at once, and knows them beforehand: the limit.
Every byte is compared, within the clock, for all.

Each runs in a process of its own, by its own interpreter where its packages exclude those of the
others:

    python benchmarks/stored_formats.py \
        --python "MDS=mosaic/bin/python" --python "LitData=litdata/bin/python"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from formats import Process, ReaderFailed, interpreters, missing, race
from harness import claim, describe_machine, parse_arguments
from servers import ObjectServer
from stored_readers import ALONE, BARE, FORMATS, OURS, SIZE, WRITE

PROGRAM = Path(__file__).with_name("stored_readers.py")


def ranges_of(
    server: ObjectServer, objects: Mapping[str, bytes]
) -> list[tuple[str, int, int]]:
    """The ranges that were requested since `misbehave`."""
    found = []
    for seen in server.seen():
        size = len(objects.get(seen.key, b""))
        first, last = re.fullmatch(r"(?:bytes=(\d*)-(\d*))?", seen.span).groups()
        start, stop, _ = slice(int(first or 0), int(last) + 1 if last else size).indices(
            size
        )
        found += [
            (seen.key, start, stop)
            if first or not last
            else (seen.key, max(0, size - int(last)), size)
        ] * (size > 0)
    return found


def compare(name: str, python: str, count: int, rounds: int) -> str:
    """Run the readers of a format in turn; why there are no figures, or nothing."""
    _, peer, packages, writes, _, alone = FORMATS[name]
    lacking = (
        {peer: f"{package} is not installed"}
        if (package := missing(python, packages))
        else {}
    )
    if lacking and writes:
        return lacking[peer]
    with contextlib.ExitStack() as opened:
        folder = Path(
            opened.enter_context(tempfile.TemporaryDirectory(prefix="headrace-stored-"))
        )
        data = folder / "data"
        data.mkdir()

        def process(
            who: str, interpreter: str = sys.executable, endpoint: str = ""
        ) -> Process:
            return opened.enter_context(
                Process(interpreter, name, count, PROGRAM, [who], [endpoint, data])
            )

        try:
            process(WRITE, python if writes else sys.executable)()
            objects = {
                path.relative_to(data).as_posix(): path.read_bytes()
                for path in data.rglob("*")
                if path.is_file()
            }
            server = opened.enter_context(ObjectServer(objects, latency=0.02))
            ours = process(OURS, endpoint=server.endpoint)
            server.misbehave()
            ours()
        except ReaderFailed as error:
            return str(error)
        (folder / "spans.json").write_text(json.dumps(ranges_of(server, objects)))
        processes = {OURS: ours, BARE: process(BARE, endpoint=server.endpoint)}
        if not lacking:
            others = [ALONE, peer] if alone else [peer]
            processes |= {who: process(who, python, server.endpoint) for who in others}
        found, failed = race(processes, rounds, "samples/s")
    found.show(against=BARE, absent=failed | lacking)
    peers = [
        found.share(OURS, who, f"× {who}") for who in (ALONE, peer) if who in found.values
    ]
    claim(name, found.share(OURS, BARE), *peers)
    return "; ".join(failed.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="FORMAT=INTERPRETER",
        help="of its library",
    )
    arguments = parse_arguments(parser, samples=512, rounds=1)
    pythons = dict(interpreters(arguments.python, FORMATS))
    print(
        f"{arguments.samples} samples of {SIZE} bytes, 20 ms to the first byte\n{describe_machine('zarr', 'pyarrow')}"
    )
    failed = {}
    for name in arguments.only:
        print(f"\n{name}")
        if why := compare(
            name, pythons.get(name, sys.executable), arguments.samples, arguments.rounds
        ):
            print(why)
            failed |= {} if "not installed" in why else {name: why}
    if failed:
        sys.exit(f"these failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
