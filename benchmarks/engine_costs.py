"""What one engine costs: CPU time of a read by the size of the object, over HTTP and HTTPS, and of a batch.

Objects are read through a sidecar from nginx, by signed requests of S3's protocol, and their
batches reach the consumer as lengths: what is counted is the engine's process, not the consumer's
and not the store's. Python's threads of an engine (its event loop, and the thread that assembles
batches) share an interpreter, so that an engine makes at most 1 / (their CPU time for an object)
objects a second; obstore's threads run beside them, on other cores.

Before the clock every byte of every object is compared with the stored one, through the same
engine; while it runs, each sample's length and number are checked.

A batch of tensors that are there already, of 4 KB and of 38 MB, is made in a sidecar, or in a
worker of it: CPU time there and in the consumer, which reads its first and last values.

On loopback a part of the kernel's work of receiving is done by the sender. The CPU time of a
network card's interrupts is not in these figures, nor is that of resolving names.

    python benchmarks/engine_costs.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contents import NOISE
from harness import describe_machine, interleave_figures, parse_arguments
from processes import Cpu, connections_of, descendants, engines_of
from served import free_port, served

import headrace as hr

MODIFIED = 1_700_000_000  # seconds; nginx makes the entity tag of it and the size
WORD = 8  # bytes


@dataclass(frozen=True)
class Size:
    """Objects of one size.

    Attributes:
        nbytes: of an object.
        objects: how many there are.
        reads: of an epoch.
        batch: samples of a batch.
        in_flight: fetches.
    """

    nbytes: int
    objects: int
    reads: int
    batch: int
    in_flight: int


SIZES = {  # the last three are those of MLPerf Storage
    "4 KB": Size(4_000, 512, 6_400, 64, 256),
    "115 KB": Size(114_664, 512, 2_560, 64, 256),
    "2.8 MB": Size(2_828_488, 32, 256, 8, 64),
    # Each in parts of 8 MiB, of which eight are in flight.
    "147 MB": Size(146_600_632, 4, 8, 2, 4),
}


def content(size: int, number: int) -> bytes:
    """An object: its number, and noise."""
    words = np.resize(NOISE, size // WORD)
    words[0] = number
    return words.tobytes()


class Check:
    """Collates a batch to the numbers of its objects; compares every byte, or the length only."""

    def __init__(self, nbytes: int, *, every_byte: bool) -> None:
        self._nbytes = nbytes
        self._every_byte = every_byte

    def __call__(self, samples: Sequence[hr.types.ObjectSample]) -> list[int]:
        return [self._number(memoryview(sample.data)) for sample in samples]

    def _number(self, data: memoryview) -> int:
        number = int.from_bytes(data[:WORD], "little")
        if len(data) != self._nbytes or (
            self._every_byte and data != content(self._nbytes, number)
        ):
            raise RuntimeError(
                "an object is not as it was stored: this run does not count"
            )
        return number


class Repeated:
    """A sampler that gives the same objects again and again."""

    def __init__(self, objects: int, reads: int) -> None:
        self.numbers = [read % objects for read in range(reads)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


class Reader:
    """A loader of objects of one size with one engine.

    Args:
        url: of the endpoint.
        size: the objects.
        name: of the folder with them.
    """

    def __init__(self, url: str, size: Size, name: str) -> None:
        table = {
            "key": [f"{number}.bin" for number in range(size.objects)],
            "size": [size.nbytes] * size.objects,
            "etag": [f'"{MODIFIED:x}-{size.nbytes:x}"'] * size.objects,
        }
        options = {
            "endpoint": url,
            "region": "us-east-1",
            "access_key_id": "a",
            "secret_access_key": "b",
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True, "allow_invalid_certificates": True},
        }
        store = hr.Store(f"s3://{name}", options=options)
        self._objects = hr.ObjectDataset(
            store, keys=table["key"], sizes=table["size"], etags=table["etag"]
        )
        self._size = size
        self._open = functools.partial(
            hr.DataLoader,
            self._objects,
            batch_size=size.batch,
            placement="process",
            concurrency=size.in_flight,
            memory_budget=8 << 30,
        )
        with self._new(every_byte=True, reads=size.objects) as loader:
            self._read(loader, size.objects)
        self.loader = self._new(every_byte=False, reads=size.reads)
        self._read(self.loader, size.reads)  # starts its process

    def _new(self, *, every_byte: bool, reads: int) -> Any:
        sampler = Repeated(self._size.objects, reads)
        return self._open(
            sampler=sampler, collate_fn=Check(self._size.nbytes, every_byte=every_byte)
        )

    def _read(self, loader: Any, reads: int) -> None:
        numbers = [number for batch in loader for number in batch]
        if numbers != Repeated(self._size.objects, reads).numbers:
            raise RuntimeError(
                "objects are missing or not in order: this run does not count"
            )

    def __call__(self) -> tuple[float, float, float]:
        """Microseconds of Python's threads and of obstore's for an object, and objects a second."""
        batches = iter(self.loader)
        cpu = Cpu(engines_of(os.getpid()))
        began = time.perf_counter()
        self._read(batches, self._size.reads)
        seconds = time.perf_counter() - began
        python, native = cpu()
        return (
            python / self._size.reads * 1e6,
            native / self._size.reads * 1e6,
            self._size.reads / seconds,
        )


def connections(port: int, reader: Reader) -> int:
    """The greatest number of connections of an engine after a batch."""
    most = 0
    engines = engines_of(os.getpid())
    for number, _ in enumerate(reader.loader):
        if number % 20 == 0:
            most = max(most, *(connections_of(each, port) for each in engines))
    return most


class Rows(hr.AsyncDataset[int]):
    def __init__(self, batches: int, batch: int) -> None:
        self.length = batches * batch

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> int:
        return index


class Row:
    """The transform: a tensor that is in memory."""

    def __init__(self, nbytes: int) -> None:
        self.row = torch.arange(nbytes // 4, dtype=torch.float32)

    def __call__(self, index: int) -> torch.Tensor:
        return self.row


class Batches:
    """A loader of batches of 64 rows, made in a sidecar, or in its workers."""

    def __init__(self, row_bytes: int, batches: int, workers: int) -> None:
        self.batches = batches
        self.expected = 0.0, float(row_bytes // 4 - 1)
        self.loader = hr.DataLoader(
            Rows(batches, 64),
            64,
            transform=Row(row_bytes),
            placement="process",
            num_workers=workers,
        )

    def __call__(self) -> tuple[float, float]:
        """Microseconds of the consumer, and of the engine with its workers, for a batch."""
        batches = iter(self.loader)
        next(batches)
        cpu = Cpu(descendants(os.getpid())[1:])
        began, right = time.thread_time(), 1
        for batch in batches:
            right += (batch[0, 0].item(), batch[-1, -1].item()) == self.expected
        consumer = time.thread_time() - began
        if right != self.batches:
            raise RuntimeError("batches are missing or wrong: this run does not count")
        return consumer / self.batches * 1e6, sum(cpu()) / self.batches * 1e6


@contextlib.contextmanager
def stores(sizes: Sequence[str]) -> Iterator[dict[str, str]]:
    """The endpoints of an nginx, over HTTP and HTTPS, with the objects of these sizes."""
    with tempfile.TemporaryDirectory(prefix="headrace-costs-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for each in sizes:
            size, bucket = SIZES[each], folder / bucket_of(each)
            bucket.mkdir()
            for number in range(size.objects):
                file = bucket / f"{number}.bin"
                file.write_bytes(content(size.nbytes, number))
                os.utime(file, (MODIFIED, MODIFIED))
        subject = [
            "-subj",
            "/CN=localhost",
            "-keyout",
            folder / "key.pem",
            "-out",
            folder / "certificate.pem",
        ]
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        subprocess.run(
            ["openssl", "req", "-x509", *kind, *subject], check=True, capture_output=True
        )
        port = free_port()
        tls = f"ssl_certificate {folder}/certificate.pem; ssl_certificate_key {folder}/key.pem;"
        both = f"listen 127.0.0.1:{port} ssl; {tls} location / {{ root {folder}; }}"
        with served({}, both) as (url, _):
            yield {"HTTP": url, "HTTPS": f"https://127.0.0.1:{port}"}


def bucket_of(size: str) -> str:
    return "objects-" + size.lower().replace(" ", "-").replace(".", "-")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", choices=("reads", "batches"))
    arguments = parse_arguments(parser, rounds=1, sizes=["4 KB"])
    print(describe_machine())
    if arguments.only != "batches":
        measure_reads(arguments.sizes, arguments.rounds)
    if arguments.only != "reads":
        measure_batches(arguments.rounds)


def measure_reads(sizes: Sequence[str], rounds: int) -> None:
    with stores(sizes) as endpoints:
        readers = {
            f"{each}, {scheme}": Reader(url, SIZES[each], bucket_of(each))
            for each in sizes
            for scheme, url in endpoints.items()
        }
        units = (
            "µs of Python's threads an object",
            "µs of obstore's threads an object",
            "objects/s, on shared cores",
        )
        for table in interleave_figures(readers, rounds=rounds, units=units):
            table.show(against=next(iter(readers)))
        reader = readers[f"{sizes[0]}, HTTP"]
        port = int(endpoints["HTTP"].rsplit(":", 1)[1])
        print(
            f"{connections(port, reader)} connections at {SIZES[sizes[0]].in_flight} fetches in flight"
        )
        for reader in readers.values():
            reader.loader.close()


def measure_batches(rounds: int) -> None:
    batches = {
        "4 KB": Batches(64, 1_000, 0),
        "4 KB, 1 worker": Batches(64, 1_000, 1),
        "38 MB": Batches(602_112, 8, 0),
        "38 MB, 1 worker": Batches(602_112, 40, 1),
    }
    units = ("µs of the consumer a batch", "µs of the engine and its worker a batch")
    for table in interleave_figures(batches, rounds=rounds, units=units):
        table.show(against="4 KB")
    for each in batches.values():
        each.loader.close()


if __name__ == "__main__":
    main()
