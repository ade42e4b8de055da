"""Samplers for shuffling, sharding across ranks, and balanced batches."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, Sampler

from headrace._base.array_types import AnyArray
from headrace._base.text import whole_number
from headrace._order.balanced import Cursor, Limit, balanced_batches, batches_of_rank
from headrace._order.samplers import BlockSampler, RankSampler
from headrace._random.permutation import Permutation
from headrace._ranks.distributed import RankChoice, ReaderShare
from headrace.errors import StateError

__all__ = [
    "BalancedBatchSampler",
    "BlockShuffleSampler",
    "ElasticSampler",
    "Permutation",
    "fit_cost",
    "quadratic",
]


class ElasticSampler(RankSampler):
    """Distribute samples to ranks, for any number of ranks.

    Position p of the order belongs to rank p mod `world_size`. So 6 ranks can continue an epoch
    that 4 ranks began. `ElasticSampler` is a subclass of torch's `DistributedSampler`: trainers
    that wrap other samplers leave it unchanged. Unlike the order of `DistributedSampler`, the order
    is a `Permutation`, which takes no memory and no time to skip. The rank need not be known before
    `iter()`.

    The sampler itself has no position. The state of the `headrace.DataLoader` holds the position.

    Args:
        dataset: the dataset to sample, or the length of the dataset.
        shuffle: whether to draw a new random order for each epoch. False: the order of the dataset.
        seed: seed of the order, together with the epoch; equal on all ranks.
        rank: rank of this sampler, from 0; by default the rank of `headrace.get_rank_info` at
            `iter()`.
        world_size: number of ranks. Give both `rank` and `world_size`, or neither.
        drop_last: whether to drop the last samples if the ranks cannot divide the samples evenly.
            False: the order wraps around, and a few samples come twice.
        exact: whether each sample comes exactly once, for evaluation. The first ranks may then get
            a sample more than the others.

    Raises:
        ValueError: a number is out of range, or both `drop_last` and `exact` are given.

    Example:
        >>> [list(ElasticSampler(10, seed=0, rank=rank, world_size=2)) for rank in range(2)]
        [[4, 9, 1, 2, 0], [5, 8, 3, 7, 6]]
    """


class BlockShuffleSampler(BlockSampler):
    """Shuffle a dataset in blocks of neighbouring samples.

    For datasets with cheap reads of neighbours (`TokenDataset`, `TarDataset.index`), where a block
    is about a single request. The sampler draws each index once in an epoch. A group is
    `blocks_at_once` blocks from all over the dataset. The order goes through the groups, and within
    a group takes a sample from each block in turn. The samples of a block come in random order.

    Without a sampler, the loader of a dataset with blocks uses an order of this kind. Give a
    `BlockShuffleSampler` for blocks of another size. Unless `prefetch_factor` is given, the loader
    prefetches `samples_ahead` samples.

    The ranks share the order as with `ElasticSampler`, and any number of ranks can continue an
    epoch. Every rank gets the same number of samples; the remainder at the end of the order is
    dropped. If the number of ranks divides `blocks_at_once`, each block is read by a single rank.
    The sampler holds the indices of a single group in memory.

    Args:
        dataset: the dataset to sample, or the length of the dataset.
        block_size: number of samples in a block.
        blocks_at_once: number of blocks in a group, over all ranks; a multiple of the number of
            ranks.
        shuffle: whether the order is random. False: the order of the dataset; several ranks still
            read the blocks of a group side by side.
        seed: seed of the order, together with the epoch; equal on all ranks.
        rank: rank of this sampler, from 0; by default the rank of `headrace.get_rank_info` at
            `iter()`.
        world_size: number of ranks. Give both `rank` and `world_size`, or neither.

    Raises:
        ValueError: a number is out of range.

    Warns:
        UserWarning: `blocks_at_once` is no multiple of the number of ranks: several ranks read the
            same blocks.

    Example:
        >>> sampler = BlockShuffleSampler(12, block_size=4, blocks_at_once=2, seed=0)
        >>> list(sampler)
        [11, 0, 10, 1, 9, 3, 8, 2, 5, 6, 4, 7]
    """


class BalancedBatchSampler(DistributedSampler[Any]):
    """Batches of similar cost across ranks and steps.

    A `batch_sampler` for map-style datasets with samples of different lengths, for training on
    concatenated samples (such as `headrace.TokenDataset` by document). The sampler divides each
    window of a random order into as few batches as `max_tokens` allows, with nearly equal numbers
    of tokens. Every rank computes the plan of all ranks, in about 1 µs per sample, and takes its
    own batch of each step. No rank communicates, and all ranks make the same number of steps. If
    samples are so long that batches differ, batches of similar cost come in the same steps.
    Lightning needs ``use_distributed_sampler=False``.

    Each sample comes once in an epoch, except in the last step. There, several ranks may share a
    batch, and a batch with fewer samples than ranks repeats samples. The number of batches differs
    between epochs, so there is no ``len()``. Give trainers a number of steps.

    The state holds the epoch, the window, and the number of batches of the window that all ranks
    have drawn. The state is equal on all ranks, and any number of ranks can continue. With a
    `headrace.DataLoader`, save the state of the loader instead.

    Args:
        lengths: number of tokens in each sample of the dataset, an integer array [N]. The array may
            be memory-mapped: the sampler copies only windows. An empty sample counts as 1 token.
        max_tokens: largest number of tokens in a batch, without padding.
        cost: function of an array with the numbers of tokens of samples, such as
            `headrace.quadratic`. Returns a positive number for each sample. Batches then have
            nearly equal costs instead of numbers of tokens. Equal on all ranks.
        limits: for any names, the amount in each sample, an integer array [N], and the largest
            amount in a batch, such as ``{"images": (images, 32)}``.
        seed: seed of the order, together with the epoch; equal on all ranks.
        window: number of samples to plan together. Balance suffers if a window has fewer than 100
            batches.
        rank: rank of this sampler, from 0; by default the rank of `headrace.get_rank_info` at
            `iter()`.
        world_size: number of ranks. Give both `rank` and `world_size`, or neither.

    Attributes:
        batch_size: estimate of the mean number of samples in a batch.

    Raises:
        StateError: at the first `next()`, if the lengths or arguments differ from the lengths or
            arguments of the saved state.
        ValueError: a sample has more than `max_tokens` tokens or exceeds a limit, an array is empty
            or has other values than whole numbers from 0, or another number is out of range. At
            `next()`: a cost is not positive.

    Example:
        >>> lengths = np.array([5, 1, 3, 2, 4, 3, 6, 2])
        >>> def of_rank(rank):
        ...     return BalancedBatchSampler(lengths, 7, seed=2, rank=rank, world_size=2)
        >>> for batches in zip(of_rank(0), of_rank(1)):
        ...     print(batches, [int(lengths[batch].sum()) for batch in batches])
        ([0, 7], [6, 1]) [7, 7]
        ([4, 3], [5, 2]) [6, 6]
    """

    def __init__(
        self,
        lengths: NDArray[np.integer] | Sequence[int],
        max_tokens: int,
        *,
        cost: Callable[[AnyArray], AnyArray] | None = None,
        limits: Mapping[str, tuple[NDArray[np.integer] | Sequence[int], int]]
        | None = None,
        seed: int = 0,
        window: int = 32_768,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        Sampler.__init__(self)  # DistributedSampler.__init__ needs a process group
        self.max_tokens = whole_number("max_tokens", max_tokens, 1)
        self.seed = whole_number("seed", seed, 0, 2**64 - 1)
        self.window = whole_number("window", window, 1)
        self.epoch = 0
        self._cost = cost
        self._lengths = np.asarray(lengths)
        self._limits = [Limit("tokens", self._lengths, self.max_tokens)]
        for name, (amounts, most) in (limits or {}).items():
            self._limits.append(
                Limit(name, np.asarray(amounts), whole_number(name, most, 1))
            )
        for limit in self._limits:
            shape, kind = limit.amounts.shape, limit.amounts.dtype
            if shape != (self._lengths.size or 1,) or kind.kind not in "iu":
                raise ValueError(
                    f"lengths must be whole numbers, at least one, and limits= as many, but "
                    f"{limit.name} are an array of type {kind} and shape {shape}"
                )
            limit.checked(limit.amounts)
        some = self._lengths[Permutation(len(self._lengths), self.seed)[:1024]]
        self.batch_size = max(1, int(self.max_tokens / max(1, some.mean())))
        self._ranks = RankChoice(rank, world_size)
        # Epoch and position of the iterator advanced last.
        self._position: tuple[int, Cursor] | None = None
        self._restored: Cursor | None = None  # start of the next iterator

    @property
    def samples_at_most(self) -> int:
        """Largest number of samples in a batch.

        Loaders number samples by this bound, equally on all ranks. So all ranks have equal states.
        """
        return self.max_tokens

    wants_epoch = True
    _shard = RankSampler._shard
    rank = RankSampler.rank
    num_replicas = RankSampler.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch.

        Loaders call this method. After `load_state_dict`, the call has no effect until the restored
        epoch begins.

        Args:
            epoch: number of the epoch, counted from 0.
        """
        if self._restored is None:
            self.epoch, self._position = operator.index(epoch), None

    def __len__(self) -> int:
        raise TypeError(
            "the number of batches is known only when all are planned: "
            "give the trainer a number of steps"
        )

    def __iter__(self) -> Iterator[list[int]]:
        # Find rank and epoch now, not at the first `next()`.
        return self._steps(self._ranks.shard(), self.epoch)

    def _steps(self, shard: ReaderShare, epoch: int) -> Iterator[list[int]]:
        # The first `next()` takes the restored position. Torch's loader calls iter() twice for an
        # epoch, and draws from a single iterator.
        cursor, self._restored = self._restored or Cursor(), None
        batches = balanced_batches(
            self._limits, self._cost, self.window, self.seed, epoch, cursor
        )
        for batch, after in batches_of_rank(batches, shard):
            self._position = epoch, after
            yield batch
        self._position = None
        if self.epoch == epoch:
            self.epoch += 1

    def state_dict(self) -> dict[str, object]:
        """Return the position after the batches drawn so far.

        After the last batch, the state is the beginning of the next epoch.

        Returns:
            A state for `load_state_dict`.
        """
        epoch, cursor = self._position or (self.epoch, self._restored or Cursor())
        return {"epoch": epoch, **cursor._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position at the next `iter()`.

        Args:
            state: a result of `state_dict`.

        Raises:
            StateError: `state` is damaged.
        """
        numbers: list[Any] = [state.get(name) for name in ("epoch", "window", "batches")]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise StateError(f"the state is damaged: {dict(state)}")
        self.epoch, window, batches = numbers
        self._position = None
        checksum = state.get("checksum")
        self._restored = None if checksum is None else Cursor(window, batches, checksum)


class quadratic(NamedTuple):
    """Cost of a sample of `L` tokens: ``a * L + b * L**2``.

    For ``BalancedBatchSampler(cost=…)``. Only the ratio of `b` to `a` matters. In a transformer,
    `b` is of the attention within documents.

    Attributes:
        a: cost of a token.
        b: cost of a pair of tokens.

    Example:
        >>> quadratic(a=1, b=0.5)(np.array([1, 2, 4]))
        array([ 1.5,  4. , 12. ])
    """

    a: float
    b: float

    def __call__(self, lengths: AnyArray) -> AnyArray:
        """Return the costs of samples."""
        return self.a * lengths + self.b * lengths**2


def fit_cost(loader: Any) -> quadratic:
    """Fit the cost of samples to measured steps.

    A step lasts from the return of `next()` to the following call, so the training loop must wait
    for the device in each step. A step of several ranks lasts as long as the slowest rank: the
    fit considers the batches of all ranks. The steps are the last 512 of the last iteration.
    Steps that took unusually long, such as steps with a checkpoint, are left out. A constant time
    of all steps is subtracted, if it can be distinguished from the time of the tokens.

    Args:
        loader: a `headrace.DataLoader` with a `BalancedBatchSampler`.

    Returns:
        The seconds of a token and of a pair of tokens. Give all ranks the same result, from the
        beginning of an epoch on.

    Raises:
        ValueError: the loader has another batch sampler, or returned fewer than 10 batches.
    """
    sampler, records = loader.batch_sampler, loader._control.counters.records(512)
    if not isinstance(sampler, BalancedBatchSampler) or len(records) < 10:
        raise ValueError(
            "fit_cost() needs 10 steps of a loader with a BalancedBatchSampler"
        )
    begun = loader._control.position.progress.begun
    ranks = begun.run.ranks
    seconds = {
        now.number: then.called - now.returned
        for now, then in itertools.pairwise(records)
    }
    whole = copy.copy(sampler)
    whole._ranks = RankChoice(0, 1)  # the batches of all ranks, in turn
    whole.load_state_dict(begun.sampler)
    steps = zip(*[iter(whole)] * ranks, strict=False)
    numbered = zip(range(begun.batches, max(seconds) + 1), steps, strict=False)
    # A step of no tokens and 0 s, for batches with equal numbers of tokens: then the constant is 0.
    # If other steps contradict, this step is left out.
    measured = [(0.0, np.array([[0.0, 0.0, 1.0]] * ranks))]
    for number, step in numbered:
        if number in seconds:
            lengths = [sampler._lengths[batch].astype(np.float64) for batch in step]
            sums = [(each.sum(), (each**2).sum(), 1.0) for each in lengths]
            measured.append((seconds[number], np.array(sums)))
    values, rows = map(np.array, zip(*measured, strict=True))
    found, kept = np.ones(3), values >= 0
    for _ in range(10):
        slowest = rows[np.arange(len(rows)), (rows @ found).argmax(axis=1)]
        found = _least_squares(slowest[kept], values[kept])
        residuals = abs(slowest @ found - values)
        kept = residuals <= 4 * np.median(residuals)
    return quadratic(*found[:2].tolist())


def _least_squares(rows: AnyArray, values: AnyArray) -> AnyArray:
    """Return the coefficients of least squares, without negative coefficients."""
    found, free = np.full(3, -1.0), np.ones(3, bool)
    while (found < 0).any():
        found = np.zeros(3)
        found[free] = np.linalg.lstsq(rows[:, free], values)[0]
        free &= found > 0
    return found
