"""Batches and keys of any step, computed again: they are those that were delivered, whatever read them."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

import headrace as hr
from tests.datasets import Numbers
from tests.unit.shards.resuming import in_memory
from tests.unit.streams import reading


def noisy(sample):
    return torch.tensor(
        [float(sample), torch.rand(()), np.random.random(), random.random()]
    )


def numbers_of(batches):
    return [batch[:, 0].int().tolist() for batch in batches]


def loader_of(kind, **options):
    data = Numbers(2400)
    if kind == "seed":
        options |= {"shuffle": True}
    else:
        of_blocks = {"block_size": 10, "blocks_at_once": 6}
        make, arguments = (
            (hr.ElasticSampler, {})
            if kind == "elastic"
            else (hr.BlockShuffleSampler, of_blocks)
        )
        options |= {"sampler": make(data, seed=5, **arguments)}
    return hr.DataLoader(data, 4, seed=5, transform=noisy, **options)


@pytest.mark.parametrize("kind", ["elastic", "blocks"])
def test_steps_are_computed_again_since_the_number_of_ranks_changed_last(kind, as_rank):
    state, first, delivered = None, 0, {}
    for ranks in (2, 3):
        states = []
        for rank in range(ranks):
            as_rank(rank, ranks)
            with loader_of(kind) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for step, batch in enumerate(itertools.islice(loader, 9), first):
                    delivered[step, rank] = batch
                states.append(json.loads(json.dumps(loader.state_dict())))
        assert states == states[:1] * ranks
        state, first = states[0], first + 9
    as_rank(0, 1)
    with loader_of(kind, num_workers=1) as loader:
        loader.load_state_dict(state)
        for (step, rank), expected in delivered.items():
            if step >= 9:
                assert torch.equal(loader.batch_at(0, step, rank=rank), expected)
                continue
            with pytest.raises(hr.StateError, match="before the number of ranks"):
                loader.batch_at(0, step, rank=rank)


def test_rank_of_a_job_that_this_process_is_not_part_of(as_rank):
    as_rank(3, 4)
    with loader_of("elastic") as loader:
        expected = next(itertools.islice(loader, 7, None))
    as_rank(0, 1)
    with loader_of("elastic") as loader:
        assert torch.equal(loader.batch_at(0, 7, rank=3, world_size=4), expected)
        with pytest.raises(
            ValueError, match="rank=3, but step 7 of epoch 0 is of 1 ranks"
        ):
            loader.batch_at(0, 7, rank=3)


def test_torchs_distributed_sampler():
    data = Numbers(40)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=1)
    with hr.DataLoader(data, 4, sampler=sampler, seed=1, transform=noisy) as loader:
        given = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            given.append(list(loader))
        assert all(
            torch.equal(loader.batch_at(epoch, 3), given[epoch][3]) for epoch in range(2)
        )
        with pytest.raises(ValueError, match="was made for rank 1 of 2"):
            loader.batch_at(1, 3, rank=0)


def test_epochs_without_set_epoch_are_refused_for_a_distributed_sampler():
    loader = hr.DataLoader(
        list(range(8)),
        2,
        sampler=DistributedSampler(range(8), num_replicas=1, rank=0),
        seed=0,
    )
    for epoch in range(2):
        given = []
        for step, batch in enumerate(loader):
            given.append(batch.tolist())
            assert [
                loader.batch_at(epoch, each).tolist() for each in range(step + 1)
            ] == given
    with pytest.raises(ValueError, match="the number for epoch 0 is not known"):
        loader.batch_at(0, 0)


class Resumable:
    """A sampler of the user's with a state and epochs."""

    wants_epoch = True

    def __init__(self):
        self.at, self.epoch = 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = hr.Permutation(24, 3, self.epoch)[:].tolist()
        start, self.at = self.at, 0
        for self.at, index in enumerate(order[start:], start + 1):
            yield index
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


