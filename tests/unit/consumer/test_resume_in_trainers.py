"""What trainers do with loaders around a restore: they copy and pickle them, and call `set_epoch` at odd times."""

import copy
import pickle

import pytest

from headrace import DataLoader

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda loader: pickle.loads(pickle.dumps(loader))}


def make():
    return DataLoader(list(range(12)), 2, shuffle=True, seed=0)


def epoch_of(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_of_a_loader_with_a_pending_restore_continues_too(copied):
    uninterrupted = make()
    whole = [epoch_of(uninterrupted) for _ in range(2)]
    loader = make()
    iterator = iter(loader)
    next(iterator), next(iterator)
    restored = make()
    restored.load_state_dict(loader.state_dict())
    other = copied(restored)
    for each in (other, restored):
        assert [epoch_of(each) for _ in range(2)] == [whole[0][2:], whole[1]]


def test_set_epoch_in_a_restored_iteration_is_for_the_next_one():
    uninterrupted = make()
    whole = [epoch_of(uninterrupted) for _ in range(3)]
    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    restored = make()
    restored.load_state_dict(state)
    iterator = iter(restored)
    restored.set_epoch(2)
    assert [batch.tolist() for batch in iterator] == whole[0][1:]
    assert epoch_of(restored) == whole[2]
