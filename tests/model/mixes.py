"""The order of a mix of map-style datasets, one row after the other: the specification of `hr.mix`.

A row is one sample of each lane. There are as many lanes as blocks are read side by side; without
blocks, one lane. `hr.mix` computes any position of the order by arithmetic.
"""

import functools
import hashlib
import itertools
import math
import struct

import headrace as hr

WINDOW = 8  # rows
FEWEST_ROWS = 64  # of the shortest source
SHARES = 1 << 30


def derived(seed, first, second):
    """A seed that follows from another one and two numbers."""
    digest = hashlib.blake2b(
        struct.pack("<QQQ", seed, first, second), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little")


def divided(rows, weights):
    """How many of the first rows are of each source: of the most frequent source, then of others in what is left."""
    scale = SHARES / math.fsum(weights)
    shares = [
        (max(1, round(weight * scale)), source)
        for source, weight in enumerate(weights)
        if weight
    ]
    total, counts = sum(share for share, _ in shares), [0] * len(weights)
    for share, source in sorted(shares, reverse=True):
        counts[source] = (rows * share + total // 2) // total
        rows -= counts[source]
        total -= share
    return counts


def sequence(weights, lane):
    """The sources of a lane, for ever. Each lane begins at another place."""
    first = hr.Permutation(SHARES // WINDOW, 0)[lane] * WINDOW if lane else 0
    for now, then in itertools.pairwise(
        divided(row, weights) for row in itertools.count(first)
    ):
        (source,) = (
            source for source in range(len(weights)) if then[source] > now[source]
        )
        yield source


class Mix:
    """The rows of a mix, in pieces of equal weights; a row is a list of sources, one for each lane."""

    def __init__(self, lengths, blocks, schedule, stop):
        self.lengths, self.blocks, self.stop, self.pieces = lengths, blocks, stop, []
        self.lanes = min((each["blocks_at_once"] for each in blocks if each), default=1)
        has_weight = map(any, zip(*(weights for _, weights in schedule), strict=True))
        shortest = min(itertools.compress(lengths, has_weight))
        while self.lanes > 1 and shortest < self.lanes * FEWEST_ROWS:
            self.lanes //= 2
        self.starts = {-(-step // self.lanes): weights for step, weights in schedule}
        self.left = [
            [len(range(lane, size, self.lanes)) for size in lengths]
            for lane in range(self.lanes)
        ]
        for number in itertools.count():
            if stop == "all" and not self._is_awaited(number):
                return
            if number in self.starts:
                sequences = [
                    sequence(self.starts[number], lane) for lane in range(self.lanes)
                ]
                self.pieces.append([])
            row = [next(each) for each in sequences]
            for left, source in zip(self.left, row, strict=True):
                left[source] -= 1
            if stop == "first" and min(map(min, self.left)) < 0:
                return
            self.pieces[-1].append(row)

    def _is_awaited(self, row):
        """Whether a source has not ended, and has a weight in this row or later."""
        now = max(start for start in self.starts if start <= row)
        to_come = [weights for start, weights in self.starts.items() if start >= now]
        return any(
            left > 0 and any(weights[source] for weights in to_come)
            for of_lane in self.left
            for source, left in enumerate(of_lane)
        )

    def order(self, seed, epoch, *, shuffle):
        """The indices of an epoch: of the datasets one after the other."""
        turns = hr.Permutation(2**60, derived(seed, epoch if shuffle else 0, 3))
        counts = [[0] * len(self.lengths) for _ in range(self.lanes)]
        orders = functools.cache(functools.partial(self._order_of, seed, epoch, shuffle))
        indices, number = [], 0
        for piece in self.pieces:
            for start in range(0, len(piece), WINDOW):
                window = piece[start : start + WINDOW]
                columns = [
                    turned(column, turns[number * self.lanes + lane])
                    for lane, column in enumerate(zip(*window, strict=True))
                ]
                for row in zip(*columns, strict=True):
                    for lane, source in enumerate(row):
                        passed, index = divmod(
                            counts[lane][source] * self.lanes + lane, self.lengths[source]
                        )
                        indices.append(
                            sum(self.lengths[:source])
                            + int(orders(source, passed)[index])
                        )
                        counts[lane][source] += 1
                number += len(window)
        return indices

    def _order_of(self, seed, epoch, shuffle, source, passed):
        """The order of one pass of a source."""
        blocks, length = self.blocks[source], self.lengths[source]
        own_seed = derived(seed, source, passed)
        if not shuffle:
            return range(length)
        if not blocks:
            return hr.Permutation(length, own_seed, epoch)
        at_once = blocks["blocks_at_once"] // self.lanes * self.lanes
        options = {**blocks, "blocks_at_once": at_once, "seed": own_seed}
        sampler = hr.BlockShuffleSampler(length, **options, rank=0, world_size=1)
        sampler.set_epoch(epoch)
        return list(sampler)


def turned(column, turn):
    """The sources of a window and lane in another order, so that ranks draw independently of each other."""
    slots = sorted(column)
    return [slots[(step * 11 + turn) % len(slots)] for step in range(len(slots))]
