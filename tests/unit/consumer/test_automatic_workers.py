"""num_workers="auto": batches, states and ends of a loader whose number of workers changes while it runs."""

import json
import os
import threading
import time
import typing
from collections import deque

import numpy as np
import pytest
import torch

import headrace as hr
from headrace._core.consumer import sessions
from headrace.options import Automatic
from tests.datasets import Numbers
from tests.unit.streams import reading


class Search:
    """Sets numbers of workers after so many batches each, in place of the search."""

    numbers: typing.ClassVar[dict] = {}

    def __init__(self, *, asked=True):
        self.asked = self.moves = asked
        self.proposed = 0
        self.chosen, self.next_look, self.looks, self.ended = [], 0.0, 0, []

    tries = False

    def look(self, records, setup, most):
        self.looks += 1
        return self.numbers.get(self.looks)

    def end(self, why):
        self.ended.append(why)


@pytest.fixture
def numbers(monkeypatch):
    """The numbers of workers to set, by the number of batches."""
    numbers: typing.ClassVar[dict] = {}
    monkeypatch.setattr("headrace.loader.WorkerSearch", type("Scripted", (Search,), {"numbers": numbers}))
    monkeypatch.setattr(sessions, "WorkerSearch", Search)
    monkeypatch.setattr(sessions, "RECORDS", 1)
    monkeypatch.setattr(sessions, "usable_cores", lambda: 8.0)
    return numbers


def noisy(sample):
    return sample + torch.randint(1000, ()), hr.get_rank_info().rank


def remember(worker):
    os.environ["WORKER"] = str(worker)


def worker(sample):
    time.sleep(0.0005)  # slower than all the rest, so that each worker is used
    return int(os.environ.get("WORKER", "-1"))


def loader(dataset=None, **arguments):
    arguments = {"num_workers": "auto", "transform": noisy, "seed": 3, **arguments}
    return hr.DataLoader(Numbers(400) if dataset is None else dataset, 4, **arguments)


SCRIPTS = [{5: 2, 40: 4}, {5: 3, 30: 0, 60: 1}, {5: 3, 50: 1}, {5: 2, 6: 0, 7: 3, 8: 1}]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("placement", ["auto", "process"])
def test_batches_are_those_of_a_fixed_number(numbers, script, placement):
    with loader(shuffle=True, num_workers=0) as fixed:
        expected = list(fixed) + list(fixed)
    numbers.update({at: max(number, int(placement == "process")) for at, number in script.items()})
    with loader(shuffle=True, placement=placement) as automatic:
        assert [str(batch) for batch in list(automatic) + list(automatic)] == [str(batch) for batch in expected]
        assert automatic.num_workers == list(numbers.values())[-1]


def test_engine_that_was_made_for_workers_has_them_until_the_next_epoch(numbers):
    with loader(num_workers=0) as fixed:
        expected = [str(list(fixed)) for _ in range(2)]
    numbers.update({5: 0})
    with loader() as automatic:
        automatic.num_workers = Automatic(3)
        for batches, place in zip(expected, ["process", "thread"], strict=True):
            assert str(list(automatic)) == batches
            assert automatic.stats().placement.startswith(place)


@pytest.mark.parametrize("script", SCRIPTS)
def test_samples_of_a_stream_are_those_of_a_fixed_number(numbers, script):
    def stream():
        kept = reading.stream(*range(400)).filter(lambda number: number % 3)
        return kept.map(lambda number: (number, int(torch.randint(9, ()))))

    def stepped():
        return stream().shuffle(10, seed=1).map(lambda sample: sample[0]).filter(bool)

    for make in (stream, stepped):
        numbers.clear()
        with loader(make(), num_workers=0, transform=None) as fixed:
            expected = list(fixed)
        numbers.update(script)
        with loader(make(), transform=None) as automatic:
            assert [str(batch) for batch in automatic] == [str(batch) for batch in expected]


