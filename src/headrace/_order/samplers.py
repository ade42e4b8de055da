"""Samplers that can begin at any position of an epoch's order.

Positions are computed. Some samplers deal the order to the ranks.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from headrace._base.array_types import Indices, IntArray, join_indices
from headrace._base.text import warn_user, whole_number
from headrace._order.blocks import BlockOrder
from headrace._order.exclusion import (
    BaseOrder,
    Exclusion,
    Order,
    OrderWithout,
    taken,
    without,
)
from headrace._order.mixes import MixOrder, MixPlan, Source
from headrace._random.permutation import Permutation
from headrace._ranks.distributed import RankChoice, ReaderShare
from headrace._streams.kinds import Blocks, blocks_of
from headrace._streams.map_style import MixedParts

# Blocks ahead in the order of the dataset, if blocks are read as a whole. For a latency of 20 ms.
IN_ORDER = 16


Piece = range | IntArray
"""Consecutive indices of an order."""


def integers(pieces: Iterable[Piece]) -> Iterator[int]:
    """Return an iterator over the single indices of pieces."""
    # A generator that yields each index takes 1.5 times as long.
    return itertools.chain.from_iterable(
        piece if isinstance(piece, range) else piece.tolist() for piece in pieces
    )


def batches(
    pieces: Iterable[Piece], size: int, drop_last: bool
) -> Iterator[range | Indices]:
    """Divide an order into batches of `size` indices.

    The last batch may have fewer indices, or is dropped.
    """
    begun: list[Piece] = []
    missing = size
    for piece in pieces:
        start = 0
        while len(piece) - start >= missing:
            stop = start + missing
            yield join_indices([*begun, piece[start:stop]])
            start, begun, missing = stop, [], size
        if start < len(piece):
            begun.append(piece[start:])
            missing -= len(piece) - start
    if begun and not drop_last:
        yield join_indices(begun)


class CursorSampler(ABC):
    """Sampler with an order of all ranks, computed at any position.

    The cursor is the number of samples given out over all ranks in the epoch. The order does not
    depend on the number of ranks. So any number of ranks can continue at any cursor.

    Attributes:
        epoch: number of the epoch whose order is sampled next.
        drop_last: whether samples that cannot be divided evenly are dropped.
        exact: whether each sample comes once, so that ranks may differ by a sample.
        exclusions: samples to leave out; set by a loader.
    """

    wants_epoch = True
    """Loaders call `set_epoch` before each epoch."""

    epoch: int = 0
    drop_last: bool = False
    exact: bool = False
    exclusions: tuple[Exclusion, ...] = ()
    # The order computed last, and the epoch and exclusions of the order.
    _remaining: Order = range(0)
    _remaining_key: object = None

    @property
    @abstractmethod
    def epoch_size(self) -> int:
        """Number of samples in the order, over all ranks.

        Padding and exclusions do not count.
        """

    @property
    def dealt_at_once(self) -> int:
        """Number of consecutive samples of a rank before the next rank's turn."""
        return 1

    @abstractmethod
    def _order(self, epoch: int) -> BaseOrder: ...

    def order_in(self, epoch: int) -> Order:
        """Return the order of an epoch, without the excluded samples."""
        if not self.exclusions:
            return self._order(epoch)
        key = epoch, self.exclusions
        if self._remaining_key != key:
            self._remaining = without(self._order(epoch), epoch, self.exclusions)
            self._remaining_key = key
        return self._remaining

    def whole(self, epoch: int, position: int) -> int:
        """Return a remaining sample's position in the whole order."""
        order = self.order_in(epoch)
        return order.whole(position) if isinstance(order, OrderWithout) else position

    def left(self, epoch: int, position: int) -> int:
        """Return how many samples remain before a position.

        The position is a position in the whole order.
        """
        order = self.order_in(epoch)
        return order.left(position) if isinstance(order, OrderWithout) else position

    def _shard(self) -> ReaderShare:
        return ReaderShare(0, 1)

    def indices_from(self, cursor: int) -> Iterator[int]:
        """Return this rank's indices of the current epoch.

        The indices begin at the cursor, a position of all ranks. The sampler's state stays the
        same.
        """
        return integers(self.pieces_from(cursor))

    def pieces_from(self, cursor: int) -> Iterator[Piece]:
        """Return the indices of `indices_from` in pieces."""
        return self._dealt(self.order_in(self.epoch), self._shard(), cursor)

    def _dealt(self, order: Order, shard: ReaderShare, cursor: int) -> Iterator[Piece]:
        """Return the indices of a rank, from a position of all ranks on.

        The rank has the positions ``cursor + rank + j * world_size``. Every rank gets the same
        number of samples. If the samples left at the cursor do not divide evenly, some samples are
        dropped, or the order wraps around, as in torch's `DistributedSampler`. With `exact`,
        neither happens: the first ranks may have a sample more.
        """
        n, step = len(order), shard.count
        left = max(n - cursor, 0)
        rounds = left // step if self.drop_last else -(-left // step)
        first = cursor + shard.index
        if self.exact:
            rounds = len(range(first, n, step))
        positions = range(first, first + rounds * step, step)
        parts = [range(first, min(positions.stop, n), step)]
        # At most a single position is beyond the end.
        if positions and positions[-1] >= n:
            wrapped = positions[-1] % n
            parts.append(range(wrapped, wrapped + 1))
        if isinstance(order, range):
            return iter(parts)
        return itertools.chain.from_iterable(taken(order, part) for part in parts)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; loaders call this."""
        self.epoch = operator.index(epoch)

    def __iter__(self) -> Iterator[int]:
        # The rank now, not at the first `next()`.
        return self._from_beginning(self._shard())

    def _from_beginning(self, shard: ReaderShare) -> Iterator[int]:
        # The epoch starts at the first `next()`: torch's loader calls iter() twice for an epoch,
        # and draws from one of the iterators.
        yield from integers(self._dealt(self.order_in(self._start_epoch()), shard, 0))

    def _start_epoch(self) -> int:
        """Return the epoch of the iterator that starts now."""
        return self.epoch


class RankSampler(CursorSampler, DistributedSampler[int]):
    """Sampler that deals the order to the ranks.

    A process group is needed only when iteration begins.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        exact: bool = False,
    ) -> None:
        Sampler.__init__(self)  # `DistributedSampler.__init__` needs a process group
        if drop_last and exact:
            raise ValueError(
                "drop_last=True leaves out samples, and exact=True leaves out none: "
                "give one of them"
            )
        self.dataset: Any = dataset
        self.exact = bool(exact)
        self.seed = whole_number("seed", seed, 0, 2**64 - 1)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self._length = (
            operator.index(dataset)
            if isinstance(dataset, int | np.integer)
            else len(dataset)
        )
        self._ranks = RankChoice(rank, world_size)

    def _shard(self) -> ReaderShare:
        return self._ranks.shard()

    def _order(self, epoch: int) -> BaseOrder:
        return (
            Permutation(self._length, self.seed, epoch)
            if self.shuffle
            else range(self._length)
        )

    @property
    def epoch_size(self) -> int:
        """Number of samples of an epoch of all ranks, without padding."""
        return self._length

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Rank whose part is sampled."""
        return self._shard().index

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Number of ranks."""
        return self._shard().count

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Number of samples of each rank in a whole epoch."""
        shard = self._shard()
        length = len(self.order_in(self.epoch)) if self.exclusions else self._length
        if self.exact:
            return len(range(shard.index, length, shard.count))
        return length // shard.count if self.drop_last else -(-length // shard.count)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Number of samples of all ranks in a whole epoch."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples


class BlockSampler(RankSampler):
    """Sampler of blocks of neighbours, some of them side by side.

    The blocks come in random order, or in the order of the dataset. In the order of the dataset,
    several ranks read blocks side by side, and a single rank reads sample by sample.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        block_size: int,
        blocks_at_once: int = 64,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            dataset,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=True,
        )
        self.block_size = whole_number("block_size", block_size, 1)
        self.blocks_at_once = whole_number("blocks_at_once", blocks_at_once, 1)
        self._blocks = Blocks(self.block_size, self.blocks_at_once)
        self._warned = False

    @classmethod
    def of(cls, blocks: Blocks, dataset: Sized, **options: Any) -> BlockSampler:
        """Return the sampler of a dataset with `blocks`."""
        made = cls(
            dataset, block_size=blocks.size, blocks_at_once=blocks.at_once, **options
        )
        made._blocks = blocks
        return made

    @property
    def blocks(self) -> str:
        """Checksum of blocks of different sizes; empty if all sizes are equal."""
        return self._blocks.content

    @property
    def samples_ahead(self) -> int:
        """Number of samples of a rank in two groups of blocks.

        A group is delivered while the next group is read. If blocks are read as a whole, the number
        is smaller.
        """
        ahead = self._blocks.ahead or 2 * self.blocks_at_once
        if self.order_of == "samples" and self._blocks.ahead:
            ahead = min(ahead, IN_ORDER)
        return min(-(-ahead * self.block_size // self.num_replicas), self._length)

    @property
    def order_of(self) -> str:
        """Unit of the order: blocks or samples.

        An order of blocks cannot continue an order of samples.
        """
        return "blocks" if self.shuffle or self.num_replicas > 1 else "samples"

    def groups_in(self, epoch: int) -> Callable[[int], int] | None:
        """Return a function from a position of an epoch to the group of blocks.

        None in the order of the dataset.
        """
        order = self._order(epoch)
        if not isinstance(order, BlockOrder):
            return None
        return lambda position: order.group_at(self.whole(epoch, position))

    def _order(self, epoch: int) -> BaseOrder:
        ranks = self._shard().count
        if self.order_of == "samples":
            return range(self._length)
        if self.blocks_at_once % ranks and not self._warned:
            self._warned = True
            warn_user(
                f"blocks_at_once={self.blocks_at_once} is no multiple of {ranks} ranks: several "
                f"ranks read each block. The order is right, but more is read. Give the loader "
                f"sampler=headrace.BlockShuffleSampler(...) with blocks_at_once= a multiple of "
                f"the numbers of ranks."
            )
        return BlockOrder(
            self._length,
            self.block_size,
            self.blocks_at_once,
            self.seed,
            epoch,
            shuffle=self.shuffle,
            borders=self._blocks.borders,
        )


class MixSampler(RankSampler):
    """Sampler of a mix, dealt to the ranks.

    Samples that cannot be divided evenly among the ranks are dropped.

    Attributes:
        order_of: sources, weights and end of the mix; in the loader's state.
    """

    def __init__(
        self, dataset: Sized, mix: MixedParts, *, shuffle: bool, seed: int
    ) -> None:
        seed = seed if mix.seed is None else mix.seed
        super().__init__(dataset, shuffle=shuffle, seed=seed, drop_last=True)
        sources = []
        for name, source in zip(mix.names, mix.sources, strict=True):
            sources.append(
                Source(name, len(source), blocks_of(source) if shuffle else None)
            )
        self._plan = MixPlan(sources, mix.schedule, mix.stop)
        self._length = self._plan.length
        shown = [
            (each.name, each.length, each.blocks and each.blocks.shown)
            for each in sources
        ]
        self.order_of = f"mix of {shown}, {mix.schedule}, stop={mix.stop!r}"

    @property
    def samples_ahead(self) -> int:
        """Number of samples of a rank in two groups of blocks of each source.

        0 without blocks.
        """
        samples = sum(
            source.blocks.samples for source in self._plan.sources if source.blocks
        )
        return min(-(-2 * samples // self.num_replicas), self._length)

    def _order(self, epoch: int) -> MixOrder:
        return MixOrder(self._plan, self.seed, epoch, self.shuffle)


class SeededRandomSampler(CursorSampler, RandomSampler):
    """Random order that depends only on the seed and the epoch.

    The order is the same in headrace's loader and in any other loader.
    """

    def __init__(self, data_source: Sized, *, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed

    @property
    def epoch_size(self) -> int:
        """Number of samples."""
        return len(self.data_source)

    def __len__(self) -> int:
        return len(self.order_in(self.epoch)) if self.exclusions else super().__len__()

    def _order(self, epoch: int) -> Permutation:
        return Permutation(self.epoch_size, self.seed, epoch)

    def _start_epoch(self) -> int:
        # Each iteration is the next epoch, unless `set_epoch` is called.
        self.epoch += 1
        return self.epoch - 1


def own_sampler(
    source: Any, dataset: Sized, *, shuffle: bool, seed: int
) -> RankSampler | None:
    """Return the sampler for a mix or a dataset with blocks, or None."""
    if isinstance(source, MixedParts):
        return MixSampler(dataset, source, shuffle=shuffle, seed=seed)
    blocks = blocks_of(source)
    if blocks is None:
        return None
    return BlockSampler.of(blocks, dataset, shuffle=shuffle, seed=seed)


def check_mixed(source: object, *given: Any) -> None:
    """Warn if a given sampler or generator replaces the order of a mix.

    Trainers replace samplers in this way. Only samplers and generators of torch and headrace are
    checked.
    """
    for each in given:
        kind = type(getattr(each, "sampler", each))
        if kind.__module__.startswith(("torch", "headrace.samplers")) and isinstance(
            source, MixedParts
        ):
            warn_user(
                f"with a {kind.__name__} a mix is the concatenation of its datasets, and "
                f"its weights have no effect: leave out sampler=, batch_sampler= and generator="
            )
