"""Streams of batches limited by a budget of tokens, with buckets of similar lengths."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from headrace._core.interface.compositions import require_stream
from headrace._core.interface.iterable_style import AsyncIterableDataset
from headrace._core.interface.iterators import StreamIterator
from headrace._core.interface.reprs import dataset_repr
from headrace._core.interface.traversal import propagate_epoch

__all__ = ["batch_by_tokens"]


def batch_by_tokens(
    dataset: Any,
    max_tokens: int,
    *,
    length: Callable[[Any], int] = len,
    boundaries: Sequence[int] = (),
    padded: bool = True,
    drop_last: bool = False,
) -> AsyncIterableDataset[list[Any]]:
    """A stream of lists of samples, each as many as fit a budget of tokens; read it with ``batch_size=None``.

    ``DataLoader(batch_by_tokens(stream, 4096), batch_size=None, transform=…, collate_fn=…)``: both functions get the
    list. Over ranks, `split` the result: then every rank gets the same number of batches.

    Args:
        dataset: the stream.
        max_tokens: budget of a batch, in tokens.
        length: returns the number of tokens of a sample. It runs on the loop that reads the stream: keep it cheap.
        boundaries: ascending bounds of buckets, in tokens: samples of up to ``boundaries[0]`` tokens are batched
            together, then those of up to ``boundaries[1]``, …, and the longer ones.
        padded: whether each sample counts as long as the longest of its batch, to which it will be padded.
        drop_last: whether to drop the incomplete batch of each bucket at the end.

    Raises:
        ValueError: `max_tokens` is not positive, or `boundaries` do not ascend; at a sample that alone exceeds the
            budget.
        TypeError: `dataset` is not an async stream.

    Example:
        >>> from headrace import from_async_iterable
        >>> async def words():
        ...     for word in ("a", "bb", "cc", "dddd", "e"): yield word
        >>> list(batch_by_tokens(from_async_iterable(words), 4))
        [['a', 'bb'], ['cc'], ['dddd'], ['e']]
        >>> list(batch_by_tokens(from_async_iterable(words), 4, boundaries=[1, 2]))
        [['a', 'e'], ['bb', 'cc'], ['dddd']]
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if any(a >= b for a, b in itertools.pairwise(boundaries)):
        raise ValueError(f"boundaries={list(boundaries)} must ascend")
    stream = require_stream(dataset, "batch_by_tokens() is for streams, but got a map-style dataset")
    return _TokenBatches(stream, max_tokens, length, tuple(boundaries), padded, drop_last)


class _TokenBatches(AsyncIterableDataset[list[Any]]):
    wants_epoch = True

    def __init__(self, dataset: Any, *options: Any) -> None:
        self._dataset = dataset
        self._options = options

    def set_epoch(self, epoch: int) -> None:
        propagate_epoch(self._dataset, epoch)

    def __repr__(self) -> str:
        return f"batch_by_tokens({dataset_repr(self._dataset)}, {self._options[0]})"

    def __aiter__(self) -> AsyncIterator[list[Any]]:
        return _TokenBatchIterator(aiter(self._dataset), *self._options)


class _Bucket:
    """Samples of similar length, until their batch is full."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.longest = 0
        self.tokens = 0

    def cost_with(self, tokens: int, *, padded: bool) -> int:
        if padded:
            return max(self.longest, tokens) * (len(self.samples) + 1)
        return self.tokens + tokens

    def add(self, sample: Any, tokens: int) -> None:
        self.samples.append(sample)
        self.longest = max(self.longest, tokens)
        self.tokens += tokens


class _TokenBatchIterator(StreamIterator):
    def __init__(
        self,
        inner: AsyncIterator[Any],
        max_tokens: int,
        length: Callable[[Any], int],
        boundaries: tuple[int, ...],
        padded: bool,
        drop_last: bool,
    ) -> None:
        super().__init__(inner)
        self._max_tokens = max_tokens
        self._tokens_of = length
        self._boundaries = boundaries
        self._padded = padded
        self._drop_last = drop_last
        self._buckets = [_Bucket() for _ in range(len(boundaries) + 1)]
        self._ended = False

    async def __anext__(self) -> list[Any]:
        while not self._ended:
            try:
                sample = await anext(self._inner)
            except StopAsyncIteration:
                self._ended = True
                break
            full = self._put(sample)
            if full is not None:
                return full
        if not self._drop_last:
            for number, bucket in enumerate(self._buckets):
                if bucket.samples:
                    self._buckets[number] = _Bucket()
                    return bucket.samples
        raise StopAsyncIteration

    def _put(self, sample: Any) -> list[Any] | None:
        """Add a sample; returns the batch that is full without it."""
        tokens = self._tokens_of(sample)
        if tokens > self._max_tokens:
            raise ValueError(f"a sample of {tokens} tokens is over max_tokens={self._max_tokens}; cut it")
        number = bisect.bisect_left(self._boundaries, tokens)
        bucket = self._buckets[number]
        full = None
        if bucket.samples and bucket.cost_with(tokens, padded=self._padded) > self._max_tokens:
            full = bucket.samples
            bucket = self._buckets[number] = _Bucket()
        bucket.add(sample, tokens)
        return full
