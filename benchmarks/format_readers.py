"""Readers of `formats.py`: each writes the images in its own format, and reads epochs of them in batches.

The program runs as a process of one reader, in that reader's environment: it needs NumPy and the
reader, headrace only for headrace's own. It answers each line of its input with a line of JSON, the
rate of an epoch or its error.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contents import check_order, check_set, content_of, numbers_of

__all__ = ["READERS", "Reader", "answer", "import_mosaic", "in_batches"]

BATCH = 64
SIZE = 56_000  # bytes of an image
SHARD = 500  # images of a shard, a file or a row group's multiple
ROW_GROUP = 100  # images
# Images from which a reader of streams draws, as their documentations propose.
BUFFER = 1000
TORCHVISION_OPERATORS = (
    Path(__file__).parents[1] / "tests/integrations/torchvision_ops.py"
)

Batches = Iterable[Sequence[Any]]
"""Batches of the images' bytes."""


@dataclass(frozen=True)
class Reader:
    """A reader and its format.

    Attributes:
        write: writes images of those numbers into a new folder.
        open: context manager that gives a function that starts an epoch over the folder, shuffled
            if asked to.
        packages: required distributions.
        in_order: whether images come in the order in which they were written, if they are not
            shuffled.
        shuffles: whether it can shuffle images.
    """

    write: Callable[[Path, int], None]
    open: Callable[
        [Path, int, bool], contextlib.AbstractContextManager[Callable[[], Batches]]
    ]
    packages: tuple[str, ...] = ()
    in_order: bool = True
    shuffles: bool = False


def in_batches(images: Iterable[Any]) -> Iterator[list[Any]]:
    """Group single images."""
    batch: list[Any] = []
    for image in images:
        batch.append(image)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def write_tar(folder: Path, count: int) -> None:
    for first in range(0, count, SHARD):
        with tarfile.open(
            folder / f"{first // SHARD:04d}.tar", "w", format=tarfile.USTAR_FORMAT
        ) as tar:
            for number in range(first, min(first + SHARD, count)):
                info = tarfile.TarInfo(f"{number:06d}.jpg")
                info.size = SIZE
                tar.addfile(info, io.BytesIO(content_of(number, SIZE)))


def write_parquet(folder: Path, count: int) -> None:
    import pyarrow
    import pyarrow.parquet

    for first in range(0, count, SHARD):
        images = [
            content_of(number, SIZE) for number in range(first, min(first + SHARD, count))
        ]
        table = pyarrow.table({"image": pyarrow.array(images, pyarrow.binary())})
        options: dict[str, Any] = {
            "compression": "none",
            "use_dictionary": False,
            "row_group_size": ROW_GROUP,
        }
        pyarrow.parquet.write_table(
            table, folder / f"{first // SHARD:04d}.parquet", **options
        )


def pattern(folder: Path, count: int, ending: str) -> str:
    return f"{folder}/{{0000..{-(-count // SHARD) - 1:04d}}}.{ending}"


def images_of_tar(samples: Sequence[Any]) -> list[Any]:
    return [sample["jpg"] for sample in samples]


@contextlib.contextmanager
def headrace_tar(
    folder: Path, count: int, shuffle: bool
) -> Iterator[Callable[[], Batches]]:
    import headrace as hr

    dataset = hr.TarDataset(pattern(folder, count, "tar"), shuffle=shuffle)
    if shuffle:
        dataset = dataset.shuffle(BUFFER)
    with hr.DataLoader(dataset, BATCH, collate_fn=images_of_tar) as loader:
        yield lambda: loader


@contextlib.contextmanager
def headrace_indexed_tar(
    folder: Path, count: int, shuffle: bool
) -> Iterator[Callable[[], Batches]]:
    import headrace as hr

    os.environ["XDG_CACHE_HOME"] = str(folder)  # the index is kept there
    dataset = hr.TarDataset.index(pattern(folder, count, "tar"))
    with hr.DataLoader(
        dataset, BATCH, shuffle=shuffle, collate_fn=images_of_tar
    ) as loader:
        yield lambda: loader


