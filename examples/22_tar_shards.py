"""
WebDataset shards
=================

Tar files, streamed over two ranks in a new order at each epoch, and read by number through an index.

::

    python examples/22_tar_shards.py

For shards of your own::

    hr.TarDataset("s3://bucket/train-{0000..0127}.tar", shuffle=True, buffer_size=1000)
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
            for field, data in (("bin", bytes([number % 256]) * 1000), ("cls", str(number % 10).encode())):
                info = tarfile.TarInfo(f"{number:06d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def pixels(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


decode = hr.decode.fields(bin=pixels, cls=int)  # of JPEGs: jpg=hr.decode.image(size=224)


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    sizes = (40, 40, 40, 40)
    for shard, size in enumerate(sizes):
        write_shard(folder / f"{shard:04d}.tar", first=100 * shard, count=size)

    indexed = hr.TarDataset.index(folder / "{0000..0003}.tar")
    print(f"{indexed}; sample 50 is {indexed[50]['__key__']}, one ranged read")

    for rank in range(2):  # in training, each rank is a process and determines its rank itself
        stream = indexed.stream(shuffle=True, buffer_size=20, seed=7, rank=rank, world_size=2)
        with hr.DataLoader(stream, batch_size=16, num_workers=1, transform=decode) as loader:
            for epoch in range(2):
                batches = [batch["cls"] for batch in loader]
                print(f"rank {rank}, epoch {epoch}: {len(batches)} batches, first labels {batches[0][:6].tolist()}")
