"""Batches of samples by a budget of tokens."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any

from headrace._base.text import whole_number
from headrace._streams.iterable_style import AsyncIterableDataset, OperatedStream
from headrace._streams.resumable import NOTHING, MarkingOperation
from headrace._streams.torch_views import require_async
from headrace.errors import StateError


def batch_by_tokens(
    dataset: object,
    max_tokens: int,
    *,
    length: Callable[[Any], int] = len,
    boundaries: Sequence[int] = (),
    padded: bool = True,
    drop_last: bool = False,
) -> AsyncIterableDataset[list[Any]]:
    """Batch the samples of a stream by tokens.

    The result is a stream of lists of samples. Read the stream with ``batch_size=None``:
    ``DataLoader(batch_by_tokens(stream, 4096), batch_size=None, transform=…, collate_fn=…)``. Both
    functions get the list.

    On several ranks, call `split` on the result: then every rank gets the same number of batches.
    After a restore, samples are read again from the oldest sample still waiting in a bucket.

    Args:
        dataset: the stream.
        max_tokens: budget of a batch, in tokens.
        length: returns the number of tokens of a sample, an int. The function runs on the loop that
            reads the stream: keep the function cheap. An empty sample counts as one token of the
            budget.
        boundaries: upper bounds of buckets, in tokens, ascending. Samples of up to
            ``boundaries[0]`` tokens are batched together, then samples of up to ``boundaries[1]``,
            and so on. Longer samples share the last bucket.
        padded: count each sample as long as the longest sample of its batch, for batches that are
            padded.
        drop_last: drop the incomplete batch of each bucket at the end.

    Raises:
        ValueError: `max_tokens` is not positive, or `boundaries` do not ascend. While reading: a
            sample alone exceeds the budget, or has a negative length.
        TypeError: `dataset` is not an async stream, or a number is not an int. While reading: a
            sample's length is not an int.

    Example:
        >>> from headrace import from_async_iterable
        >>> async def words():
        ...     for word in ("a", "bb", "cc", "dddd", "e"): yield word
        >>> list(batch_by_tokens(from_async_iterable(words), 4))
        [['a', 'bb'], ['cc'], ['dddd'], ['e']]
        >>> list(batch_by_tokens(from_async_iterable(words), 4, boundaries=[1, 2]))
        [['a', 'e'], ['bb', 'cc'], ['dddd']]
    """
    max_tokens = whole_number("max_tokens", max_tokens, 1)
    bounds = [whole_number("boundaries", bound) for bound in boundaries]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"boundaries={bounds} must ascend")
    (stream,), is_stream = require_async([dataset])
    if not is_stream:
        raise TypeError("batch_by_tokens() is for streams, but got a map-style dataset")
    return OperatedStream(
        stream,
        f"batch_by_tokens({{}}, {max_tokens})",
        _TokenBatchIterator,
        max_tokens=max_tokens,
        length=length,
        boundaries=bounds,
        padded=bool(padded),
        drop_last=drop_last,
    )


class _TokenBatchIterator(MarkingOperation[list[object]]):
    """Iterator of batches of samples of similar length.

    Each bucket collects samples until its batch is full. A mark has the numbers of samples and
    tokens in each bucket. The samples are unknown after a restore, until the stream is read again.
    """

    operation = "batch_by_tokens"
    ranks_differ = True
    options = ("max_tokens", "padded", "boundaries")
    fields = ("counts", "longest", "tokens", "ended")

    def __init__(
        self,
        source: AsyncIterable[object],
        max_tokens: int,
        length: Callable[[Any], int],
        boundaries: Sequence[int],
        padded: bool,
        drop_last: bool,
    ) -> None:
        super().__init__(source)
        self._max_tokens = max_tokens
        self._tokens_of = length
        self._boundaries = boundaries
        self._padded = padded
        self._drop_last = drop_last
        buckets = len(boundaries) + 1
        self._samples: list[list[object]] = [[] for _ in range(buckets)]
        # Samples, including samples from before a restored position.
        self._counts = [0] * buckets
        self._longest = [0] * buckets  # tokens
        self._tokens = [0] * buckets
        self._first = [0] * buckets  # number of the read that gave the first sample

    def _put(self, sample: object) -> Any:
        tokens = whole_number("length(sample)", self._tokens_of(sample))
        if tokens > self._max_tokens:
            raise ValueError(
                f"a sample of {tokens} tokens is over max_tokens={self._max_tokens}; cut it"
            )
        bucket = bisect.bisect_left(self._boundaries, tokens)
        tokens = max(1, tokens)  # with 0, no number of empty samples would fill a batch
        padded = max(self._longest[bucket], tokens) * (self._counts[bucket] + 1)
        over = (
            padded if self._padded else self._tokens[bucket] + tokens
        ) > self._max_tokens
        full = self._emptied(bucket) if over and self._counts[bucket] else NOTHING
        if not self._counts[bucket]:
            self._first[bucket] = self._read - 1
        self._samples[bucket].append(sample)
        self._counts[bucket] += 1
        self._longest[bucket] = max(self._longest[bucket], tokens)
        self._tokens[bucket] += tokens
        return full

    async def _rest(self) -> list[object]:
        for bucket, count in enumerate(self._counts):
            if count and not self._drop_last:
                return self._emptied(bucket)
        raise StopAsyncIteration

    def _emptied(self, bucket: int) -> list[object]:
        samples, count = self._samples[bucket], self._counts[bucket]
        self._samples[bucket] = []
        self._counts[bucket] = self._longest[bucket] = self._tokens[bucket] = 0
        if count > len(samples) and not self._reread.left:
            raise StateError(
                "a bucket has samples of before the position that was restored: "
                "the stream has other samples now, or the state is damaged"
            )
        return samples

    def _oldest(self) -> int:
        held = (
            first for first, count in zip(self._first, self._counts, strict=True) if count
        )
        return min(held, default=self._read)
