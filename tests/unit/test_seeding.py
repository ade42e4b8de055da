"""Seeds reach every generator, wherever a transform holds it, and leave those of the caller alone."""

import functools
import pickle
import random
import threading

import cloudpickle
import numpy as np
import pytest
import torch

from headrace._random.seeding import (
    TransformGenerators,
    isolated_generators,
    seed_everything,
)


def draws():
    return random.random(), np.random.random(), torch.rand(()).item()


def test_isolation_restores_the_callers_generators():
    seed_everything(1)
    expected = [draws() for _ in range(3)]
    seed_everything(1)
    got = []
    for _ in range(3):
        with isolated_generators():
            seed_everything(2)
            draws()
            with isolated_generators():  # a transform that iterates a loader of its own
                seed_everything(3)
                draws()
            inner = draws()
        got.append(draws())
    assert got == expected
    with isolated_generators():
        seed_everything(2)
        draws()
        assert draws() == inner


@pytest.mark.parametrize("first_leaves_first", [False, True])
def test_thread_inside_may_wait_for_another_thread_inside(first_leaves_first):
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    inside, leave = threading.Event(), threading.Event()

    def first():
        with isolated_generators():
            seed_everything(2)
            inside.set()
            leave.wait()

    waiting = threading.Thread(target=first)
    waiting.start()
    inside.wait()
    with isolated_generators():
        seed_everything(3)
        draws()
        if first_leaves_first:
            leave.set()
            waiting.join()
    leave.set()
    waiting.join()
    assert draws() == expected


class Holder:
    def __init__(self, rng):
        self.parts = {"nested": [("rng", rng)]}


class SeededByMethod:
    def __init__(self):
        self.seeds = []

    def set_random_seed(self, seed):
        self.seeds.append(seed)


def in_closure(rng):
    return lambda sample: rng.normal()


def in_default(rng):
    def transform(sample, rng=rng):
        return sample

    return transform


def in_module(rng):
    wrapped = torch.nn.Sequential(torch.nn.Identity())
    wrapped[0].rng = rng
    return wrapped


def of_numpy(rng):
    return rng.random()


@pytest.mark.parametrize(
    ("put", "rng", "draw"),
    [
        *(
            (put, np.random.default_rng(0), of_numpy)
            for put in (Holder, in_closure, in_default, in_module)
        ),
        (lambda rng: rng.normal, np.random.default_rng(0), of_numpy),
        (functools.partial(functools.partial, max), np.random.default_rng(0), of_numpy),
        (Holder, np.random.Generator(np.random.Philox()), of_numpy),
        (Holder, np.random.RandomState(), lambda rng: rng.random_sample()),
        (Holder, random.Random(), lambda rng: rng.random()),
        (Holder, torch.Generator(), lambda rng: torch.rand((), generator=rng).item()),
    ],
)
def test_generators_of_every_kind_are_seeded_wherever_a_transform_holds_them(
    put, rng, draw
):
    generators = TransformGenerators([put(rng)])
    drawn = []
    for seed in (0, 2**64 - 1):
        generators.seed(seed)
        drawn.append(draw(rng))
        generators.seed(seed)
        assert draw(rng) == drawn[-1]
    assert drawn[0] != drawn[1]


def test_copy_in_a_worker_gets_the_same_seeds():
    functions = [
        Holder(np.random.default_rng(1)),
        in_closure(np.random.default_rng(2)),
        SeededByMethod(),
    ]
    copies = pickle.loads(cloudpickle.dumps(functions))
    for each in (functions, copies):
        TransformGenerators(each).seed(9)
    assert (
        functions[0].parts["nested"][0][1].random()
        == copies[0].parts["nested"][0][1].random()
    )
    assert functions[1](0) == copies[1](0)
    assert functions[2].seeds == copies[2].seeds
