"""One epoch of shards, interrupted at random, and continued with other batches and orders of arrival.

Each sample comes once.

As `tests/faults/test_resume.py`, in one process and without kills, so that many more are tried.
`HEADRACE_RESUME_RUNS` is the number of epochs for each kind of dataset.
"""

import collections
import itertools
import json
import os
import random
import time

import pytest
import torch

import headrace as hr
from tests.faults.programs import epochs
from tests.faults.programs.epochs import KINDS, N

RUNS = int(os.environ.get("HEADRACE_RESUME_RUNS", "2"))
STARTS = 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    epochs.write_shards(folder)
    return folder


class Part:
    """The batches of one rank between two interruptions: the samples, the state after them, whether the epoch ended."""

    def __init__(self, kind, shards, state, steps, **options):
        dataset, sampler = KINDS[kind].make(shards)
        loader = hr.DataLoader(dataset, sampler=sampler, seed=3, **options)
        if state is not None:
            loader.load_state_dict(state)
        with loader:
            batches = iter(loader)
            read = [torch.as_tensor(batch).tolist() for batch in itertools.islice(batches, steps)]
            self.given = list(itertools.chain.from_iterable(read))
            self.ended = len(read) < steps
            self.state = json.loads(json.dumps(loader.state_dict(lag=int(self.ended))))


@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("name", [name for name in KINDS if name != "elastic sampler"])
def test_each_sample_is_given_once(name, number, shards, as_rank):
    draw = random.Random(f"{name} {number}")
    late = set(draw.sample(range(N), N // 4))

    def transform(sample):
        if int(sample) in late:
            # the latency of some samples, so that batches arrive in another order
            time.sleep(0.004)
        return sample

    given, states, parts, story = collections.Counter(), [], [], []
    for start in range(STARTS):
        ranks = len(states) or draw.choice([1, 1, 2, 3, 4])
        if states:
            states = [json.loads(json.dumps(hr.merge_states(draw.sample(states, ranks))))] * ranks
        options = {
            "num_workers": draw.choice([0, 2, 2, 2]),
            "in_order": draw.random() < 0.4,
            "batch_size": draw.choice([1, 2, 3, 5]),
        }
        steps = N + 1 if start == STARTS - 1 else draw.randrange(5)
        parts = []
        for rank, state in enumerate(states or [None] * ranks):
            as_rank(rank, ranks)
            parts.append(Part(name, shards, state, steps, transform=transform, **options))
        given.update(sample for part in parts for sample in part.given)
        story.append((ranks, options, [part.given for part in parts], states))
        states = [part.state for part in parts]
        if all(part.ended for part in parts):
            break
    assert given == collections.Counter(range(N)), story
