"""Batching: how samples become batches, how many there are, and what is left out."""

import numpy as np
import pytest
import torch
from torch.utils import data

from tests.parity.datasets import LENGTH, Count, Map, Stream
from tests.parity.harness import epochs, parity, raised_by

SIZES = (
    {"batch_size": 1},
    {"batch_size": 4},
    {"batch_size": LENGTH},
    {"batch_size": 100},
)


def with_each(same, make, ways):
    for options in ways[1::2] if same.setting.workers and len(ways) > 2 else ways:
        same(lambda DataLoader, options=options: list(DataLoader(make(), **options)))


@parity("`batch_size` cuts samples into batches; the last batch may be smaller")
def test_batches_have_torchs_boundaries(same):
    with_each(same, Map, SIZES)
    with_each(same, Stream, SIZES)


@parity("`drop_last` leaves out a last batch that is not full")
def test_drop_last_drops_the_incomplete_batch(same):
    for make in (Map, Stream):
        with_each(same, make, [{**size, "drop_last": True} for size in SIZES])


class Each(Map):
    """One sample of every kind that `default_convert` knows, or leaves alone."""

    def __getitem__(self, index):
        return {
            "array": np.full(2, index, dtype=np.float32),
            "scalar": np.float64(index),
            "tensor": torch.tensor(index),
            "number": float(index),
            "text": f"n{index}",
            "raw": b"x",
            "pair": (index, [np.arange(index)]),
            "strings": np.array(["a"]),
            "nothing": None,
        }


@parity("`batch_size=None` gives single samples, arrays as tensors (`default_convert`)")
def test_batch_size_none_gives_converted_samples(same):
    with_each(same, Each, [{"batch_size": None}, {"batch_size": None, "shuffle": True}])
    with_each(same, Stream, [{"batch_size": None}])


@parity("`batch_size=None` with a user's `collate_fn`: called with one sample")
def test_batch_size_none_calls_collate_fn_for_each_sample(same):
    with_each(same, Map, [{"batch_size": None, "collate_fn": str}])
    with_each(same, Stream, [{"batch_size": None, "collate_fn": str}])


RAGGED = {
    "lists": lambda: [[1, 2], [3], [0, 4, 5]],
    "tuples, ranges and tensors": lambda: [(1, 2), range(3), torch.tensor([4, 5])],
    "BatchSampler": lambda: data.BatchSampler(
        data.SequentialSampler(range(LENGTH)), 4, True
    ),
    "an empty one": lambda: [[1], [], [2]],
}


@pytest.mark.parametrize("kind", [kind for kind in RAGGED if kind != "an empty one"])
@parity("`batch_sampler` decides each batch, of any length")
def test_batch_sampler_with_batches_of_any_size(same, kind):
    same(lambda DataLoader: epochs(DataLoader(Map(), batch_sampler=RAGGED[kind]())))


@parity("a `batch_sampler` may ask for no samples; `collate_fn` gets an empty list")
def test_empty_batch(same):
    torchs = same(
        lambda DataLoader: epochs(
            DataLoader(Map(), batch_sampler=RAGGED["an empty one"](), collate_fn=len)
        )
    )
    assert torchs == [[1, 0, 1], [1, 0, 1]]


@parity(
    "a `batch_sampler` as the `sampler`, with `batch_size=None`: the dataset is asked for a batch at once"
)
def test_sampler_of_lists_gives_whole_batches(DataLoader):
    sampler = data.BatchSampler(data.RandomSampler(range(LENGTH)), 3, False)
    return epochs(DataLoader(Table(), sampler=sampler, batch_size=None))


class Table(Map):
    """A list of indices is one sample."""

    def __getitem__(self, indices):
        return torch.arange(LENGTH)[indices]


LENGTHS = (
    {"batch_size": 4},
    {"batch_size": 4, "drop_last": True},
    {"batch_size": 100},
    {"batch_size": 100, "drop_last": True},
    {"batch_size": None},
    {},
)


@parity(
    "`len(loader)` of an iterable: torch's estimate; a TypeError where the length is unknown"
)
def test_length_is_torchs(same):
    def program(DataLoader):
        loaders = [
            DataLoader(make(), **options) for make in (Map, Count) for options in LENGTHS
        ]
        loaders.append(DataLoader(Map(), batch_sampler=RAGGED["lists"]()))
        loaders += [
            DataLoader(Map(), sampler=[1, 2, 3], batch_size=size) for size in (2, None)
        ]
        unknown = (
            DataLoader(Stream(), batch_size=4),
            DataLoader(Map(), sampler=iter(range(LENGTH)), batch_size=None),
        )
        return [len(loader) for loader in loaders], [
            raised_by(loader.__len__) for loader in unknown
        ]

    assert same(program)[0] == [4, 3, 1, 0, 13, 13] * 2 + [3, 2, 3]


@pytest.mark.parametrize(
    "options", [{"batch_size": None}, {}, {"batch_size": 2}], ids=str
)
@parity(
    "a warning when an iterable exceeds its length, once the length was asked for",
    warns=True,
)
def test_wrong_length_of_a_stream_warns_as_in_torch(DataLoader, options):
    loader = DataLoader(Count(6, said=2), **options)
    silent = [next(iter(loader))]  # without a call of len
    return silent, len(loader), [batch for batch in loader]  # noqa: C416 — `list` would ask for it


@parity("no warning where the length is right, or was not asked for")
def test_right_length_of_a_stream_does_not_warn(same):
    def program(DataLoader):
        honest, liar = DataLoader(Count(6)), DataLoader(Count(6, said=2), batch_size=2)
        return len(honest), [batch for batch in honest], [batch for batch in liar]  # noqa: C416

    if same.setting.name == "torch dataset, 2 workers":
        program = sharded(program)
    same(program)


def sharded(program):
    """The program in one worker: two would each read the whole, and torch warns of just that."""
    return lambda DataLoader: program(
        lambda dataset, **options: DataLoader(dataset, num_workers=1, **options)
    )
