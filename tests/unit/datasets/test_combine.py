"""Combined datasets are lazy and reproducible, and give ranks equal numbers of samples."""

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

import headrace as hr
from tests.datasets import SlowDataset
from tests.unit.shards.resuming import in_memory
from tests.unit.streams.reading import Inside, stream


def test_concat_of_different_kinds_is_an_error():
    with pytest.raises(TypeError, match="cannot be combined"):
        hr.concat([SlowDataset(2, 0.0), stream(1)])
    with pytest.raises(TypeError, match="list is not an async dataset"):
        hr.concat([[1]])
    with pytest.raises(ValueError, match="no dataset"):
        hr.concat([])
    with pytest.raises(TypeError, match="make must be a function"):
        hr.from_async_iterable(aiter(stream(1)))
    for combine in (hr.DataLoader, lambda d: hr.concat([d]), lambda d: hr.mix([d], [1])):
        for read_once in (aiter(stream(1)), iter([1]), (i for i in [1])):
            with pytest.raises(TypeError, match="can be read only once"):
                combine(read_once)
    begun = aiter(stream(1))
    same = hr.from_async_iterable(lambda: begun)
    assert list(same) == [1]
    with pytest.raises(TypeError, match="an async generator that has ended"):
        list(same)
    with pytest.raises(TypeError, match="streams"):
        hr.batch_by_tokens(SlowDataset(2, 0.0), 4)
    with pytest.raises(TypeError, match="cannot be combined"):
        hr.mix([SlowDataset(2, 0.0), stream(1)], [1, 1])


def test_wrong_arguments_are_errors():
    mix = functools.partial(hr.mix, [stream()])
    for wrong in (
        lambda: stream().shuffle(0),
        lambda: stream().take(-1),
        lambda: stream().repeat(-1),
        lambda: mix([0]),
        lambda: mix([1, 1]),
        lambda: mix([1], stop="odd"),
        lambda: mix([1], temperature=math.nan),
        lambda: hr.mix([stream()] * 2, [1, math.nan]),
        lambda: mix([1], seed=-1),
        lambda: stream().shuffle(2, seed=2**64),
        lambda: stream().shuffle(2).set_epoch(-1),
        lambda: hr.mix({"a": stream()}, {"b": 1}),
        lambda: mix([(1, [1])]),
        lambda: mix([(0, [1]), (0, [2])]),
        lambda: mix([(0, [0])]),
        lambda: hr.batch_by_tokens(stream(), 4, boundaries=[2, 2]),
    ):
        with pytest.raises(ValueError):
            wrong()
    for wrong in (
        {"seq_len": 0},
        {"strategy": "worst_fit"},
        {"window": 0},
        {"labels": "other"},
        {"fields": "tokens"},
        {"fields": ("tokens", "labels"), "labels": "next"},
        {"carry": ("tokens",)},
        {"carry": ("positions",)},
        {"limits": {"images": -1}},
        {"align": 0},
        {"pad_to": 0},
        {"too_long": "keep"},
    ):
        with pytest.raises(ValueError):
            stream().pack(**{"seq_len": 4, **wrong})
    for wrong in (
        lambda: stream().shuffle(True),
        lambda: hr.batch_by_tokens(stream(), "4"),
        lambda: hr.batch_by_tokens(stream(), 4, boundaries=[1.5]),
    ):
        with pytest.raises(TypeError, match="must be an int, but got"):
            wrong()


# Order


def test_shuffle_moves_no_sample_forward_beyond_its_buffer():
    position = {
        sample: place for place, sample in enumerate(stream(*range(200)).shuffle(10))
    }
    assert -9 <= min(place - sample for sample, place in position.items()) < -5


def test_stream_without_a_sample_in_a_pass_is_left_out_of_a_mix_that_ends_with_all():
    left = [-1]

    async def once():
        while left:
            yield left.pop()

    numbers = stream(*range(50))
    rejected = numbers.filter(lambda number: False)
    for parts in (
        [stream(), numbers],
        [numbers, rejected],
        [stream(), numbers, stream()],
    ):
        assert list(hr.mix(parts, [1] * len(parts), stop="all")) == list(range(50))
    assert list(hr.mix([stream(), stream()], [1, 1], stop="all")) == []
    mixed = hr.mix([hr.from_async_iterable(once), numbers], [1, 1], stop="all")
    assert sorted(mixed) == list(range(-1, 50))


# Batches


@pytest.mark.parametrize("kind", [np.int16, torch.tensor])
def test_lengths_may_be_numbers_of_numpy_and_torch(kind):
    batches = hr.batch_by_tokens(
        stream(*range(900)), 32_000, length=lambda _: kind(100), padded=False
    )
    assert [len(batch) for batch in batches] == [320, 320, 260]


@pytest.mark.parametrize("length", [-1, 1.0, True, None])
def test_wrong_length_is_an_error(length):
    with pytest.raises((TypeError, ValueError), match=r"length\(sample\)"):
        list(hr.batch_by_tokens(stream("a"), 4, length=lambda _: length))


def test_sample_over_budget_is_an_error_and_the_next_batch_follows():
    batches = hr.batch_by_tokens(stream("aa", "x" * 9, "bb"), 4)
    with hr.DataLoader(
        batches, batch_size=None, on_error="skip", collate_fn=list
    ) as loader:
        assert list(loader) == [["aa", "bb"]]
        assert "9 tokens is over max_tokens=4" in str(loader.stats().skipped[0])


# Ends


OPERATIONS = {
    "shuffle": lambda s: s.shuffle(2),
    "take": lambda s: s.take(10),
    "split": lambda s: s.split(rank=0, world_size=1),
    "concat": lambda s: hr.concat([s, stream()]),
    "mix": lambda s: hr.mix([s], [1]),
    "batches": lambda s: hr.batch_by_tokens(s, 1, length=lambda sample: 1),
}


@pytest.mark.parametrize("combine", OPERATIONS.values(), ids=OPERATIONS)
def test_closing_a_stream_closes_its_source(combine):
    opened = closed = 0

    async def make():
        nonlocal opened, closed
        opened += 1
        try:
            for i in range(100):
                yield i
        finally:
            closed += 1

    async def read_one():
        reading = aiter(combine(hr.from_async_iterable(make)))
        await anext(reading)
        await reading.aclose()

    asyncio.run(read_one())
    assert opened == closed > 0


@pytest.mark.parametrize(
    "around",
    [
        lambda lines: lines,
        lambda lines: lines.shuffle(4),
        lambda lines: Inside(lines.map(str)),
        lambda lines: hr.concat([Inside(lines), Inside(lines)]),
        lambda lines: hr.batch_by_tokens(lines, 1, length=lambda line: 1),
        lambda lines: lines.split(),
    ],
    ids=["itself", "shuffle", "own", "concat", "batches", "split"],
)
def test_stream_of_shards_inside_a_split_is_divided_once(as_rank, around):
    shards = {f"{shard}.txt": b"%d\n%d\n" % (shard, shard + 4) for shard in range(4)}
    whole = around(hr.LinesDataset(in_memory(shards), shuffle=True))
    everything = list(whole)
    ranks = []
    for rank in range(2):
        as_rank(rank, 2)
        ranks.append(list(whole.split()))
    assert [sample for turn in zip(*ranks, strict=True) for sample in turn] == everything