LENGTHS = np.random.default_rng(0).integers(1, 9, 24)
STATEFUL = {
    "indices": lambda: {"batch_size": 3, "sampler": Resumable()},
    "batches": lambda: {
        "batch_sampler": hr.BalancedBatchSampler(LENGTHS, 16, seed=2, window=8)
    },
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_steps_of_samplers_with_a_state(kind):
    loader = hr.DataLoader(Numbers(24), seed=3, transform=noisy, **STATEFUL[kind]())
    given = []
    for epoch in range(3):
        given.append([])
        for batch in loader:
            given[epoch].append(batch)
            middle = len(given[epoch]) // 2
            assert torch.equal(loader.batch_at(epoch, middle), given[epoch][middle])
    for epoch, batches in enumerate(given):
        for step, batch in enumerate(batches):
            assert torch.equal(loader.batch_at(epoch, step), batch)
        with pytest.raises(IndexError):
            loader.batch_at(epoch, len(batches))


def test_steps_after_lost_batches_are_those_that_were_delivered():
    """Also after a restored state, and where steps are left out."""

    def new():
        bad = lambda sample: 1 // (sample not in lost) and sample  # noqa: E731
        data = Numbers(60)
        sampler = hr.ElasticSampler(data, shuffle=False)
        return hr.DataLoader(
            data, 2, sampler=sampler, seed=0, transform=bad, on_error="skip"
        )

    lost = {0, 1, 8, 9, 10, 11, 13, 58, 59}
    loader = new()
    list(loader)
    for _ in zip(range(13), loader, strict=False):
        state = json.loads(json.dumps(loader.state_dict()))
    restored = new()
    restored.load_state_dict(state)
    assert restored.samples_at(1, [0, 3, 12]) == [[2, 3], [12, 13], [30, 31]]
    assert restored.batch_at(1, 3).tolist() == [12]
    restored.exclude(steps={1: [13]})
    assert [batch.tolist() for batch in restored][:2] == [[34, 35], [36, 37]]


def test_dataset_keeps_its_epoch_when_a_step_is_computed_again():
    class Shifted(torch.utils.data.Dataset):
        epoch = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return 10 * self.epoch + index

        def set_epoch(self, epoch):
            self.epoch = epoch

    for sets in (False, True):
        loader = hr.DataLoader(Shifted(), 2, seed=0)
        for epoch in range(2):
            if sets:
                loader.set_epoch(epoch)
            given = [batch.tolist() for batch in loader]
            assert loader.batch_at(epoch, 1).tolist() == given[1]
            assert loader.batch_at(0, 0).tolist() == [0, 1]
        assert loader.dataset.epoch == (1 if sets else 0)


def test_streams_are_refused():
    loader = hr.DataLoader(reading.stream(1), batch_size=4, seed=1)
    for look in (loader.batch_at, lambda epoch, step: loader.samples_at(epoch, [step])):
        with pytest.raises(
            TypeError, match="samples of a stream are known only when it is read"
        ):
            look(0, 1)
    with pytest.raises(ValueError, match="filter"):
        loader.exclude(steps={0: [0]})


def test_keys_of_samples():
    objects = hr.ObjectDataset(in_memory({f"{number}.bin": b"x" for number in range(6)}))
    loader = hr.DataLoader(objects, 2, seed=0)
    assert loader.samples_at(0, [1]) == [["2.bin", "3.bin"]]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shuffle": True}, "give the loader seed="),
        ({"seed": 0, "in_order": False}, "in_order=False"),
        (
            {"seed": 0, "sampler": RandomSampler(range(10))},
            "the order of RandomSampler does not follow from the seed",
        ),
    ],
)
def test_steps_that_cannot_be_computed_are_refused(options, problem):
    loader = hr.DataLoader(Numbers(10), **options)
    with pytest.raises(ValueError, match=problem):
        loader.batch_at(0, 0)


@pytest.mark.parametrize("kind", ["seed", "elastic", "blocks"])
def test_length_and_steps_are_those_without_samples_that_were_left_out(kind):
    with loader_of(kind) as loader:
        loader.exclude(steps={0: [1, 5]}, keys=[7, 8])
        assert len(loader) in (597, 598)
        after = list(loader)
        assert torch.equal(loader.batch_at(0, 6), after[6])
        loader.set_epoch(1)
        assert len(loader) in (599, 600)


def test_checkpoint_from_before_a_spike_continues_without_its_steps():
    with loader_of("seed") as loader:
        batches, checkpoint = iter(loader), None
        trained = []
        for step, batch in enumerate(batches):
            trained.append(batch)
            if step == 9:
                checkpoint = loader.state_dict()
            if step == 20:
                break
        loader.load_state_dict(checkpoint)
        loader.exclude(steps={0: range(12, 18)})
        loader.exclude(steps={0: [11]})  # of those that are left
        again = list(itertools.islice(loader, 4))
        assert numbers_of(again) == numbers_of([trained[10], *trained[18:21]])


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ({"steps": {0: [600]}}, IndexError, "epoch 0 ends before step 600"),
        ({"steps": {0: [-1]}}, IndexError, "epoch 0 ends before step -1"),
        ({"keys": ["x", 2400]}, KeyError, "no sample 'x'"),
        ({"keys": [2400]}, IndexError, "2400"),
    ],
)
def test_unknown_steps_and_keys_are_refused(arguments, error, problem):
    loader = loader_of("seed")
    with pytest.raises(error, match=problem):
        loader.exclude(**arguments)
    assert len(loader) == 600


def test_steps_of_batches_out_of_order_cannot_be_left_out():
    loader = hr.DataLoader(Numbers(10), 2, shuffle=True, seed=0, in_order=False)
    with pytest.raises(ValueError, match="in_order=False"):
        loader.exclude(steps={0: [1]})
    loader.exclude(keys=[1])


def test_orders_that_are_drawn_cannot_leave_samples_out():
    with pytest.raises(ValueError, match="use shuffle=True with seed="):
        hr.DataLoader(Numbers(10), 2).exclude(keys=[1])
    loader = hr.DataLoader(Numbers(10), 2, shuffle=True, seed=0)
    loader.exclude(keys=[1])
    with pytest.raises(hr.StateError):
        hr.DataLoader(Numbers(10), 2, seed=0).load_state_dict(loader.state_dict())


def test_steps_of_another_batch_size_are_known_since_the_batch_size_changed():
    before = hr.DataLoader(Numbers(40), 4, shuffle=True, seed=0)
    batches = iter(before)
    next(batches), next(batches), next(batches)
    after = hr.DataLoader(Numbers(40), 2, shuffle=True, seed=0)
    after.load_state_dict(before.state_dict())
    rest = torch.cat(list(batches)).tolist()
    assert next(iter(after)).tolist() == rest[:2]
    for look in (lambda: after.batch_at(0, 1), lambda: after.exclude(steps={0: [1]})):
        with pytest.raises(
            hr.StateError, match="before the number of ranks, batch_size="
        ):
            look()
    assert after.samples_at(0, [3]) == [rest[:2]]
    after.exclude(steps={0: [5]})  # the third batch of 2 samples from here on
    assert torch.cat(list(after)).tolist() == rest[2:4] + rest[6:]
