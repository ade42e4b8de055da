"""Test classes for the requirements of headrace on datasets.

Subclass `DatasetContract` or `StreamContract`, define `make_dataset`, and run pytest. Checks for
optional methods are skipped with a reason if the dataset has no such method.

Example::

    from headrace.testing import DatasetContract

    class TestMyDataset(DatasetContract):
        def make_dataset(self):
            return MyDataset("s3://bucket/train")
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch

from headrace._eventloop.loop_thread import new_event_loop
from headrace._streams.kinds import capabilities

__all__ = ["DatasetContract", "StreamContract", "same"]

T = TypeVar("T")

# The default of a loader, and more than the connection pools of most clients have.
CONCURRENCY = 64
_ARRAYS: Any = ((torch.Tensor, torch.equal), (np.ndarray, np.array_equal))


def same(left: object, right: object) -> bool:
    """Whether two samples are equal.

    Tensors, arrays and buffers are compared by content, also within tuples, lists and dicts.

    Args:
        left: a sample.
        right: another sample.

    Example:
        >>> same((torch.ones(2), memoryview(b"a")), (torch.ones(2), memoryview(b"a")))
        True
    """
    for kind, equal in _ARRAYS:
        if isinstance(left, kind):
            alike = isinstance(right, kind) and left.dtype == right.dtype
            return alike and bool(equal(left, right))
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, tuple | list):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(map(same, left, right))
        )
    return bool(left == right)


def _run(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine on an event loop as in a loader."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


class _Contract:
    def make_dataset(self) -> Any:
        """Return a new, small dataset with at least one sample."""
        raise NotImplementedError(f"{type(self).__name__} must define make_dataset(self)")

    def equal(self, left: Any, right: Any) -> bool:
        """Whether two samples are equal; override for random samples."""
        return same(left, right)

    def _skip_without(self, dataset: object, method: str) -> None:
        import pytest  # not needed to import headrace.testing

        if not hasattr(dataset, method):
            pytest.skip(
                f"the dataset has no {method}; headrace's loader does not need it"
            )


class DatasetContract(_Contract):
    """Tests of an async map-style dataset.

    Subclass `DatasetContract` and define `make_dataset`; see the example of this module.
    """

    def indices(self, dataset: Any) -> Sequence[int]:
        """Return the indices to try: first eight, and last."""
        return sorted({*range(min(len(dataset), 8)), len(dataset) - 1})

    def test_length_is_constant(self) -> None:
        """The length of the dataset never changes.

        Samplers read the length once. A change would lose samples or index past the end.
        """
        dataset = self.make_dataset()
        length = len(dataset)
        assert length > 0, (
            "make_dataset() gave an empty dataset; the contract needs a sample"
        )
        _run(dataset.aget(0))
        assert len(dataset) == length, (
            f"the length changed from {length} to {len(dataset)} after a fetch"
        )

    def test_same_index_gives_same_sample(self) -> None:
        """Two fetches of an index give equal samples.

        Resumed epochs and retries fetch samples again.
        """
        dataset = self.make_dataset()
        self._assert_same_samples(
            dataset, lambda index: _run(dataset.aget(index)), "another aget"
        )

    def test_indexing_equals_aget(self) -> None:
        """Synchronous indexing gives the same samples as `aget`.

        Torch's loader uses the synchronous interface.
        """
        dataset = self.make_dataset()
        self._skip_without(dataset, "__getitem__")
        self._assert_same_samples(dataset, dataset.__getitem__, "indexing")

    def test_agets_equals_aget_in_order(self) -> None:
        """`agets` gives the same samples as `aget`, in order.

        A loader fetches whole batches with `agets`, if the dataset defines `agets`.
        """
        dataset = self.make_dataset()
        self._skip_without(dataset if capabilities(dataset).agets else None, "agets")
        indices = list(self.indices(dataset))[::-1]
        together = list(_run(dataset.agets(indices)))
        assert len(together) == len(indices), (
            f"agets of {len(indices)} indices gave {len(together)} samples"
        )
        samples = dict(zip(indices, together, strict=True))
        self._assert_same_samples(dataset, samples.__getitem__, "agets")

    def test_pickled_copy_gives_same_samples(self) -> None:
        """A pickled copy of the dataset gives the same samples.

        A loader pickles the dataset to fetch in another process.
        """
        dataset = self.make_dataset()
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
        assert len(copy) == len(dataset), (
            f"the copy has {len(copy)} samples, the original {len(dataset)}"
        )
        self._assert_same_samples(
            dataset, lambda index: _run(copy.aget(index)), "a pickled copy"
        )

    def test_concurrent_fetches_are_independent(self) -> None:
        """Concurrent fetches give the same samples as single fetches.

        A loader keeps hundreds of `aget` calls in flight on a single event loop.
        """
        dataset = self.make_dataset()
        chosen = self.indices(dataset)
        alone = {index: _run(dataset.aget(index)) for index in chosen}
        many = [chosen[i % len(chosen)] for i in range(max(CONCURRENCY, len(chosen)))]

        async def fetch() -> list[Any]:
            return await asyncio.gather(*(dataset.aget(index) for index in many))

        together = zip(many, _run(fetch()), strict=True)
        wrong = [
            index for index, sample in together if not self.equal(sample, alone[index])
        ]
        assert not wrong, f"concurrent fetches gave other samples for the indices {wrong}"

    def test_index_past_the_end_raises(self) -> None:
        """An index past the end raises IndexError.

        Python's own iteration ends with IndexError. A wrong index of a sampler must not stay
        unnoticed.
        """
        dataset = self.make_dataset()
        try:
            sample = _run(dataset.aget(len(dataset)))
        except LookupError:
            return
        raise AssertionError(
            f"aget({len(dataset)}) gave {sample!r} instead of an IndexError"
        )

    def _assert_same_samples(
        self, dataset: Any, fetch: Callable[[int], Any], which: str
    ) -> None:
        for index in self.indices(dataset):
            alone, sample = _run(dataset.aget(index)), fetch(index)
            assert self.equal(sample, alone), (
                f"{which} gave {sample!r} for index {index}, aget {alone!r}"
            )


class StreamContract(_Contract):
    """Tests of an async stream.

    Subclass `StreamContract` and define `make_dataset`. The stream must be finite.
    """

    def test_two_passes_give_same_stream(self) -> None:
        """Two passes give the same samples.

        Each epoch reads the whole stream.
        """
        dataset = self.make_dataset()
        first, second = _run(_collect(dataset)), _run(_collect(dataset))
        assert first, "make_dataset() gave an empty stream; the contract needs a sample"
        self._assert_same_stream(first, second, "the second pass")

    def test_concurrent_passes_are_independent(self) -> None:
        """Two concurrent passes give the samples of a single pass.

        A program may read two iterators of a loader at the same time.
        """
        dataset = self.make_dataset()
        alone = _run(_collect(dataset))

        async def alternate() -> tuple[list[object], list[object]]:
            left: list[object] = []
            right: list[object] = []
            other = aiter(dataset)
            async for sample in dataset:
                left.append(sample)
                right.append(await anext(other))
            return left, right

        for stream in _run(alternate()):
            self._assert_same_stream(alone, stream, "a concurrent pass")

    def test_sync_iteration_equals_async(self) -> None:
        """Synchronous iteration gives the same samples as `async for`.

        Torch's loader uses the synchronous interface.
        """
        dataset = self.make_dataset()
        self._skip_without(dataset, "__iter__")
        self._assert_same_stream(
            _run(_collect(dataset)), list(dataset), "synchronous iteration"
        )

    def test_pickled_copy_gives_same_stream(self) -> None:
        """A pickled copy of the stream gives the same samples.

        A loader pickles the dataset to fetch in another process.
        """
        dataset = self.make_dataset()
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
        self._assert_same_stream(
            _run(_collect(dataset)), _run(_collect(copy)), "the copy"
        )

    def _assert_same_stream(
        self, expected: list[object], stream: list[object], which: str
    ) -> None:
        assert len(stream) == len(expected), (
            f"{which} gave {len(stream)} samples, {len(expected)} were expected"
        )
        for number, (left, right) in enumerate(zip(expected, stream, strict=True)):
            assert self.equal(left, right), (
                f"sample {number} of {which} is {right!r}, {left!r} was expected"
            )


async def _collect(dataset: Any) -> list[Any]:
    return [sample async for sample in dataset]
