"""
A disk cache
============

The first epoch fetches, the second reads from the local disk, and so does the next program at once.

The store is a local one with 20 ms to the first byte. For a real one, leave the server out::

    photos = hr.ObjectDataset("s3://bucket/train", suffix=".npy", labels=...)
    cached = photos.cache("/data/cache", max_bytes=200 * 2**30)
"""

import io
import pathlib
import tempfile
import time

import numpy as np

import headrace as hr
from object_server import ObjectServer


def as_object(number):
    stream = io.BytesIO()
    np.save(stream, np.full((3, 32, 32), number, dtype=np.uint8))
    return stream.getvalue()


def decode(sample):
    return np.load(io.BytesIO(sample.data)), sample.label


def epoch(loader):
    began = time.perf_counter()
    total = sum(int(images.sum()) for images, _ in loader)
    return total, time.perf_counter() - began


contents = {
    f"train/{number % 10}/{number:05d}.npy": as_object(number % 256)
    for number in range(500)
}
expected = sum(number % 256 for number in range(500)) * 3 * 32 * 32

with (
    tempfile.TemporaryDirectory() as folder,
    ObjectServer(contents, latency=0.020) as server,
):

    def loader():
        photos = hr.ObjectDataset(
            hr.Store(server.url + "/train", options=server.store_options),
            suffix=".npy",
            labels=lambda key: int(key.split("/")[0]),
        )
        # The cache stores the object's bytes; map comes after it and runs in every epoch.
        cached = photos.cache(pathlib.Path(folder) / "cache", max_bytes=64 * 2**20)
        return hr.DataLoader(
            cached.map(decode), batch_size=50, shuffle=True, concurrency=32
        )

    with loader() as first:
        for name in ("first epoch", "second epoch"):
            total, seconds = epoch(first)
            assert total == expected
            print(
                f"{name}: {500 / seconds:6,.0f} samples a second, {server.requests()['GET']} requests so far"
            )
        counts = first.stats().requests
        print(f"{counts.cache_misses} fetched, {counts.cache_hits} from the disk")

    with loader() as another:  # as in the next program
        total, seconds = epoch(another)
        assert total == expected
        assert server.requests()["GET"] == 500
        print(
            f"another loader: {another.stats().requests.cache_hits} of 500 from the disk, and no request"
        )
