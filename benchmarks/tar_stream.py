"""How close a stream of tar shards comes to the bytes alone: a bare obstore stream of the same shards.

8 shards of 1,000 samples, each an image of 56 KB and a label, over HTTP from nginx (with the
library's own test server where it is not installed), without added latency: what is measured is
what parsing costs. In the same run: a bare obstore loop that streams 4 shards at once and throws
the bytes away (the limit); the same loop where it copies each sample, which is the least that a
stream of samples does, and keeps the last one, or as many as the look-ahead of a loader; and
WebDataset over the same URLs, in this process, where it reads through one `curl` for each shard.
Numbers and sizes are checked in every epoch; every byte in one before those that are timed, since a
comparison would take a sixth of the time.

    python benchmarks/tar_stream.py
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shutil
import tarfile
import time
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any

import obstore
import uvloop
from contents import check_set, content_of, numbers_of
from harness import claim, describe_machine, interleave, is_installed, parse_arguments
from obstore.store import from_url
from served import served

import headrace as hr

SIZE = 56_064  # bytes of an image
SAMPLES = 1000
SHARDS = 4
BATCH = 64
# Bytes of a sample in a shard: two headers, and both contents padded to blocks.
RECORDS = 57_856
KEPT = 6 * BATCH  # samples in the look-ahead of a loader

STREAM, COPIES, COPIES_KEPT = (
    "bare obstore stream",
    "the same, a copy of each sample",
    f"the same, {KEPT} copies kept",
)


def shard(number: int) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in range(SAMPLES):
            image = content_of(number * SAMPLES + sample, SIZE)
            for field, data in (("jpg", image), ("cls", b"%d" % (sample % 10))):
                info = tarfile.TarInfo(f"{number:04d}{sample:06d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def check(samples: int, content: int, shards: int) -> None:
    if (samples, content) != (shards * SAMPLES, shards * SAMPLES * SIZE):
        raise RuntimeError(
            f"{samples} samples with {content} bytes of images came: this run does not count"
        )


def check_bytes(samples: Iterable[Any], shards: int) -> None:
    """That every sample of the shards came once, with its own image and label."""
    numbers = []
    for sample in samples:
        (number,) = numbers_of([sample["jpg"]], SIZE)
        if int(bytes(sample["cls"])) != number % SAMPLES % 10:
            raise RuntimeError(
                f"the label of image {number} is of another: this run does not count"
            )
        numbers.append(number)
    check_set([numbers], shards * SAMPLES)


def check_all(pattern: str, shards: int, *, webdataset: bool) -> None:
    """An epoch of each in which every byte is compared, before those that are timed."""

    async def streamed() -> list[Any]:
        return [
            sample async for sample in hr.TarDataset(pattern, shards_in_parallel=SHARDS)
        ]

    check_bytes(uvloop.run(streamed()), shards)
    with hr.DataLoader(
        hr.TarDataset(pattern, shards_in_parallel=SHARDS),
        batch_size=BATCH,
        collate_fn=list,
    ) as loader:
        check_bytes((sample for batch in loader for sample in batch), shards)
    if webdataset:
        import webdataset as wds

        check_bytes(
            wds.WebDataset(pattern, shardshuffle=False, empty_check=False), shards
        )


def with_bare_obstore(
    url: str, shards: int, size: int, chunk: int = 10 << 20, *, copies: int = 0
) -> float:
    """The rate of a stream in pieces of `chunk` bytes, of which the last `copies` samples are copied and kept."""

    async def run() -> float:
        kept: deque[bytes] = deque(maxlen=copies)
        began = time.perf_counter()
        # 5 ms, which headrace's streams spend too
        store = from_url(url, client_options={"allow_http": True})
        keys = iter([f"{number:04d}.tar" for number in range(shards)])
        received = 0

        async def one() -> None:
            nonlocal received
            for key in keys:
                answer = await obstore.get_async(store, key)
                async for piece in answer.stream(min_chunk_size=chunk):
                    received += len(piece)
                    if copies:
                        data = memoryview(piece)
                        kept.extend(
                            bytes(data[at : at + SIZE])
                            for at in range(0, len(data), RECORDS)
                        )

        await asyncio.gather(*(one() for _ in range(SHARDS)))
        elapsed = time.perf_counter() - began
        if received != size:
            raise RuntimeError(
                f"{received} of {size} bytes came: this run does not count"
            )
        return received / elapsed / 1e9

    return uvloop.run(run())


def with_headrace(pattern: str, shards: int, size: int) -> float:
    async def run() -> float:
        samples = content = 0
        began = time.perf_counter()
        async for sample in hr.TarDataset(pattern, shards_in_parallel=SHARDS):
            samples += 1
            content += len(sample["jpg"])
        elapsed = time.perf_counter() - began
        check(samples, content, shards)
        return size / elapsed / 1e9

    return uvloop.run(run())


def with_loader(pattern: str, shards: int, size: int) -> float:
    samples = content = 0
    with hr.DataLoader(
        hr.TarDataset(pattern, shards_in_parallel=SHARDS),
        batch_size=BATCH,
        collate_fn=list,
    ) as loader:
        began = time.perf_counter()
        for batch in loader:
            samples += len(batch)
            content += sum(len(sample["jpg"]) for sample in batch)
        elapsed = time.perf_counter() - began
    check(samples, content, shards)
    return size / elapsed / 1e9


def with_webdataset(pattern: str, shards: int, size: int) -> float:
    import webdataset

    samples = content = 0
    began = time.perf_counter()
    for sample in webdataset.WebDataset(pattern, shardshuffle=False, empty_check=False):
        samples += 1
        content += len(sample["jpg"])
    elapsed = time.perf_counter() - began
    check(samples, content, shards)
    return size / elapsed / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, shards=2, rounds=1)
    shards = arguments.shards
    size = shards * len(shard(0))
    absent = {}
    objects = {f"{number:04d}.tar": shard(number) for number in range(shards)}
    with served(objects) as (url, store):
        pattern = f"{url}/{{0000..{shards - 1:04d}}}.tar"
        contestants = {
            STREAM: lambda: with_bare_obstore(url, shards, size),
            COPIES: lambda: with_bare_obstore(url, shards, size, copies=1),
            COPIES_KEPT: lambda: with_bare_obstore(url, shards, size, copies=KEPT),
            "the same, pieces of 1 MiB": lambda: with_bare_obstore(
                url, shards, size, 1 << 20
            ),
            "headrace, TarDataset": lambda: with_headrace(pattern, shards, size),
            "headrace, DataLoader": lambda: with_loader(pattern, shards, size),
        }
        if is_installed("webdataset") and shutil.which("curl"):
            warnings.filterwarnings("ignore", module="webdataset")
            contestants["WebDataset"] = lambda: with_webdataset(pattern, shards, size)
        else:
            absent["WebDataset"] = "not installed, or no curl"
        check_all(pattern, shards, webdataset=not absent)
        rounds = interleave(contestants, rounds=arguments.rounds, unit="GB/s")
    print(
        f"{shards} shards of {SAMPLES} samples, {size / 1e6:.0f} MB; the store: {store}"
    )
    print(describe_machine("webdataset"))
    rounds.show(against=STREAM, absent=absent)
    figures = [
        rounds.share("headrace, TarDataset", STREAM, at_least=0.9),
        rounds.share("headrace, TarDataset", COPIES, "of one that copies each sample"),
    ]
    if not absent:
        figures.append(
            rounds.share("headrace, TarDataset", "WebDataset", "× WebDataset", at_least=1)
        )
    claim("tar shards", *figures)
    claim(
        "tar shards through a loader",
        rounds.share("headrace, DataLoader", STREAM, at_least=0.9),
        rounds.share(
            "headrace, DataLoader",
            COPIES_KEPT,
            f"of one that copies each sample and keeps {KEPT}",
        ),
        rounds.share(
            "headrace, DataLoader",
            "headrace, TarDataset",
            "of the stream without a loader",
        ),
    )


if __name__ == "__main__":
    main()
