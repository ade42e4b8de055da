"""Samplers that fit how a dataset is read."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, Sampler

from headrace._core.order.balanced import Cursor, balanced_batches, of_rank
from headrace._core.order.samplers import BlockSampler, RankSampler
from headrace._core.permutation import Permutation
from headrace._core.ranks.distributed import RankChoice, ShardOptions
from headrace.errors import StateError

__all__ = ["BalancedBatchSampler", "BlockShuffleSampler", "ElasticSampler", "Permutation"]


class ElasticSampler(RankSampler):
    """Deals a dataset to the ranks sample by sample, so that any number of ranks can continue an epoch.

    As torch's `DistributedSampler`, of which it is a subclass: trainers that wrap other samplers
    leave it unchanged. But the order is a `Permutation`, which takes no memory and no time to skip,
    the rank may be found at `iter()`, and an epoch that 4 ranks began can be continued by 6:
    position p of the order belongs to rank p mod `world_size`.

    The position is in the state of a `headrace.DataLoader`; the sampler has none of its own.

    Args:
        dataset: the dataset to sample, or its length.
        shuffle: whether the order is random, another one in each epoch; else it is that of the
            dataset.
        seed: of the order, with the epoch; the same on all ranks.
        rank: the rank whose part is drawn; by default that of `headrace.get_rank_info` at `iter()`.
        world_size: number of ranks.
        drop_last: whether the last samples are dropped if they cannot be divided evenly; else the
            order wraps around, and a few samples come twice.
        exact: for evaluation: each sample comes once, so that the first ranks may have one sample
            more.

    Raises:
        ValueError: a number is out of range, or `drop_last` and `exact` are both given.

    Example:
        >>> [list(ElasticSampler(10, seed=0, rank=rank, world_size=2)) for rank in range(2)]
        [[4, 9, 1, 2, 0], [5, 8, 3, 7, 6]]
    """


class BlockShuffleSampler(BlockSampler):
    """A random order with locality: blocks of neighbours are shuffled, and a few blocks are read side by side.

    For datasets of which a loader reads neighbours by one request (`TokenDataset`,
    `TarDataset.index`): a block is about one request. Each index is drawn once in an epoch. The
    order is that of groups of `blocks_at_once` blocks from all over the dataset: it takes one
    sample of each block of the group in turn, and those of a block in random order. A loader of
    such a dataset without a sampler has an order of this kind; give this sampler for blocks of
    other sizes. Unless `prefetch_factor` is given, the loader of such a dataset prefetches
    `samples_ahead` samples.

    It deals this order to the ranks as `ElasticSampler` does; any number of them can continue an
    epoch. If their number divides `blocks_at_once`, each block is read by one rank alone. The
    memory is that of the indices of one group.

    Args:
        dataset: the dataset to sample, or its length.
        block_size: number of neighbours in a block.
        blocks_at_once: number of blocks that are read side by side, by all ranks together; a
            multiple of the number of ranks.
        shuffle: whether the order is random; else it is that of the dataset, on several ranks with
            blocks side by side.
        seed: of the order, with the epoch; the same on all ranks.
        rank: the rank whose part is drawn; by default that of `headrace.get_rank_info` at `iter()`.
            Every rank gets the same number of samples; those at the end of the order that cannot be
            divided are dropped.
        world_size: number of ranks.

    Raises:
        ValueError: a number is out of range.

    Warns:
        UserWarning: `blocks_at_once` is no multiple of the number of ranks, so that several ranks
        read the same blocks.

    Example:
        >>> sampler = BlockShuffleSampler(12, block_size=4, blocks_at_once=2, seed=0)
        >>> list(sampler)
        [11, 0, 10, 1, 9, 3, 8, 2, 5, 6, 4, 7]
    """


class BalancedBatchSampler(DistributedSampler[Any]):
    """Batches of samples of different lengths, with about the same number of tokens for each rank and step.

    A `batch_sampler` for map-style datasets whose samples are concatenated (`headrace.TokenDataset`
    by document). Each window of a random order is divided into as few batches as hold its tokens,
    of nearly equal numbers. Every rank computes the plan of all, in about 1 µs a sample, and takes
    its part of each step: no rank communicates, and all make the same number of steps. Lightning
    needs ``use_distributed_sampler=False``.

    Each sample comes once in an epoch, but for the last step, where a batch with fewer samples than
    the ranks that share it repeats some. The number of batches is another one in each epoch: there
    is no ``len()``. Give trainers a number of steps.

    The state is the epoch, the window and the number of its batches that were given out, by all
    ranks. It is the same on every rank, and any number of ranks can continue. With a
    `headrace.DataLoader`, save that of the loader instead.

    Args:
        lengths: number of tokens of each sample of the dataset, as an array, which may be
            memory-mapped: nothing of its size is made. An empty sample counts as 1.
        max_tokens: the most tokens of a batch, without padding.
        seed: of the order, with the epoch; the same on all ranks.
        window: number of samples that are planned together. Fewer than 100 batches in it are less
            balanced.
        rank: the rank whose part is drawn; by default that of `headrace.get_rank_info` at `iter()`.
        world_size: number of ranks.

    Attributes:
        batch_size: the mean number of samples in a batch, as estimated.

    Raises:
        StateError: at the first `next()`: the lengths or arguments are not those that the state was
            saved with.
        ValueError: a sample has more than `max_tokens`, `lengths` are no whole numbers from 0 on,
            there are none, or another number is out of range.

    Example:
        >>> lengths = np.array([5, 1, 3, 2, 4, 3, 6, 2])
        >>> two = [BalancedBatchSampler(lengths, 7, seed=0, rank=rank, world_size=2) for rank in range(2)]
        >>> for batches in zip(*two): print(batches, [int(lengths[batch].sum()) for batch in batches])
        ([2, 5], [4, 3]) [6, 6]
        ([6, 1], [0, 7]) [7, 7]
    """

    def __init__(
        self,
        lengths: NDArray[np.integer] | Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        window: int = 32_768,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        Sampler.__init__(self)  # DistributedSampler's needs a process group
        max_tokens, seed, window = map(operator.index, (max_tokens, seed, window))
        self._lengths = np.asarray(lengths)
        if (
            self._lengths.ndim != 1
            or self._lengths.dtype.kind not in "iu"
            or not self._lengths.size
        ):
            raise ValueError(
                f"lengths must be whole numbers, at least one, but got an array of type {self._lengths.dtype} and "
                f"shape {self._lengths.shape}"
            )
        if (
            self._lengths.min() < 0 or self._lengths.max() > max_tokens
        ):  # argmin and argmax copy a read-only array
            index = int(
                self._lengths.argmin() if self._lengths.min() < 0 else self._lengths.argmax()
            )
            what = f"sample {index} has {self._lengths[index]} tokens, which must be 0 to max_tokens={max_tokens}"
            raise ValueError(f"{what}: leave it out, or divide it")
        if max_tokens < 1 or window < 1:
            raise ValueError(f"max_tokens={max_tokens} and window={window} must be at least 1")
        self.max_tokens, self.window, self.seed, self.epoch = max_tokens, window, seed, 0
        some = self._lengths[Permutation(len(self._lengths), seed, 0)[:1024]]
        self.batch_size = max(1, int(max_tokens / max(1, some.mean())))
        self._ranks = RankChoice(rank, world_size)
        self._position: tuple[int, Cursor] | None = None  # of the iterator that was advanced last
        self._restored: Cursor | None = None  # at which the next iterator begins

    @property
    def samples_at_most(self) -> int:
        """The most samples of a batch: by it a loader numbers samples alike on all ranks, which so have one state."""
        return self.max_tokens

    _shard, rank, num_replicas, wants_epoch = (
        RankSampler._shard,
        RankSampler.rank,
        RankSampler.num_replicas,
        True,
    )

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; loaders call this. Without effect between a restore and its epoch."""
        if self._restored is None:
            self.epoch, self._position = operator.index(epoch), None

    def __len__(self) -> int:
        raise TypeError(
            "the number of batches is known only when all are planned: give the trainer a number of steps"
        )

    def __iter__(self) -> Iterator[list[int]]:
        return self._steps(self._ranks.shard())  # the rank now, not at the first `next()`

    def _steps(self, shard: ShardOptions) -> Iterator[list[int]]:
        # Now, at the first `next()`: torch's loader calls iter() twice for an epoch, and draws from
        # one of the two.
        epoch, cursor, self._restored = self.epoch, self._restored or Cursor(), None
        batches = balanced_batches(
            self._lengths, self.max_tokens, self.window, self.seed, epoch, cursor
        )
        for batch, after in of_rank(batches, shard):
            self._position = epoch, after
            yield batch
        self._position = None
        if self.epoch == epoch:
            self.epoch += 1

    def state_dict(self) -> dict[str, object]:
        """The epoch and the position after the batches drawn so far; after the last one, those of the next epoch."""
        epoch, cursor = self._position or (self.epoch, self._restored or Cursor())
        return {"epoch": epoch, **cursor._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next iterator begins after its batches.

        Raises:
            StateError: `state` is not one of `state_dict`.
        """
        values: list[Any] = [state.get(name) for name in ("epoch", "window", "batches", "checksum")]
        epoch, window, batches, checksum = values
        whole = all(type(number) is int and number >= 0 for number in (epoch, window, batches))
        if not whole or window >= max(1, len(self._lengths) // self.window):
            raise StateError(
                f"the state is damaged, or of other lengths: {window=}, {batches=} of {epoch=}"
            )
        self.epoch = epoch
        self._position = None
        self._restored = None if checksum is None else Cursor(window, batches, checksum)
