"""How random the orders of indexed shards are: neighbours of a shard, and samples of one shard in a batch.

A million samples in shards of 10,000, in the sizes of blocks that a format proposes for samples of
some sizes; beside a full permutation, and a shuffle buffer of 10,000 samples over shards in a
random order, four of which are read at once. Printed are the distance in the epoch between samples
that are neighbours in their shard, and how many of the other 63 samples of a batch are of the same
shard. Nothing is timed.

    python benchmarks/shuffle_quality.py
"""

from __future__ import annotations

import argparse
import random

import numpy as np
from harness import parse_arguments

from headrace._order.blocks import BlockOrder
from headrace._random.permutation import Permutation
from headrace._streams.kinds import BYTES_AT_ONCE, Blocks

SHARD = 10_000  # samples
BATCH = 64
BUFFER = 10_000  # samples
PARALLEL = 4  # shards that a stream reads at once


def block_order(
    samples: int, sample_bytes: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    blocks = Blocks.within(BYTES_AT_ONCE, sample_bytes, 1)
    order = BlockOrder(samples, blocks.size, blocks.at_once, 0, 0)
    return np.concatenate([*order.at(range(samples))])


def buffer_order(samples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A buffer from which a random sample is taken for each that comes."""
    draw = random.Random(0)
    shards = [*range(samples // SHARD)]
    draw.shuffle(shards)
    read = (
        shard * SHARD + row
        for first in range(0, len(shards), PARALLEL)
        for row in range(SHARD)
        for shard in shards[first : first + PARALLEL]
    )
    buffer, found = list[int](), list[int]()
    for sample in read:
        if len(buffer) < BUFFER:
            buffer.append(sample)
        else:
            place = draw.randrange(BUFFER)
            found.append(buffer[place])
            buffer[place] = sample
    draw.shuffle(buffer)
    return np.array([*found, *buffer])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    arguments = parse_arguments(parser, samples=100_000)
    samples = arguments.samples
    orders = {"full permutation": np.array(Permutation(samples, 0, 0)[:])}
    for name, sample_bytes in (("1 KB", 1_000), ("56 KB", 56_000), ("1 MB", 1_000_000)):
        orders[f"blocks, samples of {name}"] = block_order(samples, sample_bytes)
    orders[f"buffer of {BUFFER:,}"] = buffer_order(samples)
    print(
        f"{'':28}{'distance of neighbours':>24}{'median':>12}{'of one shard in a batch':>26}"
    )
    for name, order in orders.items():
        if not np.array_equal(np.sort(order), np.arange(samples)):
            raise RuntimeError(f"{name} is no permutation")
        places = np.empty(samples, np.int64)
        places[order] = np.arange(samples)
        distances = np.abs(
            np.diff(places).reshape(-1)[np.arange(samples - 1) % SHARD != SHARD - 1]
        )
        batches = order[: samples // BATCH * BATCH].reshape(-1, BATCH) // SHARD
        same = (batches[:, :, None] == batches[:, None, :]).sum() / batches.size - 1
        print(
            f"{name:28}{distances.mean():24,.0f}{np.median(distances):12,.0f}{same:26.2f}"
        )


if __name__ == "__main__":
    main()
