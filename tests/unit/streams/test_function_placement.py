"""Functions of `map` and `filter` run in the workers, or on the consumer's thread: never on the loop that fetches."""

import itertools
import os
import threading
from typing import NamedTuple

import numpy as np
import pytest
from torch.utils import data

import headrace as hr
from headrace._core.streams.kinds import capabilities
from headrace._core.streams.map_style import positions


class Fetched(NamedTuple):
    """A sample with the process and thread that fetched it."""

    value: object
    where: tuple[int, int]


class Mapped(NamedTuple):
    """A function's result with the process and thread that it ran in."""

    value: object
    where: tuple[int, int]


def here():
    return os.getpid(), threading.get_ident()


def mapped(sample):
    return Mapped(sample, here())


def mapped_again(sample):
    return Mapped(("again", sample), here())


def is_odd(sample):
    return Mapped(sample, here()) and values(sample) != "a2"


def values(sample):
    """The sample without places."""
    if isinstance(sample, Fetched | Mapped):
        return values(sample.value)
    if isinstance(sample, list | tuple):
        return tuple(map(values, sample))
    if isinstance(sample, dict):
        return {key: values(value) for key, value in sample.items()}
    return sample


def places(sample, kind):
    """Where the functions (`Mapped`) or the fetches (`Fetched`) of a sample ran."""
    if isinstance(sample, kind):
        yield sample.where
    if isinstance(sample, Fetched | Mapped):
        yield from places(sample.value, kind)
    elif isinstance(sample, list | tuple):
        for part in sample:
            yield from places(part, kind)
    elif isinstance(sample, dict):
        yield from places([*sample.values()], kind)


class Samples(hr.AsyncDataset):
    def __init__(self, name="a"):
        self.name = name

    def __len__(self):
        return 5

    async def aget(self, index):
        if not -5 <= index < 5:
            raise IndexError(index)
        return Fetched(f"{self.name}{index % 5}", here())


class BatchedSamples(Samples):
    async def agets(self, indices):
        return [await self.aget(index) for index in indices]


class RangedSamples(hr.RangedDataset):
    def __len__(self):
        return 5

    def ranges(self, indices):
        starts = positions(indices, 5)
        return hr.Ranges(np.zeros_like(starts), starts, starts + 1)

    async def read_range(self, number, start, stop, *, index=None):
        return memoryview(bytes(range(start, stop)))

    def sample_of(self, index, data):
        return Fetched(f"r{data[0]}", here())


class Stream(hr.AsyncIterableDataset):
    def __init__(self, name="a"):
        self.name = name

    async def __aiter__(self):
        for i in range(5):
            yield Fetched(f"{self.name}{i}", here())


MAP_STYLE = {
    "map": lambda d: hr.concat([d]).map(mapped_again),
    "concat": lambda d: hr.concat([d, Samples("b").map(mapped_again), Samples("c")]),
    "concat of ranges": lambda d: hr.concat([d, RangedSamples().map(mapped), RangedSamples()]),
    "concat of batched": lambda d: hr.concat(
        [d, BatchedSamples("b").map(mapped), BatchedSamples("c")]
    ),
    "Subset": lambda d: data.Subset(d, [2, 0, 0]),
    "ConcatDataset": lambda d: data.ConcatDataset([d, Samples("b").map(mapped_again), d]),
    "StackDataset": lambda d: data.StackDataset(x=d, y=hr.concat([d]).map(mapped_again)),
}
SOURCES = {"aget": Samples, "agets": BatchedSamples, "ranges": RangedSamples}
STREAMS = {
    "map": lambda s: hr.concat([s]).map(mapped_again),
    "filter": lambda s: hr.concat([s]).filter(is_odd),
    "take": lambda s: hr.concat([s]).take(4),
    "repeat": lambda s: hr.concat([s]).repeat(2),
    "shuffle": lambda s: hr.concat([s]).shuffle(3, seed=1),
    "split": lambda s: hr.concat([s]).split(rank=0, world_size=2),
    "concat": lambda s: hr.concat([s, Stream("b").map(mapped_again), Stream("c")]),
    "mix": lambda s: hr.mix([s, Stream("b").map(mapped_again)], [1, 1], seed=3, stop="all"),
    "batch_by_tokens": lambda s: hr.batch_by_tokens(s, 2, length=lambda sample: 1),
    "ChainDataset": lambda s: data.ChainDataset([s, Stream("b").map(mapped_again), s]),
}


def assert_functions_run_off_the_loop(dataset, **options):
    """Load the dataset, and compare with plain iteration."""
    with hr.DataLoader(dataset, batch_size=3, collate_fn=list, **options) as loader:
        samples = [sample for batch in loader for sample in batch]
    if isinstance(dataset, data.IterableDataset):
        plain = list(dataset)
    else:
        plain = [dataset[index] for index in range(len(dataset))]
        assert {place for sample in plain for place in places(sample, Mapped)} <= {here()}
    assert values(samples) == values(plain)
    functions = {place for sample in samples for place in places(sample, Mapped)}
    loops = {place for sample in samples for place in places(sample, Fetched)}
    assert functions
    assert not functions & loops
    if options["num_workers"]:
        pids = {pid for pid, _ in functions}
        assert not pids & {os.getpid(), *(pid for pid, _ in loops)}
    elif options["placement"] == "thread":
        assert functions == {here()}


@pytest.mark.parametrize(
    ("num_workers", "placement"), [(0, "thread"), (0, "process"), (2, "process")]
)
@pytest.mark.parametrize(("kinds", "sources"), [(MAP_STYLE, SOURCES), (STREAMS, {"": Stream})])
def test_functions_run_off_the_loop_that_fetches(kinds, sources, num_workers, placement):
    parts = {
        (name, of): kinds[name](make().map(mapped))
        for name in kinds
        for of, make in sources.items()
    }
    if placement == "process":
        assert_functions_run_off_the_loop(
            hr.concat([*parts.values()]), num_workers=num_workers, placement=placement
        )
        return
    for outer, compose in kinds.items():  # each composition around each of the others
        # A split of a split is an error: the outer one would drop samples of the other ranks.
        nested = [
            compose(part)
            for (inner, _), part in parts.items()
            if (inner, outer) != ("split", "split")
        ]
        assert_functions_run_off_the_loop(
            hr.concat(nested), num_workers=num_workers, placement=placement
        )


KEEPS_READS = [
    MAP_STYLE["Subset"],
    lambda d: hr.concat([d, d, d]),
    lambda d: data.ConcatDataset([d, d]),
]


@pytest.mark.parametrize("source", SOURCES)
def test_compositions_keep_batched_and_joined_reads(source):
    dataset = SOURCES[source]()
    for inner, outer in itertools.product(KEEPS_READS, repeat=2):
        composed = hr.concat([outer(hr.concat([inner(dataset)]))])
        assert capabilities(composed).agets == capabilities(dataset).agets
        assert capabilities(composed).ranges == capabilities(dataset).ranges
