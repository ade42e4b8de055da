"""Plans are drawn lazily, and seeded by the epoch and their position among the samples of all ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace._core.seeding import batch_seed

SEEDS = st.integers(0, 2**63 - 1)


class Reusing:
    """A batch sampler that gives the same list again and again."""

    def __iter__(self):
        batch = []
        for i in range(3):
            batch[:] = [i]
            yield batch


def test_list_that_the_sampler_reuses_is_copied():
    assert [batch.tolist() for batch in hr.DataLoader(list(range(3)), batch_sampler=Reusing())] == [[0], [1], [2]]


@given(base=SEEDS, epoch=st.integers(0, 10_000), number=st.integers(0, 10_000_000))
def test_seed_depends_on_all_three_and_on_nothing_else(base, epoch, number):
    seed = batch_seed(base, epoch, number)
    assert seed == batch_seed(base, epoch, number)
    assert 0 <= seed < 2**64
    others = (
        batch_seed(base ^ 1, epoch, number),
        batch_seed(base, epoch + 1, number),
        batch_seed(base, epoch, number + 1),
    )
    assert len({seed, *others}) == 4


def test_seeds_are_the_same_on_every_machine():
    assert batch_seed(0, 0, 0) == 2891389769238885931
    assert batch_seed(2**63 - 1, 3, 5) == 5492607835317456068


@pytest.mark.parametrize("sampler", [[3], [None]])
def test_batch_sampler_must_give_batches(sampler):
    with pytest.raises(TypeError):
        next(iter(hr.DataLoader(list(range(4)), batch_sampler=sampler)))
