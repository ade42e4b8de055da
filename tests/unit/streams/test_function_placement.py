"""Functions of `map` and `filter` run in the workers, or on the consumer's thread: never on the loop that fetches."""

import asyncio
import itertools

import numpy as np
import pytest
from torch.utils import data

import headrace as hr
from headrace._streams.kinds import capabilities
from headrace._streams.map_style import positions

without_a_loader = []  # not empty while a stream is read without a loader


def off_the_loop(sample):
    """Mark a sample; an error on a loader's loop, where all fetches would wait for a function."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ("marked", sample)
    if not without_a_loader:
        raise LookupError("a function runs on the loop that fetches")
    return ("marked", sample)


def again(sample):
    return ("again", off_the_loop(sample))


def keeps(sample):
    return "a2" not in str(off_the_loop(sample))


class Samples(hr.AsyncDataset):
    def __init__(self, name="a"):
        self.name = name

    def __len__(self):
        return 5

    async def aget(self, index):
        if not -5 <= index < 5:
            raise IndexError(index)
        return f"{self.name}{index % 5}"


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
        return f"r{data[0]}"


class Stream(hr.AsyncIterableDataset):
    def __init__(self, name="a"):
        self.name = name

    async def __aiter__(self):
        for i in range(5):
            yield f"{self.name}{i}"


MAP_STYLE = {
    "map": lambda d: hr.concat([d]).map(again),
    "concat": lambda d: hr.concat([d, Samples("b").map(again), Samples("c")]),
    "concat of ranges": lambda d: hr.concat(
        [d, RangedSamples().map(again), RangedSamples()]
    ),
    "concat of batched": lambda d: hr.concat(
        [d, BatchedSamples("b").map(again), BatchedSamples("c")]
    ),
    "Subset": lambda d: data.Subset(d, [2, 0, 0]),
    "ConcatDataset": lambda d: data.ConcatDataset([d, Samples("b").map(again), d]),
    "StackDataset": lambda d: data.StackDataset(x=d, y=hr.concat([d]).map(again)),
}
SOURCES = {"aget": Samples, "agets": BatchedSamples, "ranges": RangedSamples}
STREAMS = {
    "map": lambda s: hr.concat([s]).map(again),
    "filter": lambda s: hr.concat([s]).filter(keeps),
    "take": lambda s: hr.concat([s]).take(4),
    "repeat": lambda s: hr.concat([s]).repeat(2),
    "shuffle": lambda s: hr.concat([s]).shuffle(3, seed=1),
    "split": lambda s: hr.concat([s]).split(rank=0, world_size=2),
    "concat": lambda s: hr.concat([s, Stream("b").map(again), Stream("c")]),
    "mix": lambda s: hr.mix([s, Stream("b").map(again)], [1, 1], seed=3, stop="all"),
    "batch_by_tokens": lambda s: hr.batch_by_tokens(s, 2, length=lambda sample: 1),
    "ChainDataset": lambda s: data.ChainDataset([s, Stream("b").map(again), s]),
}


def loaded(dataset, **options):
    with hr.DataLoader(dataset, batch_size=3, collate_fn=list, **options) as loader:
        return [sample for batch in loader for sample in batch]


@pytest.mark.parametrize(
    ("num_workers", "placement"), [(0, "thread"), (0, "process"), (2, "process")]
)
@pytest.mark.parametrize(
    ("kinds", "sources"), [(MAP_STYLE, SOURCES), (STREAMS, {"": Stream})]
)
def test_functions_run_off_the_loop_that_fetches(kinds, sources, num_workers, placement):
    parts = {
        (name, of): kinds[name](make().map(off_the_loop))
        for name in kinds
        for of, make in sources.items()
    }
    composed = [hr.concat([*parts.values()])]
    if placement == "thread":  # each composition around each of the others
        # A split of a split is an error: the outer one would drop samples of the other ranks.
        composed = [
            hr.concat(
                [
                    compose(part)
                    for (inner, _), part in parts.items()
                    if (inner, outer) != ("split", "split")
                ]
            )
            for outer, compose in kinds.items()
        ]
    for dataset in composed:
        if isinstance(dataset, data.IterableDataset):
            without_a_loader.append(True)
            plain = list(dataset)
            without_a_loader.clear()
        else:
            plain = [dataset[index] for index in range(len(dataset))]
        assert loaded(dataset, num_workers=num_workers, placement=placement) == plain


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
