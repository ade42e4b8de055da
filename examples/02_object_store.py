"""
Arrays in an object store
=========================

NumPy arrays, decoded in workers, shuffled reproducibly, read with `for` and with `async for`.

The store is a local one with 20 ms of latency. For a real one, omit the server::

    dataset = hr.ObjectDataset("s3://bucket/train", suffix=".npy", labels=...)
"""

import asyncio
import io

import numpy as np

import headrace as hr
from object_server import ObjectServer


def as_object(number):
    stream = io.BytesIO()
    np.save(stream, np.full((3, 32, 32), number, dtype=np.float32))
    return stream.getvalue()


def decode(sample):
    return np.load(io.BytesIO(sample.data)), sample.label


async def total(loader):
    return sum([float(images.sum()) async for images, _ in loader])


objects = {
    f"train/{number % 10}/{number:05d}.npy": as_object(number) for number in range(500)
}
with ObjectServer(objects, latency=0.020) as server:
    dataset = hr.ObjectDataset(
        hr.Store(server.url + "/train", options=server.store_options),
        suffix=".npy",
        labels=lambda key: int(key.split("/")[0]),
    )
    with hr.DataLoader(
        dataset,
        batch_size=64,
        shuffle=True,
        num_workers=2,
        concurrency=128,
        transform=decode,
        seed=7,
    ) as loader:
        images, labels = next(iter(loader))
        print(
            f"{dataset}: a batch is {tuple(images.shape)} {images.dtype}, labels {labels[:5].tolist()} …"
        )
        by_for = sum(float(images.sum()) for images, _ in loader)
        by_async_for = asyncio.run(total(loader))
        stats = loader.stats()
assert by_for == by_async_for == sum(range(500)) * 3 * 32 * 32
print(
    f"{stats.samples} samples in {stats.elapsed_seconds:.1f} s, waiting {stats.wait_share:.0%}; {stats.placement}"
)
