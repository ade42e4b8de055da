"""num_workers="auto": batches, states and ends of a loader whose number of workers changes while it runs."""

import os
import signal
import threading
import time
from collections import deque

import numpy as np
import pytest
import torch

import headrace as hr
from headrace._consumer import control
from headrace._eventloop.waiting import wait_readable
from tests.datasets import Numbers
from tests.unit.streams import reading


@pytest.fixture
def numbers(monkeypatch):
    """The numbers of workers to set, by the number of batches, in place of the search."""
    numbers = {}

    class Scripted:
        next_look = 0.0

        def __init__(self, least, number):
            self.least, self.number, self.looks = least, number, 0

        def look(self, records, setup):
            self.looks += 1
            before, self.number = self.number, numbers.get(self.looks, self.number)
            return self.number != before

    monkeypatch.setattr(control, "WorkerSearch", Scripted)
    monkeypatch.setattr(control, "RECORDS", 1)
    monkeypatch.setattr(control, "usable_cores", lambda: 8.0)
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


SCRIPTS = [{5: 2, 40: 4}, {5: 3, 30: 1, 60: 2}, {5: 2, 6: 1, 7: 3, 8: 1}]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("placement", ["auto", "thread"])
def test_batches_are_those_of_a_fixed_number(numbers, script, placement):
    with loader(shuffle=True, num_workers=0) as fixed:
        expected = list(fixed) + list(fixed)
    numbers.update(script)
    with loader(shuffle=True, placement=placement) as automatic:
        assert automatic.num_workers == 1
        assert [str(batch) for batch in list(automatic) + list(automatic)] == [
            str(batch) for batch in expected
        ]
        assert automatic.num_workers == list(numbers.values())[-1]


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
            assert [str(batch) for batch in automatic] == [
                str(batch) for batch in expected
            ]


@pytest.mark.parametrize("placement", ["auto", "thread"])
def test_batches_are_made_by_the_workers_there_are(numbers, placement):
    with loader(
        Numbers(10**8), transform=worker, worker_init_fn=remember, placement=placement
    ) as automatic:
        for expected in ({0}, {0, 1}, {0, 1, 2, 3, 4}, {0}):
            numbers[automatic._control.search.looks + 1] = len(expected)
            # each epoch has the workers of the one before
            batches, last = (iter(automatic), deque(maxlen=100))
            while len(last) < 100 or set(last) != expected:
                last.append(int(next(batches)[0]))
        assert automatic.stats().worker_deaths == 0


def test_engine_that_is_started_again_has_the_workers_that_were_found(numbers):
    numbers.update({2: 3})
    with loader(worker_init_fn=remember, transform=worker) as automatic:
        list(automatic)
        process = automatic._control.placements._current._engines[0].process
        process.signal(signal.SIGKILL)
        wait_readable(process.sentinel, timeout=120)
        assert set(torch.cat(list(automatic)).tolist()) == {0, 1, 2}


def test_functions_are_in_workers_from_the_first_batch():
    lock = threading.Lock()

    def locked(sample):
        with lock:
            return sample

    with loader(transform=worker, worker_init_fn=remember) as automatic:
        assert next(iter(automatic)).tolist() == [0, 0, 0, 0]
    with (
        loader(transform=locked) as automatic,
        pytest.raises(hr.errors.NotPicklableError, match="transform"),
    ):
        iter(automatic)


class Augment:
    """A transform with a generator that the program draws from too."""

    def __init__(self):
        self.torchs, self.numpys = (
            torch.Generator().manual_seed(3),
            np.random.default_rng(3),
        )

    def __call__(self, sample):
        return (
            sample + torch.rand((), generator=self.torchs).item() + self.numpys.random()
        )

    def draw(self):
        return [torch.rand((), generator=self.torchs).item(), self.numpys.random()]


@pytest.mark.parametrize("num_workers", [2, "auto"])
def test_generators_of_the_program_go_on_beside_the_workers_that_have_a_copy(
    numbers, num_workers
):
    numbers.update({2: 3, 20: 1})
    augment, alone = Augment(), Augment()
    with loader(transform=augment, num_workers=num_workers) as automatic:
        drawn = [augment.draw() for _ in automatic] + [augment.draw() for _ in automatic]
    assert drawn == [alone.draw() for _ in drawn]


def test_loop_may_end_at_any_moment_of_a_change(numbers):
    numbers.update({2: 3})
    for batches in (2, 3, 10):
        automatic = loader()
        iterator = iter(automatic)
        for _ in range(batches):
            next(iterator)
        automatic.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": np.arange(8)},
        {"multiprocessing_context": "spawn"},
        {"placement": hr.RayPlacement()},
    ],
)
def test_arguments_that_exclude_it(arguments):
    with pytest.raises(
        ValueError, match="needs an async dataset, engines on this machine"
    ):
        loader(**arguments)


def test_loader_is_rebuilt_with_it():
    automatic = loader()
    assert (automatic.num_workers, automatic.prefetch_factor) == (1, 2)
    rebuilt = loader(
        **{
            name: vars(automatic)[name]
            for name in ("num_workers", "prefetch_factor", "collate_fn")
        }
    )
    assert vars(rebuilt)["num_workers"] == "auto"
    assert rebuilt._control.spec.look_ahead(
        rebuilt
    ) == automatic._control.spec.look_ahead(automatic)
    assert loader(engines=2).num_workers == 2
    assert loader(persistent_workers=True, prefetch_factor=3).prefetch_factor == 3


def test_number_that_is_set_later_ends_the_search(numbers):
    numbers.update({2: 3})
    with loader(worker_init_fn=remember, transform=worker) as automatic:
        automatic.num_workers = 2
        assert set(torch.cat(list(automatic)).tolist()) == {0, 1}
        assert automatic.num_workers == 2
