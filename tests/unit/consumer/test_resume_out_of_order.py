"""With in_order=False, a restored loader does not give a batch again that was given out before others."""

import itertools
import json
import os

import pytest

import headrace as hr
from tests.unit.consumer.test_timeouts import Held
from tests.unit.streams.reading import Plain, stream

N = 24


def in_sequence(held, batch_size, in_order):
    return hr.DataLoader(Held(*held, length=N), batch_size, in_order=in_order)


def by_permutation(held, batch_size, in_order):
    data = Held(*(ORDERS[by_permutation][position] for position in held), length=N)
    return hr.DataLoader(data, batch_size, shuffle=True, seed=0, in_order=in_order)


def by_sampler(held, batch_size, in_order):
    return hr.DataLoader(
        Held(*(N - 1 - each for each in held), length=N), batch_size, sampler=ORDERS[by_sampler], in_order=in_order
    )


@pytest.fixture(autouse=True)
def _fifo(tmp_path, monkeypatch):
    """A FIFO that is never written to, in which workers wait."""
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("FIFO", str(tmp_path / "fifo"))


def all_but(held):
    """A transform that the numbers in `held` never leave."""
    fifo = os.environ["FIFO"]

    def wait(number):
        if number in held:
            with open(fifo) as waiting:
                waiting.read()
        return number

    return wait


def of_a_stream(held, batch_size, in_order):
    options = {"transform": all_but(held), "num_workers": 3, "prefetch_factor": 2, "in_order": in_order}
    return hr.DataLoader(stream(*range(N)), batch_size, **options)


KINDS = [in_sequence, by_permutation, by_sampler, of_a_stream]

ORDERS = {by_permutation: hr.Permutation(N, seed=0, epoch=0)[:].tolist(), by_sampler: range(N - 1, -1, -1)}


def take(loader, batches):
    with loader:
        given = [batch.tolist() for batch in itertools.islice(loader, batches)]
        return list(itertools.chain(*given)), json.loads(json.dumps(loader.state_dict()))


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
@pytest.mark.parametrize(
    ("kind", "batch_size", "in_order"),
    [*((kind, 2, False) for kind in KINDS), (of_a_stream, 3, False), (in_sequence, 2, True)],
)
def test_each_sample_is_given_once_by_a_loader_interrupted_three_times(kind, batch_size, in_order):
    given, state = take(kind({2, 10}, 2, in_order=False), 4)
    assert ORDERS.get(kind, range(N))[2] not in given
    for held, batches in (({10}, 1), ({10, 20}, 2)):  # the first ends between batches that were given out before
        loader = kind(held, 2, in_order=False)
        loader.load_state_dict(state)
        more, state = take(loader, batches)
        given += more
    loader = kind(set(), batch_size, in_order)
    loader.load_state_dict(state)
    rest, _ = take(loader, N)
    assert sorted(given + rest) == list(range(N))


def test_another_batch_size_is_refused_until_the_epoch_has_ended():
    _, state = take(in_sequence({2}, 2, in_order=False), 3)
    loader = in_sequence(set(), 3, in_order=False)
    loader.load_state_dict(state)
    with pytest.raises(hr.StateError, match=r"batch_size=2, and batch_size is 3 now: .* the end of epoch 0"):
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


@pytest.mark.filterwarnings("ignore:.* has no state_dict")
def test_samples_of_a_batch_that_failed_are_not_read_again():
    def loader(held):
        return hr.DataLoader(
            Plain(16, bad=[6]), 4, transform=all_but(held), num_workers=2, in_order=False, drop_last=True
        )

    with loader({0}) as interrupted:
        with pytest.raises(ValueError, match="6"):
            next(iter(interrupted))
        state = interrupted.state_dict()
    with loader(set()) as restored:
        restored.load_state_dict(state)
        assert sorted(batch.tolist() for batch in restored) == [[0, 1, 2, 3], [7, 8, 9, 10], [11, 12, 13, 14]]
