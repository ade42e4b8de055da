"""What the reference reads elsewhere: orders and random numbers from the simplest programs, states, and the rank."""

import functools
import itertools
import os

import numpy as np
import torch

import headrace as hr
from tests.model import parts


@functools.cache
def shuffled(count, buffer_size, seed, epoch, repetition):
    """The positions of a stream of `count` samples in the order of `shuffle`."""
    stream = parts.Count(count).shuffle(buffer_size, seed).repeat(repetition + 1)
    stream.set_epoch(epoch)
    return list(stream)[count * repetition :]


@functools.cache
def chosen(weights, seed, epoch, rank, count=400):
    """The streams that `hr.mix` draws from on a rank."""
    streams = [
        hr.from_async_iterable(functools.partial(_endless, number))
        for number in range(len(weights))
    ]
    mixed = hr.mix(streams, weights, seed=seed).take(count)
    mixed.set_epoch(epoch)
    here = place_of_program()
    parts.as_rank(rank, rank + 1)
    found = list(mixed)
    parts.as_rank(*here)
    return found


async def _endless(number):
    while True:
        yield number


# Samples of a batch, at most, where a transform draws from the generators of the process.
DRAWS = 8


def _drawn_by(transform):
    def draw(sample):
        times = 1 if transform is parts.jittered else DRAWS
        return [transform(sample)[1:] for _ in range(times)]

    return draw


@functools.cache
def random_numbers(transform, seed, epoch, count=512):
    """For each position what a transform draws, alone in a batch; of process generators, several times in turn."""
    here = place_of_program()
    parts.as_rank(0, 1)
    loader = hr.DataLoader(
        range(count), transform=_drawn_by(transform), seed=seed, collate_fn=parts.whole
    )
    loader.set_epoch(epoch)
    found = [drawn for (drawn,) in loader]
    parts.as_rank(*here)
    return found


def state_of(part):
    """The state of a sampler or of a generator; None of None."""
    if part is None:
        return None
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def place_of_program():
    """The rank and the number of ranks, as torchrun says them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def batched(pairs, batch_size, drop_last):
    """Batches of pairs, each as the first and the second values."""
    for number in range(0, len(pairs), batch_size or 1):
        batch = pairs[number : number + (batch_size or 1)]
        if len(batch) == (batch_size or 1) or not drop_last:
            yield tuple(zip(*batch, strict=True))


def in_turn(iterators):
    """One item of each iterator in turn; none is read before its turn."""
    while iterators:
        for iterator in list(iterators):
            for item in iterator:
                yield item
                break
            else:
                iterators.remove(iterator)


def side_by_side(sampler):
    """The indices of groups of neighbouring blocks: one of each block of a group in turn."""
    size, at_once = sampler.block_size, sampler.blocks_at_once
    groups = [
        range(len(sampler))[first:][: size * at_once]
        for first in range(0, len(sampler), size * at_once)
    ]
    rows = [
        row
        for group in groups
        for row in itertools.zip_longest(*np.array_split(group, at_once))
    ]
    return [int(index) for row in rows for index in row if index is not None]
