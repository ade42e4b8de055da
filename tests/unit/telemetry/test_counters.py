"""What a loader counts."""

import copy
import pickle

import pytest

import headrace as hr
from tests.datasets import Numbers


@pytest.mark.parametrize("through", [copy.copy, lambda obj: pickle.loads(pickle.dumps(obj))])
def test_share_of_waiting_is_that_of_the_time_and_a_copy_begins_to_count_anew(through):
    loader = hr.DataLoader(Numbers(64), 4)
    assert loader.stats().wait_share == 0.0
    with loader:
        several = [iter(loader) for _ in range(3)]
        for batches in several:
            next(batches)
        list(several[0])
        copied = through(loader)
    with copied:
        assert (copied.stats().epochs, copied.stats().batches, copied.report().batches) == (0, 0, 0)
        list(copied)
    stats = loader.stats()
    assert 0.0 < stats.wait_share <= 1.0
    assert (stats.epochs, stats.batches, copied.stats().batches) == (3, 18, 16)
