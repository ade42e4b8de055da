"""engines="auto": batches and states of a loader whose number of engines changes between epochs."""

import json
import threading

import pytest

import headrace as hr
from headrace._core.consumer import control
from tests.datasets import Numbers
from tests.unit.consumer.test_automatic_workers import Stream, noisy


class Search:
    """Sets numbers of engines after the epochs before them, in place of the search."""

    numbers = (3, 1, 2)
    tries = False

    def __init__(self):
        self.chosen, self._left = [], list(self.numbers)

    def look(self, records, setup, most):
        assert len(records) == 25
        number = self._left.pop(0) if self._left else None
        return number if number is None else min(number, most)

    def end(self, why):
        self.chosen.append(why)
        self._left.clear()


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(control, "EngineSearch", Search)
    monkeypatch.setattr(control, "usable_cores", lambda: 8.0)


def loader(dataset=None, **arguments):
    arguments = {"engines": "auto", "transform": noisy, "seed": 3, "shuffle": True, **arguments}
    return hr.DataLoader(Numbers(100) if dataset is None else dataset, 4, **arguments)


@pytest.mark.parametrize("workers", [0, 2, "auto"])
def test_batches_are_those_of_one_engine(workers):
    with loader(engines=1, num_workers=0) as fixed:
        expected = [str(list(fixed)) for _ in range(5)]
    places = []
    with loader(num_workers=workers) as automatic:
        for batches in expected:
            assert str(list(automatic)) == batches
            places.append((automatic._control.spec.engines, automatic.stats().placement.partition(" ")[0]))
    most = 2 if workers == 2 else 3
    first = "process:" if workers == 2 else "thread:"
    assert places[:2] == [(1, first), (most, "process:")]
    assert [engines for engines, _ in places[2:]] == [1, 2, 2]


def test_state_begins_with_the_engines_found_and_no_more_than_the_cores_allow(monkeypatch):
    with loader() as automatic:
        list(automatic)
        batches = iter(automatic)
        first = [next(batches) for _ in range(10)]
        state = json.loads(json.dumps(automatic.state_dict()))
    assert state == json.loads(json.dumps(state))
    for cores, engines in [(8.0, 3), (4.0, 2), (2.0, 1)]:
        monkeypatch.setattr(control, "usable_cores", lambda cores=cores: cores)
        with loader() as restored:
            restored.load_state_dict(state)
            assert restored._control.spec.engines == engines
            rest = list(restored)
        with loader(engines=1) as fixed:
            fixed.set_epoch(1)
            assert str(list(fixed)) == str(first + rest)


def test_workers_are_not_changed_in_an_epoch_that_tries_engines():
    with loader(num_workers="auto") as automatic:
        for tries in False, True, False:
            automatic._control.engine_search.tries = tries
            assert (iter(automatic)._tune is None) == tries


def test_dataset_that_cannot_be_pickled_stays_in_a_thread():
    dataset = Numbers(100)
    dataset.lock = threading.Lock()
    with loader(dataset) as automatic:
        assert [len(list(automatic)) for _ in range(3)] == [25, 25, 25]
        assert automatic._control.spec.engines == 1
        assert "lock" in automatic.report().chosen[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": list(range(8))}, "needs an async map-style dataset"),
        ({"dataset": Stream(), "shuffle": None}, "needs an async map-style dataset"),
        ({"placement": "thread"}, "engines='auto' and placement='thread' exclude each other"),
        ({"placement": hr.RayPlacement()}, "is for this machine"),
    ],
)
def test_arguments_that_exclude_it(arguments, message):
    with pytest.raises(ValueError, match=message):
        loader(**arguments)


def test_loader_shows_it_and_is_rebuilt_with_it():
    automatic = loader()
    assert "engines='auto'" in repr(automatic)
    assert "engines='auto'" in repr(loader(engines=automatic.engines))
