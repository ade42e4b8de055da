"""A loader continues after the last delivered batch; a state of another loader is refused."""

import contextlib
import copy
import gc
import itertools
import json
import os
import pickle
import random
import signal
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from headrace import (
    AsyncIterableDataset,
    DataLoader,
    ElasticSampler,
    StateError,
    merge_states,
)
from tests.datasets import Numbers, TorchStream
from tests.model.parts import Shifted
from tests.unit.consumer.test_timeouts import Held
from tests.unit.engine.test_states import Reads
from tests.unit.streams.reading import stream

N = 13


CASES = {
    "sequential": lambda: DataLoader(Numbers(N), 3),
    "shuffled by torch": lambda: DataLoader(Numbers(N), 3, shuffle=True),
    "shuffled by seed": lambda: DataLoader(Numbers(N), 3, shuffle=True, seed=0),
    "torch dataset": lambda: DataLoader(range(N), 3, shuffle=True),
    "a sampler with a state": lambda: DataLoader(Numbers(N), 3, sampler=Shifted(N)),
}


def values(batch):
    return torch.as_tensor(batch).tolist()


def epochs(loader, count):
    return [[values(batch) for batch in loader] for _ in range(count)]


def saved(loader):
    """The state, through JSON."""
    return json.loads(json.dumps(loader.state_dict()))


def saved_after(loader, batches):
    """Some batches, and the state after them."""
    iterator = iter(loader)
    given = [values(next(iterator)) for _ in range(batches)]
    state = saved(loader)
    iterator.close()
    return given, state


def restored(loader, state):
    loader.load_state_dict(state)
    return loader


# States within an epoch


class Draws(Dataset):
    """Random numbers; the process that draws those of sample 3 dies if a file is not there yet."""

    def __init__(self, dies_once=None):
        self.dies_once = dies_once

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3 and self.dies_once is not None and not self.dies_once.exists():
            self.dies_once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.rand(()).item(), np.random.random(), random.random()


def drawn_by(count, state, **options):
    """Numbers of some of the epochs' batches, of a loader of its own, and its state then."""
    with DataLoader(Draws(), None, num_workers=1, collate_fn=list, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        epochs = itertools.chain.from_iterable(iter(lambda: iter(loader), None))
        numbers = [
            number for batch in itertools.islice(epochs, count) for number in batch
        ]
        return numbers, loader.state_dict()


@pytest.mark.parametrize("count", [2, 6, 8])
@pytest.mark.parametrize(
    "persistent", [[True] * 3, [True, False, False], [False] * 3], ids=str
)
def test_workers_of_a_torch_dataset_do_not_draw_again_what_was_drawn_before_the_state(
    count, persistent
):
    seen, state = [], None
    for persists in persistent:
        numbers, state = drawn_by(count, state, persistent_workers=persists)
        seen += numbers
    assert len(set(seen)) == len(seen) == 3 * 3 * count


def test_replaced_worker_of_a_torch_dataset_does_not_draw_again_what_the_other_drew(
    tmp_path,
):
    with DataLoader(
        Draws(tmp_path / "died"), None, num_workers=1, collate_fn=list
    ) as loader:
        numbers = [number for batch in loader for number in batch]
    assert len(set(numbers)) == len(numbers) == 3 * 6


def test_set_epoch_has_no_effect_while_a_restored_epoch_is_pending():
    make = CASES["shuffled by seed"]
    whole = epochs(make(), 4)
    loader = make()
    loader.set_epoch(1)
    _, state = saved_after(loader, 2)
    continued = restored(make(), state)
    continued.set_epoch(0)
    iterator = iter(continued)
    continued.set_epoch(3)  # in a restored iteration it is for the next one
    assert [values(batch) for batch in iterator] == whole[1][2:]
    assert epochs(continued, 1)[0] == whole[3]


def test_state_is_small_whatever_the_length_and_has_always_the_same_keys():
    loader = DataLoader(Numbers(10**9), 64, shuffle=True, seed=0)
    keys = list(loader.state_dict())
    next(iter(loader))
    assert list(loader.state_dict()) == keys
    assert len(json.dumps(loader.state_dict())) < 1000


def test_states_of_several_iterators_are_their_own_and_len_is_that_of_the_whole_epoch():
    loader = CASES["sequential"]()
    first, second = iter(loader), iter(loader)
    next(first), next(first), next(second)
    assert [each.state_dict()["state"][0]["cursor"] for each in (first, second)] == [6, 3]
    assert loader.state_dict() == second.state_dict()
    continued = restored(CASES["sequential"](), first.state_dict())
    assert len(continued) == len(iter(continued)) == 5


def test_state_of_earlier_batches_is_known_to_a_caller_that_reads_ahead():
    loader = CASES["sequential"]()
    iterator = iter(loader)
    states = [iterator.state_dict()]
    for _ in range(4):
        next(iterator)
        states.append(iterator.state_dict())
    assert [iterator.state_dict(lag) for lag in range(5)] == states[::-1]
    with pytest.raises(ValueError, match="lag=5 must be 0 to 4"):
        iterator.state_dict(5)
    assert list(iterator)
    assert loader.state_dict(lag=2) == states[-1]


def test_earlier_state_is_known_after_a_last_batch_that_lost_all_samples():
    def make():
        options = {"on_error": "skip", "transform": lambda sample: 1 / (N - 1 - sample)}
        return DataLoader(Numbers(N), 3, sampler=Shifted(N), **options)

    loader = make()
    list(loader)
    continued = restored(make(), loader.state_dict(lag=1))
    assert list(continued) == []
    assert epochs(continued, 1) == epochs(loader, 1)


@pytest.mark.parametrize("method", ["aget", "agets"])
def test_loader_that_is_dropped_after_an_error_of_a_fetch_is_freed(method):
    class Fails(Numbers):
        pass

    async def fail(self, index):
        raise ValueError(index)

    setattr(Fails, method, fail)

    freed = threading.Event()

    def use():
        loader = DataLoader(Fails(8), 2)
        weakref.finalize(loader, freed.set)
        with contextlib.suppress(ValueError):
            next(iter(loader))

    use()
    while not freed.is_set():  # the engine's thread may still be at the error
        gc.collect()


def test_loader_with_a_state_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        loader = CASES["shuffled by seed"]()
        freed = weakref.ref(loader)
        next(iter(loader))
        loader.state_dict()
        del loader
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
)
def test_copy_of_a_loader_with_a_pending_restore_continues_too(copied):
    make = CASES["shuffled by seed"]
    whole = epochs(make(), 2)
    _, state = saved_after(make(), 2)
    continued = restored(make(), state)
    other = copied(continued)
    for each in (other, continued):
        assert epochs(each, 2) == [whole[0][2:], whole[1]]