@contextlib.contextmanager
def headrace_parquet(
    folder: Path, count: int, shuffle: bool
) -> Iterator[Callable[[], Batches]]:
    import headrace as hr

    dataset = hr.ParquetDataset(str(folder), columns=["image"], format="arrow")
    with hr.DataLoader(dataset, BATCH, shuffle=shuffle) as loader:
        yield lambda: ([each.as_buffer() for each in table["image"]] for table in loader)


@contextlib.contextmanager
def pyarrow_dataset(
    folder: Path, count: int, shuffle: bool
) -> Iterator[Callable[[], Batches]]:
    import pyarrow.dataset

    dataset = pyarrow.dataset.dataset(sorted(map(str, folder.glob("*.parquet"))))
    yield lambda: (
        [each.as_buffer() for each in batch["image"]]
        for batch in dataset.to_batches(columns=["image"], batch_size=BATCH)
    )


def write_lance(folder: Path, count: int) -> None:
    import lance
    import pyarrow

    for first in range(0, count, SHARD):
        images = [
            content_of(number, SIZE) for number in range(first, min(first + SHARD, count))
        ]
        table = pyarrow.table({"image": pyarrow.array(images, pyarrow.large_binary())})
        lance.write_dataset(
            table, str(folder / "images.lance"), mode="append" if first else "create"
        )


@contextlib.contextmanager
def lance(folder: Path, count: int, shuffle: bool) -> Iterator[Callable[[], Batches]]:
    import lance.torch.data
    import torch

    place = str(folder / "images.lance")
    if shuffle:
        rows = lance.torch.data.SafeLanceDataset(place)
        yield lambda: torch.utils.data.DataLoader(
            rows, BATCH, shuffle=True, collate_fn=images_of_dicts
        )
    else:
        dataset = lance.dataset(place)
        yield lambda: (
            [each.as_buffer() for each in batch["image"]]
            for batch in dataset.to_batches(batch_size=BATCH)
        )


@contextlib.contextmanager
def webdataset(
    folder: Path, count: int, shuffle: bool
) -> Iterator[Callable[[], Batches]]:
    import webdataset as wds

    shards = 100 if shuffle else False  # the most that are shuffled
    samples = wds.WebDataset(
        pattern(folder, count, "tar"), shardshuffle=shards, empty_check=False
    )
    if shuffle:
        samples = samples.shuffle(BUFFER)
    yield lambda: in_batches(sample["jpg"] for sample in samples)


def litdata_sample(number: int) -> dict[str, bytes]:
    return {"image": content_of(number, SIZE)}


def write_litdata(folder: Path, count: int) -> None:
    import litdata

    litdata.optimize(
        litdata_sample,
        list(range(count)),
        str(folder),
        chunk_bytes=SHARD * SIZE,
        num_workers=1,
    )


def images_of_dicts(samples: Sequence[Any]) -> list[Any]:
    return [sample["image"] for sample in samples]


@contextlib.contextmanager
def litdata(folder: Path, count: int, shuffle: bool) -> Iterator[Callable[[], Batches]]:
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=shuffle)
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=0,
        shuffle=shuffle,
        collate_fn=images_of_dicts,
    )
    yield lambda: loader


@functools.cache
def import_mosaic() -> tuple[Any, Any]:
    """The module, also where torch has no CUDA and PyPI's torchvision, which it imports, is built for it."""
    # kept: they are declared as long as it lives
    torchvision_operators = runpy.run_path(str(TORCHVISION_OPERATORS))
    import streaming

    return streaming, torchvision_operators


def write_mosaic(folder: Path, count: int) -> None:
    MDSWriter = import_mosaic()[0].MDSWriter

    with MDSWriter(
        out=str(folder), columns={"image": "bytes"}, size_limit=SHARD * SIZE
    ) as out:
        for number in range(count):
            out.write({"image": content_of(number, SIZE)})


