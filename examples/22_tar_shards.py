"""
WebDataset shards
=================

Tar files, streamed on one rank, and read through an index on two: in a new order at each epoch.

::

    python examples/22_tar_shards.py

For shards of your own::

    shards = "s3://bucket/train-{0000..0127}.tar"
    hr.DataLoader(hr.TarDataset(shards, shuffle=True, buffer_size=1000), 32, seed=0)  # on one rank
    hr.DataLoader(hr.TarDataset.index(shards, save=True), 32, shuffle=True, seed=0)   # on any
    number
"""

import io
import pathlib
import tarfile
import tempfile

import torch

import headrace as hr


def write_shard(path, first, count):
    with tarfile.open(path, "w") as tar:
        for number in range(first, first + count):
            for field, data in (
                ("bin", bytes([number % 256]) * 1000),
                ("cls", str(number % 10).encode()),
            ):
                info = tarfile.TarInfo(f"{number:06d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def pixels(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


decode = hr.decode.fields(bin=pixels, cls=int)  # of JPEGs: jpg=hr.decode.image(size=224)


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    sizes = (40, 50, 30, 40)
    for shard, size in enumerate(sizes):
        write_shard(folder / f"{shard:04d}.tar", first=100 * shard, count=size)

    def read(name, dataset):
        with hr.DataLoader(
            dataset, batch_size=16, num_workers=1, transform=decode
        ) as loader:
            for epoch in range(2):
                batches = [batch["cls"] for batch in loader]
                print(
                    f"{name}, epoch {epoch}: {len(batches)} batches, first labels {batches[0][:6].tolist()}"
                )

    read(
        "stream",
        hr.TarDataset(folder / "{0000..0003}.tar", shuffle=True, buffer_size=20, seed=7),
    )

    # The shards differ in size, and the ranks get equal numbers of samples: an index divides
    # samples, not shards.
    indexed = hr.TarDataset.index(folder / "{0000..0003}.tar")
    print(f"{indexed}; sample 50 is {indexed[50]['__key__']}, one ranged read")
    for rank in range(
        2
        # In training, each rank is a process, and gives the loader `indexed` with shuffle=True.
    ):
        read(
            f"rank {rank}", indexed.stream(shuffle=True, seed=7, rank=rank, world_size=2)
        )
