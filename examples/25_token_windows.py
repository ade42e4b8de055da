"""
Windows of tokens
=================

Token files for a language model, in a random order that takes few requests.

::

    python examples/25_token_windows.py

For shards of your own::

    hr.TokenDataset("s3://bucket/tokens/*.bin", seq_len=2049, stride=2048)
"""

import pathlib
import tempfile

import numpy as np
import torch

import headrace as hr

CONTEXT = 128

with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for shard in range(4):
        tokens = np.random.default_rng(shard).integers(
            0, 50_000, size=500_000, dtype=np.uint16
        )
        tokens.tofile(folder / f"{shard:04d}.bin")

    windows = hr.TokenDataset(folder / "*.bin", seq_len=CONTEXT + 1, stride=CONTEXT)
    print(windows)

    orders = {
        "random over everything": {"sampler": torch.utils.data.RandomSampler(windows)},
        "random in blocks": {"shuffle": True, "seed": 7},
    }
    for order, options in orders.items():
        with hr.DataLoader(windows, batch_size=32, **options) as loader:
            seen = 0
            for batch in loader:
                inputs, targets = batch[:, :-1], batch[:, 1:]
                seen += len(inputs)
            requests = loader.stats().requests.requests
        print(
            f"{order}: {seen:,} windows, {requests:,} requests; the last {tuple(inputs.shape)}, {targets.dtype}"
        )
