"""How close a loader of indexed shards comes to ranged requests alone, in order and shuffled.

Tar shards of samples of 56 KB and of 1 KB, and lines of JSON, from the library's own test server,
with 20 ms to the first byte and without. In the same run, for each: a bare obstore loop that asks
for the same bytes in ranges of 4 MiB, 16 at once, and throws them away (for lines: parses them with
`json.loads`). Contents are checked in an epoch before those that are timed; requests are counted
there too.

    python benchmarks/indexed.py
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import uvloop
from contents import check_set, content_of, numbers_of
from harness import claim, describe_machine, interleave, parse_arguments
from obstore.store import from_url
from servers import ObjectServer

import headrace as hr

SHARDS = 8
BATCH = 64
AT_ONCE = 16  # requests of the bare loop
RANGE = 4 << 20  # bytes of each


class Case(NamedTuple):
    """Shards of one kind, the loader's dataset, and what the bare loop does with the bytes of a shard."""

    name: str
    objects: Mapping[str, bytes]
    open: Callable[[str], Any]
    check: Callable[[Iterator[Any]], None]
    samples: int
    parse: Callable[[bytes], object] | None
    aim: float


def tar_case(size: int, samples: int) -> Case:
    """Tar shards of samples with a content of `size` bytes and a label."""

    def shard(number: int) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in range(number * samples, (number + 1) * samples):
                for field, data in (
                    ("bin", content_of(sample, size)),
                    ("cls", b"%d" % (sample % 10)),
                ):
                    info = tarfile.TarInfo(f"{sample:09d}.{field}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        return stream.getvalue()

    def check(found: Iterator[Any]) -> None:
        check_set(
            [numbers_of((sample["bin"] for sample in found), size)], SHARDS * samples
        )

    objects = {f"{number:04d}.tar": shard(number) for number in range(SHARDS)}
    return Case(
        f"tar, {size:,} bytes", objects, open_tar, check, SHARDS * samples, None, 0.9
    )


def open_tar(pattern: str) -> Any:
    """The indexed dataset of tar shards."""
    return hr.TarDataset.index(pattern + ".tar")


def lines_case(samples: int) -> Case:
    """Lines of JSON with some 500 bytes."""

    def shard(number: int) -> bytes:
        first = number * samples
        rows = (
            {"number": each, "text": f"text {each} " * 32}
            for each in range(first, first + samples)
        )
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)

    def check(found: Iterator[Any]) -> None:
        numbers = sorted(line["number"] for line in found)
        if numbers != list(range(SHARDS * samples)):
            raise RuntimeError(
                "lines are missing, or came twice: this run does not count"
            )

    def parse(data: bytes) -> object:
        return [json.loads(line) for line in data.splitlines()]

    objects = {f"{number:04d}.jsonl": shard(number) for number in range(SHARDS)}
    return Case("lines of JSON", objects, open_lines, check, SHARDS * samples, parse, 0.8)


def open_lines(pattern: str) -> Any:
    """The indexed dataset of lines."""
    return hr.LinesDataset.index(pattern + ".jsonl")


def with_bare_ranges(case: Case, url: str) -> float:
    async def run() -> float:
        store = from_url(url, client_options={"allow_http": True})
        wanted = iter(
            [
                (key, start, min(RANGE, len(data) - start))
                for key, data in case.objects.items()
                for start in range(0, len(data), RANGE)
            ]
        )
        received = 0

        async def one() -> None:
            nonlocal received
            for key, start, length in wanted:
                data = await obstore.get_range_async(
                    store, key, start=start, length=length
                )
                received += len(data)
                # Lines that are cut by the ranges' borders are left out.
                if case.parse is not None:
                    whole = bytes(data)
                    case.parse(whole[whole.find(b"\n") + 1 : whole.rfind(b"\n")])

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
        elapsed = time.perf_counter() - began
        if received != sum(map(len, case.objects.values())):
            raise RuntimeError(f"{received} bytes came: this run does not count")
        return received / elapsed / 1e6

    return uvloop.run(run())


def with_loader(case: Case, dataset: Any, *, shuffle: bool) -> float:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 0, "collate_fn": list}
    with hr.DataLoader(dataset, BATCH, **options) as loader:
        began = time.perf_counter()
        samples = sum(map(len, loader))
        elapsed = time.perf_counter() - began
    if samples != case.samples:
        raise RuntimeError(f"{samples} samples came: this run does not count")
    return sum(map(len, case.objects.values())) / elapsed / 1e6


def checked(case: Case, dataset: Any, server: ObjectServer, *, shuffle: bool) -> int:
    """Check the contents of an epoch; returns the number of its requests."""
    before = server.requests()["GET"]
    with hr.DataLoader(
        dataset, BATCH, shuffle=shuffle, seed=0, collate_fn=list
    ) as loader:
        case.check(sample for batch in loader for sample in batch)
    return server.requests()["GET"] - before


def measure(case: Case, latency: float, rounds: int) -> None:
    with ObjectServer(case.objects, latency=latency) as server:
        url = server.http_url
        dataset = case.open(f"{url}/{{0000..{SHARDS - 1:04d}}}")
        in_order = checked(case, dataset, server, shuffle=False)
        shuffled = checked(case, dataset, server, shuffle=True)
        contestants = {
            "bare obstore ranges": lambda: with_bare_ranges(case, url),
            "headrace, in order": lambda: with_loader(case, dataset, shuffle=False),
            "headrace, shuffled": lambda: with_loader(case, dataset, shuffle=True),
        }
        found = interleave(contestants, rounds=rounds, unit="MB/s")
    megabytes = sum(map(len, case.objects.values())) / 1e6
    print(
        f"\n{case.name}: {case.samples:,} samples, {megabytes:.0f} MB, {latency * 1e3:.0f} ms to the first byte"
    )
    print(f"requests of an epoch: {in_order:,} in order, {shuffled:,} shuffled")
    found.show(against="bare obstore ranges")
    claim(
        f"indexed {case.name}, {latency * 1e3:.0f} ms",
        found.share("headrace, in order", "bare obstore ranges", at_least=case.aim),
        found.share(
            "headrace, shuffled",
            "headrace, in order",
            "shuffled, of in order",
            at_least=0.9,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=1000,
        help="of 56 KB in a shard; 16 times as many smaller ones",
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, samples=100, rounds=1)
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        # Indices that are built are kept there.
        os.environ["XDG_CACHE_HOME"] = str(Path(folder))
        cases = (
            tar_case(56_064, arguments.samples),
            tar_case(1_024, 16 * arguments.samples),
            lines_case(16 * arguments.samples),
        )
        for case in cases:
            for latency in (0.0, 0.02):
                measure(case, latency, arguments.rounds)


if __name__ == "__main__":
    main()