@pytest.mark.parametrize("placement", ["auto", "process"])
def test_batches_are_made_by_the_workers_there_are(numbers, placement):
    with loader(Numbers(10**8), transform=worker, worker_init_fn=remember, placement=placement) as automatic:
        batches = iter(automatic)
        search = automatic._control.sessions.search

        def workers_seen(expected, set_to=None):
            """Read until these have made batches, and none but these the last 100."""
            if set_to is not None:
                numbers[search.looks + 1] = set_to
            last = deque(maxlen=100)
            while len(last) < 100 or set(last) != expected:
                last.append(int(next(batches)[0]))

        workers_seen({-1} if placement == "auto" else {0})
        workers_seen({0, 1}, set_to=2)
        workers_seen({0, 1, 2, 3, 4}, set_to=5)
        workers_seen({0}, set_to=1)
        if placement == "auto":
            workers_seen({-1}, set_to=0)
            workers_seen({0, 1}, set_to=2)
        assert automatic.stats().worker_deaths == 0


def test_iterators_of_one_loader_go_on_where_another_has_taken_the_workers_back(numbers):
    with loader(Numbers(10**6), transform=worker, worker_init_fn=remember) as made:
        one, other = iter(made), iter(made)
        search = made._control.sessions.search
        next(other)  # a search looks after batches of the iterator that was begun last
        numbers[search.looks + 1] = 2
        while -1 in next(one):
            pass
        next(other)
        numbers[search.looks + 1] = 0
        next(other)
        assert made.num_workers == 0
        for batches in (one, other):
            for _ in range(300):  # more than were planned
                batch = next(batches)
            assert set(batch.tolist()) == {-1}


def test_state_begins_with_the_workers_found(numbers):
    numbers.update({2: 3})
    with loader() as automatic:
        batches = iter(automatic)
        first = [next(batches) for _ in range(10)]
        state = json.loads(json.dumps(automatic.state_dict()))
        assert batches.state_dict() == automatic.state_dict()
    numbers.clear()
    with loader() as restored:
        restored.load_state_dict(state)
        assert (restored.num_workers, type(restored.num_workers)) == (3, Automatic)
        rest = list(restored)
        assert "process" in restored.stats().placement
    with loader(num_workers=2) as fixed:
        assert [str(batch) for batch in fixed] == [str(batch) for batch in first + rest]
        fixed.load_state_dict(state)
        assert fixed.num_workers == 2


def test_state_of_a_larger_machine_is_cut_to_the_cores(numbers, monkeypatch):
    numbers.update({2: 6})
    with loader() as automatic:
        batches = iter(automatic)
        for _ in range(4):
            next(batches)
        state = automatic.state_dict()
    monkeypatch.setattr(sessions, "usable_cores", lambda: 4.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with loader() as restored:
        restored.load_state_dict(state)
        assert restored.num_workers == 2


def test_transform_that_cannot_be_pickled_stays_in_the_loop(numbers):
    numbers.update({2: 3, 4: 2})
    lock = threading.Lock()

    def locked(sample):
        with lock:
            return sample

    with loader(transform=locked) as automatic:
        assert len(list(automatic)) == 100
        assert automatic.num_workers == 0
        assert "transform" in automatic._control.sessions.search.ended[0]


def test_loop_may_end_at_any_moment_of_a_change(numbers):
    numbers.update({2: 3})
    for batches in (2, 3, 10):
        automatic = loader()
        iterator = iter(automatic)
        for _ in range(batches):
            next(iterator)
        automatic.close()


def test_errors_of_workers_that_were_added_are_the_users(numbers):
    numbers.update({2: 2})

    def failing(sample):
        if sample == 399:
            raise ValueError("sample 399")
        return sample

    with loader(transform=failing) as automatic, pytest.raises(ValueError, match="sample 399"):
        list(automatic)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": np.arange(8)}, "needs an async dataset"),
        ({"executor": "thread"}, "leave out executor="),
        ({"multiprocessing_context": "spawn"}, "leave out executor= and multiprocessing_context="),
        ({"placement": hr.RayPlacement()}, "RayPlacement exclude each other"),
    ],
)
def test_arguments_that_exclude_it(arguments, message):
    with pytest.raises(ValueError, match=message):
        loader(**arguments)


def test_loader_shows_it_and_is_rebuilt_with_it():
    automatic = loader()
    assert "num_workers='auto'" in repr(automatic)
    assert (automatic.num_workers, automatic.prefetch_factor) == (0, 2)
    assert type(loader(num_workers=automatic.num_workers).num_workers) is Automatic
    assert loader(engines=2).num_workers == 2
    assert loader(persistent_workers=True, prefetch_factor=3).prefetch_factor == 3
