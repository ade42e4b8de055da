"""Each epoch has an order of its own, wherever the shuffled stream is and whatever holds it."""

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

import headrace as hr
from tests.unit.streams import reading


def shuffled():
    return reading.stream(*range(40)).shuffle(20, seed=3)


class Packed(hr.AsyncIterableDataset):
    """A stream of the user's own around another, which it holds."""

    def __init__(self, inner):
        self.inner = inner

    async def __aiter__(self):
        async for sample in (
            self.inner["streams"][0] if isinstance(self.inner, dict) else self.inner
        ):
            yield sample


class OwnSetEpoch(Packed):
    """The same, which passes on an epoch of its choice."""

    def set_epoch(self, epoch):
        self.inner.set_epoch(100 + epoch)


class Sampled(hr.AsyncIterableDataset):
    """A stream of the user's own that draws its order from torch's sampler."""

    def __init__(self):
        self.sampler = DistributedSampler(range(40), num_replicas=1, rank=0, seed=1)

    async def __aiter__(self):
        for index in self.sampler:
            yield index


class OfTorch(IterableDataset):
    """A stream of torch's kind around one of headrace's."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        if worker is None or worker.id == 0:
            yield from self.inner


def in_generator():
    async def generator():
        async for sample in shuffled():
            yield sample

    return hr.from_async_iterable(generator)


WRAPPERS = {
    "held": lambda: Packed(shuffled()),
    "held in containers": lambda: Packed(
        {"name": "text", "streams": (shuffled(), "weights")}
    ),
    "own set_epoch": lambda: OwnSetEpoch(shuffled()),
    "held under split": lambda: Packed(shuffled()).split(),
    "torch's sampler": Sampled,
    "generator": in_generator,
    "torch's kind around map": lambda: OfTorch(shuffled().map(int)),
    "torch's kind around own": lambda: OfTorch(Packed(shuffled())),
}


IN_PROCESSES = [
    "own set_epoch",
    "held under split",
    "generator",
    "torch's kind around own",
]


def epochs_of(loader, count=3):
    return [torch.cat(list(loader)).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("make", "placement", "num_workers"),
    [
        *((make, "thread", 0) for make in WRAPPERS.values()),
        *((WRAPPERS[name], "process", 2) for name in IN_PROCESSES),
    ],
)
def test_epochs_have_different_reproducible_orders(make, placement, num_workers):
    with hr.DataLoader(make(), 4, placement=placement, num_workers=num_workers) as loader:
        epochs = epochs_of(loader)
        assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 3
        loader.set_epoch(1)
        assert epochs_of(loader, 2) == epochs[1:]


@pytest.mark.parametrize(
    ("around", "placement"), [(Packed, "thread"), (Packed, "process"), (OfTorch, "auto")]
)
def test_running_iteration_keeps_its_epoch_when_another_begins(around, placement):
    repeated = around(shuffled().repeat(9))  # too long to be read ahead
    with hr.DataLoader(repeated, 8, placement=placement) as loader:
        expected = epochs_of(loader, 2)
        loader.set_epoch(0)
        iterators = iter(loader), iter(loader)
        assert [torch.cat([*each]).tolist() for each in iterators] == expected


def test_set_epoch_of_loader_reaches_persistent_workers_of_torch_dataset():
    class EpochRecorder(torch.utils.data.Dataset):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return self.epoch

    with hr.DataLoader(EpochRecorder(), num_workers=1, persistent_workers=True) as loader:
        # As with torch, which does not call it.
        assert [batch.item() for batch in loader] == [-1]
        loader.set_epoch(5)
        assert [batch.item() for batch in loader] == [5]
        assert [batch.item() for batch in loader] == [5]


def test_order_does_not_depend_on_the_wrapper_of_the_stream():
    with (
        hr.DataLoader(shuffled(), 4) as plain,
        hr.DataLoader(in_generator(), 4) as generated,
    ):
        assert epochs_of(plain) == epochs_of(generated)


def test_wrapper_with_set_epoch_sets_the_epoch_of_inner_streams():
    inner = shuffled()
    with hr.DataLoader(OwnSetEpoch(inner), 4) as loader:
        (epoch,) = epochs_of(loader, 1)
    inner.set_epoch(100)
    assert list(inner) == epoch


def test_set_epoch_of_a_dataset_that_raises_is_raised_at_iter():
    class Refuses(Packed):
        def set_epoch(self, epoch):
            raise ValueError(f"no epoch {epoch}")

    for placement in ("thread", "process"):
        loader = hr.DataLoader(Refuses(shuffled()), placement=placement)
        with pytest.raises(ValueError, match="no epoch 0"):
            iter(loader)


# A part of a mix that begins again


def short(count):
    async def generator():
        for number in range(count):
            yield number

    return hr.from_async_iterable(generator).shuffle(count, seed=1)


def mixed(part):
    long = reading.stream(*range(40)).map(lambda number: 1000 + number)
    return hr.mix([part, long], [1, 1], stop="all")


def rounds(samples, length):
    own = [sample for sample in samples if sample < 1000]
    return [
        tuple(own[at : at + length]) for at in range(0, len(own) - length + 1, length)
    ]


@pytest.mark.parametrize(
    "around",
    [lambda stream: stream, Packed, lambda stream: hr.mix([stream], [1])],
    ids=["itself", "own", "mix"],
)
def test_repeated_part_of_a_mix_is_reshuffled(around):
    mix = mixed(around(short(8)))
    orders = rounds(mix, 8)
    assert len(orders) > 2
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert rounds(mix, 8) == orders
    mix.set_epoch(1)
    assert not set(rounds(mix, 8)) & set(orders)
