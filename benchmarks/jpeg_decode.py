"""CPU work in two workers: JPEGs of 500 × 375 decoded by Pillow, cropped, flipped, to uint8 tensors [3, 224, 224].

The limit is two processes that each decode half of the files and stack them, with nothing sent.
Claimed: headrace does 0.97 of that, and 1.2 times torch. Headrace and torch run the same dataset
with the same two workers; a row of its own is the same work as an async dataset with a `transform`,
where the bytes come through the loader's process.

Much of the difference to torch is glibc's: a process that has never freed a large block gives the
memory of each decoded image back to the kernel and faults it in anew (460 page faults an image in a
bare loop). A torch worker makes its batches in shared memory, and frees no such block. The bare
loops free one first, so that they are a limit, and "torch, tuned" is torch with a `worker_init_fn`
that does.

Where to cut and whether to flip follow from the index, so that every batch is checked against the
same batch made here: by sums as they come, by all values for each round's last batch, outside the
clock.

    python benchmarks/jpeg_decode.py
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from harness import claim, describe_machine, interleave, is_installed, parse_arguments
from PIL import Image

import headrace as hr

WIDTH, HEIGHT, CROP = 500, 375, 224
FILES = 64  # different ones in memory
BATCH = 32

LIMIT, HEADRACE, TORCH, TUNED = "two bare loops", "headrace", "torch", "torch, tuned"


def make_files() -> list[bytes]:
    """Noise over gradients, in the size and with the detail of a photo of ImageNet: about 56 kB each."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    files = []
    for number in range(FILES):
        waves = np.stack(
            [np.sin(x / (9 + number + c)) + np.cos(y / (7 + c)) for c in range(3)], -1
        )
        pixels = 128 + 50 * waves + random.normal(0, 11, (HEIGHT, WIDTH, 3))
        out = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
            out, "JPEG", quality=85
        )
        files.append(out.getvalue())
    return files


def decode(data: Any, index: int) -> torch.Tensor:
    return cropped(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), index)


def cropped(pixels: np.ndarray[Any, Any], index: int) -> torch.Tensor:
    """A part of an image, flipped or not, as a tensor [3, CROP, CROP]."""
    left, top = index * 37 % (WIDTH - CROP), index * 91 % (HEIGHT - CROP)
    pixels = pixels[top : top + CROP, left : left + CROP]
    if index % 2:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


class Decoded(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, files: list[bytes], length: int) -> None:
        self.files = files
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return decode(self.files[index % FILES], index)


class Fetched(hr.AsyncDataset[tuple[int, bytes]]):
    """The same files, as if they came from a store that answers at once."""

    def __init__(self, files: list[bytes], length: int) -> None:
        self.files = files
        self.length = length

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> tuple[int, bytes]:
        return index, self.files[index % FILES]


def decode_fetched(sample: tuple[int, bytes]) -> torch.Tensor:
    index, data = sample
    return decode(data, index)


def corners(batch: torch.Tensor) -> torch.Tensor:
    """A few values of each image; reading all would take the cores from the workers."""
    return batch[:, :, ::73, ::73].clone()


class Reader:
    """Reads epochs, and knows what must come."""

    def __init__(self, dataset: Decoded) -> None:
        self.images = dataset.length
        made = torch.stack([dataset[index] for index in range(dataset.length)])
        self.corners = corners(made)
        self.last = made[-BATCH:]

    def __call__(self, loader: Any) -> float:
        began = time.perf_counter()
        seen = []
        for batch in loader:
            seen.append(corners(batch))
            last = batch
        elapsed = time.perf_counter() - began
        if not torch.equal(torch.cat(seen), self.corners) or not torch.equal(
            last, self.last
        ):
            raise RuntimeError("images are missing or wrong: this run does not count")
        return self.images / elapsed


def keep_freed_memory(worker: int = 0) -> None:
    """Free a large block: glibc keeps freed blocks up to that size for reuse from then on."""
    bytes(31 << 20)


def decode_on_demand(requests: Connection, dataset: Decoded, half: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    out = torch.empty(BATCH, 3, CROP, CROP, dtype=torch.uint8)
    requests.send("ready")
    while requests.recv():
        for start in range(
            half * BATCH, len(dataset), 2 * BATCH
        ):  # every other batch, as a worker gets them
            torch.stack(
                [dataset[index] for index in range(start, start + BATCH)], out=out
            )
        requests.send("done")


class BareLoops:
    """Two processes that do a worker's work and send nothing."""

    def __init__(self, dataset: Decoded) -> None:
        self.dataset = dataset

    def __enter__(self) -> BareLoops:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(2)]
        self.ends = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=decode_on_demand, args=(theirs, self.dataset, half))
            for half, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for end in self.ends:
            end.recv()
        return self

    def __call__(self) -> float:
        began = time.perf_counter()
        for end in self.ends:
            end.send(True)
        for end in self.ends:
            end.recv()
        return len(self.dataset) / (time.perf_counter() - began)

    def __exit__(self, *exc_info: object) -> None:
        for end in self.ends:
            end.send(False)
        for process in self.processes:
            process.join()


def nodes_loader(dataset: Decoded) -> Any:
    from torchdata import nodes

    node: Any = nodes.IterableWrapper(range(len(dataset)))
    node = nodes.ParallelMapper(node, dataset.__getitem__, num_workers=2, method="thread")
    node = nodes.Mapper(nodes.Batcher(node, BATCH), torch.stack)
    return nodes.Loader(nodes.Prefetcher(node, 4))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=32, help="an even number")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, batches=4, rounds=1)
    length = BATCH * arguments.batches
    files = make_files()
    dataset = Decoded(files, length)
    reader = Reader(dataset)
    workers: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": 2,
        "persistent_workers": True,
    }
    workers_of_torch = {"multiprocessing_context": "spawn", **workers}
    torch_loader = torch.utils.data.DataLoader(dataset, **workers_of_torch)
    tuned_loader = torch.utils.data.DataLoader(
        dataset, worker_init_fn=keep_freed_memory, **workers_of_torch
    )
    absent = {}
    with (
        BareLoops(dataset) as bare_loops,
        hr.DataLoader(dataset, **workers_of_torch) as map_loader,
        hr.DataLoader(
            Fetched(files, length), transform=decode_fetched, **workers
        ) as async_loader,
    ):
        contestants: dict[str, Callable[[], float]] = {
            LIMIT: bare_loops,
            HEADRACE: lambda: reader(map_loader),
            "headrace, async dataset": lambda: reader(async_loader),
            TORCH: lambda: reader(torch_loader),
            TUNED: lambda: reader(tuned_loader),
        }
        if is_installed("torchdata"):
            threads = nodes_loader(dataset)
            contestants["torchdata.nodes, 2 threads"] = lambda: reader(threads)
        else:
            absent["torchdata.nodes, 2 threads"] = "torchdata is not installed"
        rounds = interleave(contestants, rounds=arguments.rounds, unit="images/s")
    size = sum(map(len, files)) / FILES / 1e3
    print(
        f"{length} JPEGs of {WIDTH} × {HEIGHT}, {size:.0f} kB each, batches of {BATCH}, 2 workers"
    )
    print(describe_machine("pillow", "torchdata"))
    rounds.show(against=LIMIT, absent=absent)
    claim(
        "JPEG decoding, 2 workers",
        rounds.share(HEADRACE, LIMIT, at_least=0.97),
        rounds.share(HEADRACE, TORCH, "× torch", at_least=1.2),
        rounds.share(HEADRACE, TUNED, "× torch, tuned"),
    )


if __name__ == "__main__":
    main()
