"""What headrace relies on in a dataset, as tests to inherit: subclass, say how to make one, run pytest.

Example::

    from headrace.testing import DatasetContract

    class TestMyDataset(DatasetContract):
        def make_dataset(self):
            return MyDataset("s3://bucket/train")
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch

from headrace._core.interface.kinds import capabilities

__all__ = ["DatasetContract", "StreamContract", "same"]

T = TypeVar("T")

AT_ONCE = 64  # fetches in flight: what a loader has by default, and more than most clients' pools of connections
_LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def same(left: Any, right: Any) -> bool:
    """Whether two samples are equal: by content for tensors, arrays and buffers, and within tuples, lists and dicts.

    Example:
        >>> same((torch.ones(2), memoryview(b"a")), (torch.ones(2), memoryview(b"a")))
        True
    """
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, tuple | list):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    return bool(left == right)


def _loop_factories() -> Iterator[_LoopFactory]:
    """Every event loop that a loader may run a dataset on: asyncio's, and uvloop where there is one."""
    yield asyncio.new_event_loop
    if sys.platform != "win32":
        import uvloop

        yield uvloop.new_event_loop


def _run(coroutine: Coroutine[Any, Any, T], factory: _LoopFactory = asyncio.new_event_loop) -> T:
    """Run `coroutine` on a new loop, as a loader runs a dataset's methods."""
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(coroutine)


class DatasetContract:
    """What a loader relies on in an async map-style dataset. Subclass it and define `make_dataset`.

    A dataset whose samples are random by design overrides `equal`.

    Example:
        >>> from headrace.testing import SlowDataset
        >>> class TestSlowDataset(DatasetContract):
        ...     def make_dataset(self): return SlowDataset(5, 0.0)
        >>> TestSlowDataset().test_the_same_index_gives_the_same_sample()
    """

    def make_dataset(self) -> Any:
        """A new dataset, with at least one sample; it need not be large."""
        raise NotImplementedError("a subclass of DatasetContract must define make_dataset(self)")

    def equal(self, left: Any, right: Any) -> bool:
        """Whether two samples count as the same one."""
        return same(left, right)

    def indices(self, dataset: Any) -> Sequence[int]:
        """The indices that are tried: the first few and the last."""
        return sorted({*range(min(len(dataset), 8)), len(dataset) - 1})

    def test_it_has_a_length_that_does_not_change(self) -> None:
        """Samplers ask once; a length that moved would lose samples or ask for some that are not there."""
        dataset = self.make_dataset()
        length = len(dataset)
        assert length > 0, "make_dataset() gave an empty dataset; the contract needs a sample to fetch"
        _run(dataset.aget(0))
        assert len(dataset) == length, f"the length was {length} and is {len(dataset)} after a fetch"

    def test_the_same_index_gives_the_same_sample(self) -> None:
        """A resumed epoch fetches again; so does a retry."""
        dataset = self.make_dataset()
        for index in self.indices(dataset):
            first, second = _run(dataset.aget(index)), _run(dataset.aget(index))
            assert self.equal(first, second), f"index {index} gave {first!r}, then {second!r}"

    def test_indexing_gives_what_aget_gives(self) -> None:
        """The sync face is what torch's own loader uses."""
        dataset = self.make_dataset()
        if not hasattr(dataset, "__getitem__"):
            return  # duck typing is enough for headrace's loader; only base classes promise the sync face
        for index in self.indices(dataset):
            through_sync, through_async = dataset[index], _run(dataset.aget(index))
            assert self.equal(through_sync, through_async), (
                f"dataset[{index}] is {through_sync!r}, aget({index}) {through_async!r}"
            )

    def test_agets_gives_what_aget_gives_in_order(self) -> None:
        """A loader uses `agets`, where it is defined, for whole batches."""
        dataset = self.make_dataset()
        if not capabilities(dataset).agets:
            return
        indices = list(self.indices(dataset))[::-1]
        together = list(_run(dataset.agets(indices)))
        assert len(together) == len(indices), f"agets of {len(indices)} indices gave {len(together)} samples"
        for index, sample in zip(indices, together, strict=True):
            alone = _run(dataset.aget(index))
            assert self.equal(sample, alone), f"agets gave {sample!r} for index {index}, aget {alone!r}"

    def test_a_pickled_copy_gives_the_same_samples(self) -> None:
        """Loaders that run in a process of their own send it the dataset."""
        dataset = self.make_dataset()
        before = _run(dataset.aget(0))
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
        assert len(copy) == len(dataset), f"the copy has {len(copy)} samples, the original {len(dataset)}"
        assert self.equal(_run(copy.aget(0)), before), "the copy's first sample is another"

    def test_many_fetches_at_once_do_not_mix_up(self) -> None:
        """A loader keeps hundreds of `aget` in flight on one loop."""
        dataset = self.make_dataset()
        chosen = self.indices(dataset)
        alone = {index: _run(dataset.aget(index)) for index in chosen}
        many = [chosen[i % len(chosen)] for i in range(max(AT_ONCE, len(chosen)))]

        async def fetch() -> list[Any]:
            return await asyncio.gather(*(dataset.aget(index) for index in many))

        for factory in _loop_factories():
            for index, sample in zip(many, _run(fetch(), factory), strict=True):
                assert self.equal(sample, alone[index]), (
                    f"index {index} gave {sample!r} among others, {alone[index]!r} alone"
                )

    def test_an_index_beyond_the_end_is_an_error(self) -> None:
        """Python's own iteration over a dataset ends with IndexError; a sampler's mistake must not go unseen."""
        dataset = self.make_dataset()
        try:
            sample = _run(dataset.aget(len(dataset)))
        except LookupError:
            return
        raise AssertionError(f"aget({len(dataset)}) gave {sample!r} and not an IndexError")


