"""The order of a mix of map-style datasets, one row after the other: the specification of `hr.mix`.

An epoch is written as rows. A row has as many lanes as blocks are read side by side, and all its samples are of one
source; without blocks a row is one sample. `hr.mix` computes any position of it by arithmetic.
"""

import hashlib
import itertools
import math
import struct

import headrace as hr

WINDOW = 8  # rows
FEWEST_ROWS = 16  # of the rarest source


def derived(seed, first, second):
    """A seed that follows from another one and two numbers."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, first, second), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def drawn_at(position, key):
    """A random number for a position: splitmix64."""
    mask = (1 << 64) - 1
    value = (position + key) * 0x9E3779B97F4A7C15 & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


def sequence(weights):
    """Sources for ever, each as often as its weight says. The two rarest parts become one part, until one is left."""
    total = math.fsum(weight / max(weights) for weight in weights)
    parts = []
    for source, weight in enumerate(weights):
        if weight:
            share = max(1, round(weight / max(weights) / total * (1 << 30)))
            parts.append((share, source, itertools.repeat(source)))
    for number in itertools.count(len(weights)):
        parts.sort(key=lambda part: part[:2])
        if len(parts) == 1:
            return parts[0][2]
        (rare, _, rarely), (frequent, _, often), *parts = parts
        both = rare + frequent
        parts.append((both, number, alternated(often, rarely, frequent, both)))


def alternated(often, rarely, frequent, both):
    """Two sequences as one. Of the first n, the rounded ``n * frequent / both`` are of the first sequence."""
    for number in itertools.count(1):
        before = ((number - 1) * frequent + both // 2) // both
        with_this = (number * frequent + both // 2) // both
        yield next(often if with_this > before else rarely)


class Mix:
    """The rows of a mix: `pieces` of equal weights, each a list of rows; a row is a source, its row and its lanes."""

    def __init__(self, lengths, blocks, schedule, stop):
        self.lengths, self.blocks, self.schedule, self.stop = lengths, blocks, schedule, stop
        self._write_rows(1)
        lanes = min((each["blocks_at_once"] for each in blocks if each), default=1)
        if lanes > 1:
            rows = list(itertools.chain(*self.pieces))
            counts = [sum(row[0] == source for row in rows) for source in range(len(lengths))]
            most = min(count for count in counts if count) // FEWEST_ROWS
            if most < lanes:  # 3, 6, 12, 24, ...
                lanes = max([size for size in (3 << power for power in range(30)) if size <= most] or [max(1, most)])
            self._write_rows(lanes)

    def _write_rows(self, lanes):
        self.lanes, self.pieces = lanes, []
        counts = [0] * len(self.lengths)  # rows of each source
        starts = {-(-step // lanes): weights for step, weights in self.schedule}
        number = 0
        while True:
            if number in starts:
                sources = sequence(starts[number])
                self.pieces.append([])
            now = max(start for start in starts if start <= number)
            to_come = [weights for start, weights in starts.items() if start >= now]
            awaited = [
                count * lanes < length and any(weights[source] for weights in to_come)
                for source, (count, length) in enumerate(zip(counts, self.lengths, strict=True))
            ]
            if self.stop == "all" and not any(awaited):
                return self._cut_last_row(counts)
            source = next(sources)
            samples = self.lengths[source] - counts[source] * lanes
            if self.stop == "first" and samples < lanes:
                self.pieces[-1].append((source, counts[source], samples))
                return None
            self.pieces[-1].append((source, counts[source], lanes))
            counts[source] += 1
            number += 1

    def _cut_last_row(self, counts):
        """The epoch ends with the last sample of the last source, if that source has ended in the last row."""
        rows = self.pieces[-1] or self.pieces[-2]
        source, row, _ = rows[-1]
        if row * self.lanes < self.lengths[source] <= counts[source] * self.lanes:
            rows[-1] = (source, row, self.lengths[source] - row * self.lanes)

    def order(self, seed, epoch, *, shuffle):
        """The indices of an epoch: of the datasets one after the other."""
        key = derived(seed, epoch if shuffle else 0, 3)
        indices, first = [], 0
        for piece in self.pieces:
            for start in range(0, len(piece), WINDOW):
                indices += self._window(piece[start : start + WINDOW], first + start, key, seed, epoch, shuffle)
            first += len(piece)
        return indices

    def _window(self, rows, first, key, seed, epoch, shuffle):
        """In each lane the sources are permuted, and the rows of each source stay in turn."""
        columns = []
        for lane in range(self.lanes):
            own = [number for number, (_, _, lanes) in enumerate(rows) if lane < lanes]
            draws = {number: drawn_at((first + number) * self.lanes + lane, key) >> 4 for number in own}
            permuted = [rows[number][0] for number in sorted(own, key=lambda number: (draws[number], number))]
            left = {source: [row for row in rows if row[0] == source] for source in permuted}
            columns.append([(source, left[source].pop(0)[1] * self.lanes + lane) for source in permuted])
        steps = itertools.zip_longest(*columns)
        drawn = [cell for step in steps for cell in step if cell is not None]
        return [self._index(source, number, seed, epoch, shuffle) for source, number in drawn]

    def _index(self, source, number, seed, epoch, shuffle):
        length = self.lengths[source]
        index = number % length
        if shuffle:
            index = self._pass(source, derived(seed, source, number // length), epoch)[index]
        return sum(self.lengths[:source]) + int(index)

    def _pass(self, source, seed, epoch):
        """A random order of a source."""
        blocks, length = self.blocks[source], self.lengths[source]
        if not blocks:
            return hr.Permutation(length, seed, epoch)
        at_once = blocks["blocks_at_once"] // self.lanes * self.lanes
        options = {**blocks, "blocks_at_once": at_once, "seed": seed}
        sampler = hr.BlockShuffleSampler(length, **options, rank=0, world_size=1)
        sampler.set_epoch(epoch)
        return list(sampler)
