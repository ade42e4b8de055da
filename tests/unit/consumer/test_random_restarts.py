"""One epoch, interrupted at random and continued by other ranks, batches and orders of arrival, gives each sample once.

As `tests/faults/test_resume.py`, in one process and without kills, so that many more are tried. `HEADRACE_RESUME_RUNS`
is the number of epochs for each kind of dataset.
"""

import collections
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
STARTS = 5
ANY_RANK = [name for name, kind in KINDS.items() if kind.global_cursor and not kind.unequal]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    epochs.write_shards(folder)
    return folder


class Part:
    """The batches of one rank between two interruptions: the samples, the state after them, whether the epoch ended."""

    def __init__(self, kind, shards, state, steps, **options):
        dataset, sampler = KINDS[kind].make(shards)
        shuffle = True if kind == "map-style, seed" else None
        loader = hr.DataLoader(dataset, sampler=sampler, shuffle=shuffle, seed=3, executor="thread", **options)
        if state is not None:
            loader.load_state_dict(state)
        self.given = []
        with loader:
            batches = iter(loader)
            for _ in range(steps):
                batch = next(batches, None)
                self.ended = batch is None
                if self.ended:
                    break
                self.given += torch.as_tensor(batch).tolist()
            self.state = json.loads(json.dumps(loader.state_dict()))


@pytest.mark.filterwarnings("ignore:.* has no state_dict", "ignore:each of .* ranks reads all")
@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("kind", ANY_RANK)
def test_each_sample_is_given_once(kind, number, shards, monkeypatch):
    draw = random.Random(f"{kind} {number}")
    late = set(draw.sample(range(N), N // 4))

    def transform(sample):
        if int(sample) in late:
            time.sleep(0.004)  # the latency of some samples, so that batches arrive in another order
        return sample

    given, state, story = collections.Counter(), None, []
    for start in range(STARTS):
        alone = KINDS[kind].ranks == 1 or (state is not None and state["state"][0]["rank"] is not None)
        ranks = 1 if alone else draw.choice([1, 1, 1, 2, 4])
        options = {
            "num_workers": draw.choice([0, 2, 2, 2]),
            "in_order": ranks > 1 or draw.random() < 0.4,
            "batch_size": draw.choice([1, 2, 3, 5]),
        }
        steps = N if start == STARTS - 1 else draw.randrange(1, 5)
        parts = []
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            parts.append(Part(kind, shards, state, steps + (start == STARTS - 1), transform=transform, **options))
        given.update(sample for part in parts for sample in part.given)
        story.append((ranks, options, [part.given for part in parts], state))
        state = draw.choice(parts).state
        if all(part.ended for part in parts):
            break
    assert given == collections.Counter(range(N)), story