class StreamContract:
    """What a loader relies on in an async iterable dataset. Subclass it and define `make_dataset`.

    Example:
        >>> from headrace._core.interface.iterable_style import AsyncIterableDataset
        >>> class Count(AsyncIterableDataset[int]):
        ...     async def __aiter__(self):
        ...         for i in range(3): yield i
        >>> class TestCount(StreamContract):
        ...     def make_dataset(self): return Count()
        >>> TestCount().test_two_passes_give_the_same_stream()
    """

    def make_dataset(self) -> Any:
        """A new dataset whose stream ends, with at least one sample."""
        raise NotImplementedError("a subclass of StreamContract must define make_dataset(self)")

    def equal(self, left: Any, right: Any) -> bool:
        """Whether two samples count as the same one."""
        return same(left, right)

    def test_two_passes_give_the_same_stream(self) -> None:
        """Each epoch reads the stream from its beginning."""
        dataset = self.make_dataset()
        for factory in _loop_factories():
            first, second = _run(_collect(dataset), factory), _run(_collect(dataset), factory)
            assert first, "make_dataset() gave an empty stream; the contract needs a sample"
            self._assert_same_stream(first, second, "the second pass")

    def test_two_passes_at_once_are_independent(self) -> None:
        """Two iterators of one loader read at the same time."""
        dataset = self.make_dataset()
        alone = _run(_collect(dataset))

        async def in_turns() -> tuple[list[Any], list[Any]]:
            left: list[Any] = []
            right: list[Any] = []
            other = aiter(dataset)
            async for sample in dataset:
                left.append(sample)
                right.append(await anext(other))
            return left, right

        for stream in _run(in_turns()):
            self._assert_same_stream(alone, stream, "a pass beside another")

    def test_a_plain_for_gives_what_async_for_gives(self) -> None:
        """The sync face is what torch's own loader uses."""
        dataset = self.make_dataset()
        if not hasattr(dataset, "__iter__"):
            return
        self._assert_same_stream(_run(_collect(dataset)), list(dataset), "the plain `for`")

    def test_a_pickled_copy_gives_the_same_stream(self) -> None:
        """Loaders that run in a process of their own send it the dataset."""
        dataset = self.make_dataset()
        copy = cloudpickle.loads(cloudpickle.dumps(dataset))
        self._assert_same_stream(_run(_collect(dataset)), _run(_collect(copy)), "the copy")

    def _assert_same_stream(self, expected: list[Any], stream: list[Any], which: str) -> None:
        assert len(stream) == len(expected), f"{which} gave {len(stream)} samples, {len(expected)} were expected"
        for number, (left, right) in enumerate(zip(expected, stream, strict=True)):
            assert self.equal(left, right), f"sample {number} of {which} is {right!r}, {left!r} was expected"


async def _collect(dataset: Any) -> list[Any]:
    return [sample async for sample in dataset]