# States without a batch of the epoch: before the first iteration, after the loop, or of an
# iterator just made.


def test_dataset_in_workers_has_its_state_after_an_epoch_without_batches():
    def make():
        return DataLoader(Reads(4), None, num_workers=1, persistent_workers=True)

    with make() as loader:
        for _ in loader:
            state = loader.state_dict()
        second = list(loader)
        assert second == [[0, 5], [1, 6], [2, 7], [3, 8]]
    with restored(make(), state) as continued:
        assert list(continued) == []
        assert list(continued) == second


class Log(AsyncIterableDataset[int]):
    """A stream whose state outlives an epoch: each gives the next four records."""

    def __init__(self):
        self.next = 0

    async def __aiter__(self):
        for _ in range(4):
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.parametrize(
    ("make", "is_iterator_made"), [(Log, True), (lambda: Log().map(int), False)]
)
def test_dataset_whose_state_outlives_an_epoch_continues(make, is_iterator_made):
    loader = DataLoader(make(), batch_size=1)
    list(loader)
    iterator = iter(loader) if is_iterator_made else None
    continued = restored(DataLoader(make(), batch_size=1), saved(loader))
    assert epochs(continued, 1) == [[[4], [5], [6], [7]]]
    del iterator


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_dataset_whose_state_outlives_an_epoch_continues_from_the_last_batch(placement):
    loaders = [DataLoader(Log(), batch_size=3, placement=placement) for _ in range(2)]
    with loaders[0] as loader:
        for _ in loader:
            state = saved(loader)
    with restored(loaders[1], state) as continued:
        assert epochs(continued, 2) == [[], [[4, 5, 6], [7]]]