@contextlib.contextmanager
def mosaic(folder: Path, count: int, shuffle: bool) -> Iterator[Callable[[], Batches]]:
    import torch

    dataset = import_mosaic()[0].StreamingDataset(
        local=str(folder), shuffle=shuffle, batch_size=BATCH
    )
    loader = torch.utils.data.DataLoader(dataset, BATCH, collate_fn=images_of_dicts)
    yield lambda: loader


@contextlib.contextmanager
def huggingface(
    folder: Path, count: int, shuffle: bool
) -> Iterator[Callable[[], Batches]]:
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, folder.glob("*.parquet")))
    streamed = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True
    )
    if shuffle:
        streamed = streamed.shuffle(buffer_size=BUFFER)
    yield lambda: (batch["image"] for batch in streamed.batch(BATCH))


@contextlib.contextmanager
def ray_data(folder: Path, count: int, shuffle: bool) -> Iterator[Callable[[], Batches]]:
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as own:
        # Of its own: neither another cluster of this machine is used, nor does another program find
        # this one.
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        ray.init(
            address="local",
            num_cpus=len(os.sched_getaffinity(0)),
            _temp_dir=own,
            **options,
        )
        try:
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            context.execution_options.preserve_order = True
            read = ray.data.read_parquet(str(folder))
            yield lambda: (
                list(batch["image"])
                for batch in read.iter_batches(batch_size=BATCH, batch_format="numpy")
            )
        finally:
            ray.shutdown()


READERS: dict[str, Reader] = {
    "headrace, tar": Reader(write_tar, headrace_tar, in_order=False, shuffles=True),
    "headrace, indexed tar": Reader(write_tar, headrace_indexed_tar, shuffles=True),
    "headrace, Parquet": Reader(
        write_parquet, headrace_parquet, ("pyarrow",), shuffles=True
    ),
    "WebDataset, tar": Reader(write_tar, webdataset, ("webdataset",), shuffles=True),
    "LitData, its chunks": Reader(write_litdata, litdata, ("litdata",), shuffles=True),
    "Mosaic, MDS": Reader(write_mosaic, mosaic, ("mosaicml-streaming",), shuffles=True),
    "Lance": Reader(write_lance, lance, ("pylance",), shuffles=True),
    "pyarrow.dataset, Parquet": Reader(write_parquet, pyarrow_dataset, ("pyarrow",)),
    "HF datasets, Parquet": Reader(
        write_parquet, huggingface, ("datasets",), shuffles=True
    ),
    "Ray Data, Parquet": Reader(write_parquet, ray_data, ("ray", "pyarrow")),
}


def epoch(
    reader: Reader, start: Callable[[], Batches], count: int, *, shuffled: bool
) -> float:
    """Images a second of an epoch in which every byte is compared."""
    began = time.perf_counter()
    numbers = [numbers_of(batch, SIZE) for batch in start()]
    elapsed = time.perf_counter() - began
    (check_order if reader.in_order and not shuffled else check_set)(numbers, count)
    return count / elapsed


def answer(
    opened: Callable[[], contextlib.AbstractContextManager[Callable[[], float]]],
) -> None:
    """The rate of an epoch for each line of input, or the error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reader prints is not an answer
    try:
        with opened() as run:
            for _ in sys.stdin:
                print(json.dumps({"rate": run()}), file=answers, flush=True)
    except Exception as error:  # the other readers continue
        message = (str(error).splitlines() or [""])[-1]
        print(
            json.dumps({"error": f"{type(error).__name__}: {message}"}),
            file=answers,
            flush=True,
        )
        raise


@contextlib.contextmanager
def written(
    name: str, folder: Path, count: int, *, shuffled: bool
) -> Iterator[Callable[[], float]]:
    """Write; an epoch is read by each call."""
    reader = READERS[name]
    reader.write(folder, count)
    with reader.open(folder, count, shuffled) as start:
        yield lambda: epoch(reader, start, count, shuffled=shuffled)


if __name__ == "__main__":
    answer(
        lambda: written(
            sys.argv[1],
            Path(sys.argv[2]),
            int(sys.argv[3]),
            shuffled=sys.argv[4:] == ["shuffled"],
        )
    )
