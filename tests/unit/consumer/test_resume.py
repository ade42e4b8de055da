"""A loader continues after the last delivered batch: every batch of a short epoch, and the next epochs."""

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
from torch.utils.data import SubsetRandomSampler

from headrace import DataLoader, StateError
from headrace._core.order.state import _checksum
from tests.datasets import Numbers

N = 13


class Stateful:
    """A sampler that remembers its position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < N:
            self.position += 1
            yield N - self.position
        self.position = 0  # at the last sample, before the batch with it is planned

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


CASES = {
    "sequential": lambda: DataLoader(Numbers(N), 3),
    "shuffled by torch": lambda: DataLoader(Numbers(N), 3, shuffle=True),
    "shuffled by seed": lambda: DataLoader(Numbers(N), 3, shuffle=True, seed=0),
    "torch dataset": lambda: DataLoader(range(N), 3, shuffle=True),
    "subset": lambda: DataLoader(Numbers(N), 3, sampler=SubsetRandomSampler(range(N))),
    "a sampler with a state": lambda: DataLoader(Numbers(N), 3, sampler=Stateful()),
}


def values(batch):
    return torch.as_tensor(batch).tolist()


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def epochs(loader, count):
    return [[values(batch) for batch in loader] for _ in range(count)]


def saved_after(loader, batches):
    """The state after so many batches, through JSON."""
    iterator = iter(loader)
    given = [values(next(iterator)) for _ in range(batches)]
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    return given, state


class Draws(torch.utils.data.Dataset):
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


def drawn_by(count, state=None, **options):
    """Numbers of some of the epochs' batches, of a loader of its own, and its state then."""
    with DataLoader(Draws(), None, num_workers=1, collate_fn=list, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        epochs = itertools.chain.from_iterable(iter(lambda: iter(loader), None))
        numbers = [number for batch in itertools.islice(epochs, count) for number in batch]
        return numbers, loader.state_dict()


@pytest.mark.parametrize("count", [2, 6, 8])
@pytest.mark.parametrize("persistent", [[True] * 3, [True, False, False], [False] * 3], ids=str)
def test_workers_of_a_torch_dataset_do_not_draw_again_what_was_drawn_before_the_state(
    count, persistent
):
    seen, state = [], None
    for persists in persistent:
        numbers, state = drawn_by(count, state, persistent_workers=persists)
        seen += numbers
    assert len(set(seen)) == len(seen) == 3 * 3 * count


def test_replaced_worker_of_a_torch_dataset_does_not_draw_again_what_the_other_drew(tmp_path):
    with DataLoader(Draws(tmp_path / "died"), None, num_workers=1, collate_fn=list) as loader:
        numbers = [number for batch in loader for number in batch]
    assert len(set(numbers)) == len(numbers) == 3 * 6


def test_dataset_in_workers_has_its_state_after_an_epoch_without_batches():
    class Counts(torch.utils.data.Dataset):
        count = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            self.count += 1
            return self.count

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    def make():
        return DataLoader(Counts(), None, num_workers=1, persistent_workers=True)

    with make() as loader:
        for _ in loader:
            state = loader.state_dict()
        assert list(loader) == [5, 6, 7, 8]
    with make() as restored:
        restored.load_state_dict(state)
        assert list(restored) == []
        assert list(restored) == [5, 6, 7, 8]


def test_set_epoch_has_no_effect_while_a_restored_epoch_is_pending():
    make = CASES["shuffled by seed"]
    whole = epochs(make(), 4)
    loader = make()
    loader.set_epoch(1)
    _, state = saved_after(loader, 2)
    restored = make()
    restored.load_state_dict(state)
    restored.set_epoch(0)
    iterator = iter(restored)
    restored.set_epoch(3)  # in a restored iteration it is for the next one
    assert [values(batch) for batch in iterator] == whole[1][2:]
    assert epochs(restored, 1)[0] == whole[3]


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
    assert [each.state_dict()["state"][0]["samples"] for each in (first, second)] == [6, 3]
    assert loader.state_dict() == second.state_dict()
    restored = CASES["sequential"]()
    restored.load_state_dict(first.state_dict())
    assert len(restored) == len(iter(restored)) == 5


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


async def test_async_iterators_have_a_state_too():
    loader = CASES["shuffled by seed"]()
    whole = epochs(CASES["shuffled by seed"](), 1)[0]
    iterator = aiter(loader)
    await anext(iterator)
    restored = CASES["shuffled by seed"]()
    restored.load_state_dict(iterator.state_dict())
    assert [values(batch) async for batch in restored] == whole[1:]
    await iterator.aclose()


DIFFERENT = {
    "length": (
        lambda: DataLoader(Numbers(12), 3, shuffle=True, seed=0),
        r"len\(dataset\) was 13, and is 12",
    ),
    "seed": (lambda: DataLoader(Numbers(N), 3, shuffle=True, seed=1), "seed was 0, and is 1"),
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


def damaged(state, **changes):
    (values,) = state["state"]
    return {**state, "state": [{**values, **changes}]}


def test_damaged_states_are_refused():
    _, state = saved_after(CASES["shuffled by seed"](), 2)
    loader = CASES["shuffled by seed"]()
    for wrong, message in (
        ({}, "no state of a headrace.DataLoader"),
        ({"_snapshot": 1}, r"no state of a headrace\.DataLoader: \['_snapshot'\]"),
        ({**state, "version": 1}, "format version 1"),
        ({"version": 5}, "damaged: None is not a list of states"),
        ({**state, "state": []}, "damaged: .* is not a list of states"),
        ({**state, "state": [3]}, "damaged: .3. is not a list of states"),
        (damaged(state, samples=9), "edited: its checksum does not match"),
        (damaged(state, more=9), "edited: its checksum does not match"),
        ({**state, "version": 4}, "format version 4, but this release of headrace reads 5"),
    ):
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(wrong)
    assert len(epochs(loader, 1)[0]) == 5  # nothing was restored


WRONG = (None, -1, 10**30, 1.5, "x", [], [1], [[1]], {}, {"a": 1}, True)


@pytest.mark.parametrize(
    "name", ["shuffled by seed", "shuffled by torch", "a sampler with a state", "torch dataset"]
)
def test_edited_states_are_refused(name):
    for count in (0, 2):
        _, state = saved_after(CASES[name](), count)
        (values,) = state["state"]
        wrong = [{**values, field: value} for field in values for value in WRONG]
        wrong += [{key: value for key, value in values.items() if key != field} for field in values]
        for edited in (each for each in wrong if each != values):
            with pytest.raises(StateError):
                CASES[name]().load_state_dict({**state, "state": [edited]})


def test_sampler_with_another_order_than_before_is_refused():
    class Unseeded:
        def __iter__(self):
            yield from np.random.permutation(N).tolist()

    short = ([[0], [1], [2]], [[0]])
    for saved, now, message in (
        (
            {"batch_size": 3, "sampler": Unseeded()},
            {"batch_size": 3, "sampler": Unseeded()},
            "Unseeded gives another",
        ),
        (
            {"batch_sampler": short[0]},
            {"batch_sampler": short[1]},
            "ended after 1 draws, but 2 were given out",
        ),
    ):
        _, state = saved_after(DataLoader(Numbers(N), **saved), 2)
        restored = DataLoader(Numbers(N), **now)
        restored.load_state_dict(state)
        with pytest.raises(StateError, match=message):
            next(iter(restored))


@pytest.mark.filterwarnings("ignore:each of 2 ranks reads all")
@pytest.mark.parametrize("name", ["shuffled by torch", "subset"])
def test_order_that_one_rank_drew_is_refused_on_another(name, as_rank):
    as_rank(0, 2)
    _, state = saved_after(CASES[name](), 1)
    as_rank(1, 2)
    restored = CASES[name]()
    restored.load_state_dict(state)
    with pytest.raises(
        StateError, match=r"saved by rank 0 of 2, and this is rank 1 of 2.*merge_states"
    ):
        iter(restored)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_copy_of_a_loader_with_a_pending_restore_continues_too(copied):
    make = CASES["shuffled by seed"]
    whole = epochs(make(), 2)
    _, state = saved_after(make(), 2)
    restored = make()
    restored.load_state_dict(state)
    other = copied(restored)
    for each in (other, restored):
        assert epochs(each, 2) == [whole[0][2:], whole[1]]


def test_state_with_fields_of_another_release_is_refused():
    _, state = saved_after(CASES["shuffled by seed"](), 2)
    (values,) = state["state"]
    values = {name: value for name, value in values.items() if name not in ("checksum", "lost")}
    values["checksum"] = _checksum(values)
    with pytest.raises(
        StateError, match=r"another release of headrace, whose fields differ in \['lost'\]"
    ):
        CASES["shuffled by seed"]().load_state_dict({**state, "state": [values]})