class Pairs(Sampler):
    """Pairs of the indices of a sampler, which has drawn one index more."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return map(list, itertools.pairwise(self.inner))


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("outer", [Pairs, lambda inner: BatchSampler(inner, 2, False)])
@pytest.mark.parametrize("argument", ["batch_sampler", "sampler"])
@pytest.mark.parametrize("kind", ["state", "generator", "epoch"])
def test_sampler_within_another_sampler_continues(kind, argument, outer, epoch):
    def make():
        inner = {
            "state": lambda: Shifted(N),
            "generator": lambda: RandomSampler(
                range(N), generator=torch.Generator().manual_seed(3)
            ),
            "epoch": lambda: DistributedSampler(range(N), 1, 0, seed=5),
        }[kind]()
        options = {"batch_size": None} if argument == "sampler" else {}
        return DataLoader(
            Numbers(N), collate_fn=list, **{argument: outer(inner)}, **options
        )

    loader = make()
    for _ in range(epoch):
        list(loader)
    states, batches = [saved(loader)], []
    for batch in loader:
        batches.append(batch)
        states.append(saved(loader))
    following = list(loader)
    for number in (0, 2, len(batches)):
        continued = restored(make(), states[number])
        assert list(continued) == batches[number:]
        assert list(continued) == following


def noisy(sample):
    return sample, float(torch.rand(()))


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize(
    "order",
    [{"shuffle": True}, {"sampler": WeightedRandomSampler([1.0] * N, N)}],
    ids=["shuffled", "weighted"],
)
def test_order_and_random_numbers_of_an_epoch_after_a_restored_state_are_saved(
    order, epochs
):
    def loader():
        return DataLoader(Numbers(N), 2, transform=noisy, collate_fn=list, **order)

    first = loader()
    for _ in range(epochs):
        list(first)
    second = restored(loader(), saved(first))
    batches = iter(second)
    for _ in range(3):
        next(batches)
        state = saved(second)
        torch.manual_seed(0)  # the program that continues has other generators
        rest = list(restored(loader(), state))
    assert rest == list(batches)


class Noise(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return noisy(index)


class NoiseStream(IterableDataset):
    def __iter__(self):
        return map(noisy, range(N))


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Noise(), {"num_workers": 1}),
        (NoiseStream(), {"num_workers": 1}),
        (Numbers(N), {"transform": noisy}),
    ],
    ids=["torch", "torch, a stream", "async"],
)
def test_state_between_epochs_changes_no_epoch_and_the_next_one_follows_torchs_generator(
    dataset, options, epochs
):
    def make():
        return DataLoader(dataset, 2, collate_fn=list, **options)

    def run(saves):
        torch.manual_seed(7)
        loader = make()
        given = [list(loader) for _ in range(epochs)]
        generator = torch.get_rng_state()
        state = saved(loader) if saves else None
        return [*given, list(loader)], state, generator

    whole, _, _ = run(False)
    given, state, generator = run(True)
    assert given == whole
    continued = restored(make(), state)
    torch.set_rng_state(generator)  # by the program that continues
    assert list(continued) == whole[-1]


def test_order_of_a_sampler_whose_epoch_the_program_sets_is_restored():
    def loader():
        sampler = DistributedSampler(range(N), 1, 0)
        return DataLoader(list(range(N)), 4, sampler=sampler), sampler

    first, sampler = loader()
    list(first)
    between = saved(first)
    sampler.set_epoch(1)
    (whole,) = epochs(first, 1)
    sampler.set_epoch(1)
    batches = iter(first)
    next(batches)
    for state, expected in ((between, whole), (saved(first), whole[1:])):
        continued, sampler = loader()
        continued.load_state_dict(state)
        sampler.set_epoch(1)
        assert epochs(continued, 1) == [expected]


# States that are refused

DIFFERENT = {
    "length": (
        lambda: DataLoader(Numbers(12), 3, shuffle=True, seed=0),
        r"len\(dataset\) was 13, and is 12",
    ),
    "seed": (
        lambda: DataLoader(Numbers(N), 3, shuffle=True, seed=1),
        "seed was 0, and is 1",
    ),
    "order": (
        lambda: DataLoader(Numbers(N), 3, seed=0),
        "sampler was .*, and is SequentialSampler",
    ),
    "kind": (
        lambda: DataLoader(range(N), 3, shuffle=True, seed=0),
        "dataset was async map, and is map",
    ),
}


@pytest.mark.parametrize(("make", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_state_of_another_loader_is_refused_with_the_difference(make, message):
    _, state = saved_after(CASES["shuffled by seed"](), 2)
    with pytest.raises(StateError, match=message):
        make().load_state_dict(state)


@pytest.mark.parametrize("make", [TorchStream, Reads])
def test_another_number_of_workers_that_read_streams_or_have_a_state_is_refused(make):
    def loader(num_workers):
        return DataLoader(make(N), 2, num_workers=num_workers)

    with loader(2) as first:
        next(iter(first))
        state = saved(first)
    with pytest.raises(StateError, match="num_workers was 2, and is 1"):
        loader(1).load_state_dict(state)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: SequentialSampler(range(n)),
        lambda n: RandomSampler(range(N), num_samples=n),
    ],
)
def test_sampler_of_another_length_is_refused(make):
    _, state = saved_after(DataLoader(list(range(N)), 2, sampler=make(6)), 1)
    with pytest.raises(StateError, match="length=6"):
        DataLoader(list(range(N)), 2, sampler=make(N)).load_state_dict(state)


def damaged(state, **changes):
    (values,) = state["state"]
    return {**state, "state": [{**values, **changes}]}


def test_damaged_states_are_refused():
    _, state = saved_after(CASES["shuffled by seed"](), 2)
    loader = CASES["shuffled by seed"]()
    for wrong, message in (
        ({}, "no state of a headrace.DataLoader"),
        ({"_snapshot": 1}, r"no state of a headrace\.DataLoader: {'_snapshot': 1}"),
        ({**state, "version": "x"}, "no state of a headrace.DataLoader"),
        ({**state, "headrace": None}, "no state of a headrace.DataLoader"),
        ({**state, "state": None}, "damaged"),
        ({**state, "state": []}, "damaged"),
        ({**state, "state": [3]}, "damaged"),
        (damaged(state, cursor=9), "edited: its checksum does not match"),
        (damaged(state, more=9), "edited: its checksum does not match"),
    ):
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(wrong)
    assert len(epochs(loader, 1)[0]) == 5  # nothing was restored


WRONG = (None, -1, 10**30, 1.5, "x", [], [1], [[1]], {}, {"a": 1}, True)


@pytest.mark.parametrize(
    "name",
    ["shuffled by seed", "shuffled by torch", "a sampler with a state", "torch dataset"],
)
def test_edited_states_are_refused(name):
    for count in (0, 2):
        _, state = saved_after(CASES[name](), count)
        (values,) = state["state"]
        wrong = [{**values, field: value} for field in values for value in WRONG]
        wrong += [
            {key: value for key, value in values.items() if key != field}
            for field in values
        ]
        for edited in (each for each in wrong if each != values):
            with pytest.raises(StateError):
                CASES[name]().load_state_dict({**state, "state": [edited]})


class Unseeded:
    def __iter__(self):
        yield from np.random.permutation(N).tolist()


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            {"batch_size": 3, "sampler": Unseeded()},
            {"batch_size": 3, "sampler": Unseeded()},
            "Unseeded gives another",
        ),
        (
            {"batch_sampler": [[0], [1], [2]]},
            {"batch_sampler": [[0]]},
            "ended after 1 draws, but 2 were given out",
        ),
    ],
    ids=["other order", "shorter"],
)
def test_sampler_with_another_order_than_before_is_refused(before, now, message):
    _, state = saved_after(DataLoader(Numbers(N), **before), 2)
    continued = restored(DataLoader(Numbers(N), **now), state)
    with pytest.raises(StateError, match=message):
        next(iter(continued))


# Batches out of order: with in_order=False, a restored loader does not give a batch again that was
# given out before others.

LENGTH = 24


@pytest.mark.parametrize("in_order", [False, True])
def test_each_sample_is_given_once_by_a_loader_interrupted_three_times(in_order):
    def loader(*held, in_order=False):
        return DataLoader(Held(*held, length=LENGTH), 2, in_order=in_order)

    given, state = saved_after(loader(2, 10), 4)
    assert [2, 3] not in given
    # the first ends between batches that were given out before
    for held, batches in (((10,), 1), ((10, 20), 2)):
        more, state = saved_after(restored(loader(*held), state), batches)
        given += more
    given += epochs(restored(loader(in_order=in_order), state), 1)[0]
    assert sorted(itertools.chain(*given)) == list(range(LENGTH))


def test_another_batch_size_is_refused_until_the_epoch_has_ended():
    with DataLoader(Held(2, length=LENGTH), 2, in_order=False) as loader:
        _, state = saved_after(loader, 3)
    continued = restored(DataLoader(Numbers(LENGTH), 3, in_order=False), state)
    with pytest.raises(
        StateError, match=r"batch_size=2, and batch_size is 3 now: .* the end of epoch 0"
    ):
        iter(continued)


def test_merged_states_of_given_ranks_continue_each_its_own_part():
    def loader(rank, held=(), ranks=2):
        sampler = ElasticSampler(LENGTH, shuffle=False, rank=rank, world_size=ranks)
        return DataLoader(Held(*held, length=LENGTH), 2, sampler=sampler, in_order=False)

    states, left = [], []
    for rank in range(2):
        given, state = saved_after(loader(rank, held=(0, 8)), 3)  # of rank 0 alone
        states.append(state)
        left.append(
            [batch for n in range(rank, LENGTH, 4) if (batch := [n, n + 2]) not in given]
        )
        assert len(left[rank]) == 3
    merged = merge_states(states)
    for rank in range(2):
        (rest,) = epochs(restored(loader(rank), merged), 1)
        assert sorted(rest) == left[rank]
    other = restored(loader(0, ranks=3), merged)
    with pytest.raises(
        StateError, match=r"rank 0 of 2, and this is rank 0 of 3.*in_order=True"
    ):
        iter(other)


def test_batches_of_an_async_stream_come_in_order(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def first_waits_for_second(number):
        if number == 0:
            pipe.read_bytes()
        elif number == 1:
            pipe.write_bytes(b"")
        return number

    options = {"transform": first_waits_for_second, "num_workers": 2, "in_order": False}
    with DataLoader(stream(*range(6)), 1, **options) as loader:
        assert [int(batch) for batch in loader] == list(range(6))
