"""Randomized functions: the numbers of a sample follow from its position alone, wherever however it is read."""

import functools
import pickle
import sys
import types

import cloudpickle
import numpy as np
import pytest
import torch

import headrace as hr
from tests.datasets import SlowDataset, TorchStream
from tests.unit.streams.reading import Count

LENGTH = 24
Map = functools.partial(SlowDataset, LENGTH, 0)
stream = functools.partial(Count, LENGTH)


@hr.randomized
def noisy(sample, rng):
    """Add a number."""
    return sample, int(rng.integers(1 << 40))


@hr.randomized
def again(sample, rng):
    return (*sample, int(rng.integers(1 << 40)))


@hr.randomized
def kept(sample, rng):
    return rng.random() < 0.5


class Compose:
    def __init__(self, *functions):
        self.functions = functions

    def __call__(self, sample):
        for function in self.functions:
            sample = function(sample)
        return sample


def drawn(dataset, epochs=1, **options):
    """The samples of some epochs, sorted, with what was drawn for each."""
    options = {
        "batch_size": 4,
        "seed": 3,
        "transform": noisy,
        "collate_fn": list,
        **options,
    }
    with hr.DataLoader(dataset, **options) as loader:
        found = [list(loader) for _ in range(epochs)]
    return sorted(sample for batches in found for batch in batches for sample in batch)


def test_each_sample_epoch_and_seed_has_other_numbers():
    numbers = [
        number for seed in range(3) for _, number in drawn(Map(), epochs=3, seed=seed)
    ]
    assert len(set(numbers)) == 9 * LENGTH


def test_workers_of_a_torch_stream_draw_different_numbers():
    numbers = [number for _, number in drawn(TorchStream(LENGTH), num_workers=2)]
    assert len(set(numbers)) == LENGTH


def test_a_second_function_draws_other_numbers_and_leaves_those_of_the_first():
    both = drawn(Map(), transform=Compose(noisy, again))
    assert [sample[:2] for sample in both] == drawn(Map())
    assert all(first != second for _, first, second in both)
    assert both == drawn(Map().map(noisy), transform=again)


def test_draws_from_torchs_generator_without_a_loader():
    def alone():
        torch.manual_seed(4)
        return [noisy(1), noisy(1), Map().map(noisy)[0]], list(
            stream().map(noisy).filter(kept)
        )

    first = alone()
    assert first == alone()
    assert len(set(first[0])) == 3


def test_a_call_while_samples_are_fetched_is_an_error_that_says_where_to_put_it():
    class Fetching(SlowDataset):
        async def aget(self, index):
            return noisy(index)

    with pytest.raises(RuntimeError, match=r"transform=, or to \.map\(\)"):
        drawn(Fetching(LENGTH, 0), transform=None)


def test_a_loader_with_a_function_of_the_main_program_is_pickled(monkeypatch):
    main = types.ModuleType("__main__")
    exec(
        "import headrace\n@headrace.randomized\ndef noisy(x, rng): return x + 1",
        vars(main),
    )
    monkeypatch.setitem(sys.modules, "__main__", main)
    copy = pickle.loads(pickle.dumps(hr.DataLoader(range(4), 4, transform=main.noisy)))
    assert next(iter(copy)).tolist() == [1, 2, 3, 4]
    assert repr(pickle.loads(cloudpickle.dumps(main.noisy))) == repr(main.noisy)


def test_a_lambda_and_a_local_function_reach_workers():
    def local(sample, rng):
        return sample, int(rng.integers(1 << 40))

    assert drawn(Map(), transform=hr.randomized(local), num_workers=1) == drawn(Map())
    copied = pickle.loads(
        cloudpickle.dumps(hr.randomized(lambda sample, rng: rng.random()))
    )
    assert copied(0, np.random.default_rng(1)) == np.random.default_rng(1).random()
