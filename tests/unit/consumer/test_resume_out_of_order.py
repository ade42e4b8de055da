"""With in_order=False, a restored loader does not give a batch again that was given out before others."""

import itertools
import json
import os

import pytest

import headrace as hr
from tests.unit.consumer.test_timeouts import Held
from tests.unit.streams.reading import stream

N = 24


def in_sequence(held, batch_size, in_order):
    return hr.DataLoader(Held(*held, length=N), batch_size, in_order=in_order)


def by_permutation(held, batch_size, in_order):
    data = Held(*(ORDERS[by_permutation][position] for position in held), length=N)
    return hr.DataLoader(data, batch_size, shuffle=True, seed=0, in_order=in_order)


def by_sampler(held, batch_size, in_order):
    return hr.DataLoader(
        Held(*(N - 1 - each for each in held), length=N),
        batch_size,
        sampler=ORDERS[by_sampler],
        in_order=in_order,
    )


KINDS = [in_sequence, by_permutation, by_sampler]

ORDERS = {
    by_permutation: hr.Permutation(N, seed=0, epoch=0)[:].tolist(),
    by_sampler: range(N - 1, -1, -1),
}


def take(loader, batches):
    with loader:
        given = [batch.tolist() for batch in itertools.islice(loader, batches)]
        return list(itertools.chain(*given)), json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize(
    ("kind", "in_order"), [*((kind, False) for kind in KINDS), (in_sequence, True)]
)
def test_each_sample_is_given_once_by_a_loader_interrupted_three_times(kind, in_order):
    given, state = take(kind({2, 10}, 2, in_order=False), 4)
    assert ORDERS.get(kind, range(N))[2] not in given
    for held, batches in (
        ({10}, 1),
        ({10, 20}, 2),
    ):  # the first ends between batches that were given out before
        loader = kind(held, 2, in_order=False)
        loader.load_state_dict(state)
        more, state = take(loader, batches)
        given += more
    loader = kind(set(), 2, in_order)
    loader.load_state_dict(state)
    rest, _ = take(loader, N)
    assert sorted(given + rest) == list(range(N))


def test_another_batch_size_is_refused_until_the_epoch_has_ended():
    _, state = take(in_sequence({2}, 2, in_order=False), 3)
    loader = in_sequence(set(), 3, in_order=False)
    loader.load_state_dict(state)
    with pytest.raises(
        hr.StateError, match=r"batch_size=2, and batch_size is 3 now: .* the end of epoch 0"
    ):
        iter(loader)


def test_merged_states_of_given_ranks_continue_each_its_own_part():
    def loader(rank, held=(), ranks=2):
        sampler = hr.ElasticSampler(N, shuffle=False, rank=rank, world_size=ranks)
        return hr.DataLoader(Held(*held, length=N), 2, sampler=sampler, in_order=False)

    states, left = [], []
    for rank in range(2):
        interrupted = loader(rank, held=(0, 8))  # of rank 0 alone
        given = [batch.tolist() for batch in itertools.islice(interrupted, 3)]
        states.append(json.loads(json.dumps(interrupted.state_dict())))
        left.append([batch for n in range(rank, N, 4) if (batch := [n, n + 2]) not in given])
        assert len(left[rank]) == 3
    merged = hr.merge_states(states)
    for rank in range(2):
        restored = loader(rank)
        restored.load_state_dict(merged)
        assert sorted(batch.tolist() for batch in restored) == left[rank]
    other = loader(0, ranks=3)
    other.load_state_dict(merged)
    with pytest.raises(hr.StateError, match=r"rank 0 of 2, and this is rank 0 of 3.*in_order=True"):
        iter(other)


class FirstWaitsForSecond:
    """The transform of sample 0 waits until that of sample 1 runs, in another process."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __call__(self, number):
        if number == 0:
            self.pipe.read_bytes()
        elif number == 1:
            self.pipe.write_bytes(b"")
        return number


def test_batches_of_an_async_stream_come_in_order(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    options = {
        "transform": FirstWaitsForSecond(tmp_path / "pipe"),
        "num_workers": 2,
        "in_order": False,
    }
    with hr.DataLoader(stream(*range(6)), 1, **options) as loader:
        assert [int(batch) for batch in loader] == list(range(6))
