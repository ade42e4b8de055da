"""engines="auto": batches and states of a loader whose number of engines changes while it is iterated."""

import json
import threading
import typing

import pytest

import headrace as hr
from headrace._core.batches import BatchPlan, HostBatch, StageTimes
from headrace._core.consumer import sessions
from headrace._core.consumer.worker_search import WorkerSearch
from headrace._core.links.session import ChangingSession
from tests.datasets import Numbers
from tests.unit.consumer.test_automatic_workers import noisy
from tests.unit.streams.reading import Count

PLAN = BatchPlan(0, [0, 1, 2, 3], 0)


class Search:
    """Sets numbers of engines, each after so many batches of an epoch at least, in place of the search."""

    numbers: typing.ClassVar[list] = [(10, 3), (40, 1), (60, 2)]
    next_look = 0.0
    tries = False

    def __init__(self):
        self.chosen, self._left = [], list(self.numbers)

    def look(self, records, setup, most):
        if not self._left or len(records) < self._left[0][0]:
            return None
        return min(self._left.pop(0)[1], most)

    def measure_anew(self):
        pass

    def end(self, why):
        self.chosen.append(why)
        self._left.clear()


class Unreadable(Numbers):
    async def aget(self, index):
        if index % 7 == 0:
            raise ValueError(index)
        return index


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(sessions, "EngineSearch", Search)
    monkeypatch.setattr(sessions, "usable_cores", lambda: 8.0)
    monkeypatch.setattr(sessions, "LOOK_SECONDS", 0.0)


def loader(dataset=None, **arguments):
    arguments = {"engines": "auto", "transform": noisy, "seed": 3, "shuffle": True, "concurrency": 16, **arguments}
    return hr.DataLoader(Numbers(1600) if dataset is None else dataset, 4, **arguments)


@pytest.mark.parametrize("workers", [0, 2, "auto"])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 100, "concurrency": 3}])
def test_batches_are_those_of_one_engine(workers, options):
    with loader(engines=1, num_workers=0) as fixed:
        expected = [str(list(fixed)) for _ in range(2)]
    with loader(num_workers=workers, **options) as automatic:
        places, found = [], []
        for batch in automatic:
            place = automatic._control.spec.engines, automatic.stats().placement.partition(":")[0]
            places += [place] if place not in places[-1:] else []
            found.append(batch)
        assert str(found) == expected[0]
        assert str(list(automatic)) == expected[1]
    if workers == 2:
        assert places == [(1, "process"), (2, "process"), (1, "process"), (2, "process")]
    else:
        assert [engines for engines, _ in places] == [1, 3, 1, 2]
        assert [place for _, place in places][:2] == ["thread", "process"]


def test_batches_out_of_order_all_come_once():
    with loader(in_order=False, transform=None) as automatic:
        for _ in range(2):
            assert sorted(int(sample) for batch in automatic for sample in batch) == list(range(1600))


def test_skipped_samples_are_skipped_by_other_engines_too():
    arguments = {"dataset": Unreadable(1600), "on_error": "skip"}
    with loader(engines=1, **arguments) as fixed, loader(**arguments) as automatic:
        assert str(list(automatic)) == str(list(fixed))
        assert automatic.stats().skipped_samples == fixed.stats().skipped_samples == 229


def test_state_begins_with_the_engines_found_and_no_more_than_the_cores_allow(monkeypatch):
    with loader() as automatic:
        batches = iter(automatic)
        first = [next(batches) for _ in range(15)]
        state = json.loads(json.dumps(automatic.state_dict()))
    monkeypatch.setattr(Search, "numbers", [])
    for cores, engines in [(8.0, 3), (4.0, 2), (2.0, 1)]:
        monkeypatch.setattr(sessions, "usable_cores", lambda cores=cores: cores)
        with loader() as restored:
            restored.load_state_dict(state)
            assert restored._control.spec.engines == engines
            rest = list(restored)
        with loader(engines=1) as fixed:
            assert str(list(fixed)) == str(first + rest)


def test_engines_that_were_replaced_end_within_the_epoch():
    with loader() as automatic:
        batches = iter(automatic)
        found = [len(automatic._control.sessions._placements._retired) for _ in batches]
        assert max(found) == 1  # one at a time
        assert found[-1] == 0


def test_loader_that_is_closed_during_a_change_leaves_no_engine():
    before = set(threading.enumerate())
    with loader() as automatic:
        batches = iter(automatic)
        for _ in range(12):  # batches of the first engine are left
            next(batches)
        session = batches._session
        assert session._later is not None
    assert session.ended
    assert set(threading.enumerate()) <= before


def test_engines_that_cannot_be_started_leave_the_epoch_as_it_is(monkeypatch):
    with loader(engines=1) as fixed:
        expected = str(list(fixed))
    with loader() as automatic:
        batches = iter(automatic)
        found = [next(batches) for _ in range(4)]

        def refused(*args, **options):
            raise OSError("no more processes")

        monkeypatch.setattr(automatic._control.sessions._placements, "open", refused)
        found += batches
        assert str(found) == expected
        assert automatic._control.spec.engines == 1
        assert "no more processes" in automatic.report().chosen[0]


class OneBatchEach(list):
    """A session whose batches have these CPU seconds of the engine's thread."""

    def take(self):
        return HostBatch(PLAN, None, 4, times=StageTimes(engine_cpu=self.pop(0)))

    def send(self, plans):
        pass

    def close(self):
        pass


def test_sums_of_the_engines_go_on_over_a_change():
    session = ChangingSession(OneBatchEach([5.0, 7.0]))
    session.send([PLAN, PLAN])
    sums = [session.take().times.engine_cpu]
    session.change_to(OneBatchEach([1.0, 4.0]))
    session.send([PLAN, PLAN])
    sums += [session.take().times.engine_cpu for _ in range(3)]
    session.change_to(OneBatchEach([2.0]))
    session.send([PLAN])
    assert [*sums, session.take().times.engine_cpu] == [5.0, 7.0, 7.0, 10.0, 10.0]


@pytest.mark.parametrize("tried", ["search", "_engine_search"])
def test_workers_and_engines_are_not_tried_at_the_same_time(tried, monkeypatch):
    with loader(num_workers="auto") as automatic:
        monkeypatch.setattr(type(getattr(automatic._control.sessions, tried)), "tries", True)
        monkeypatch.setattr(Search if tried == "search" else WorkerSearch, "look", lambda *args: pytest.fail("looked"))
        assert len(list(automatic)) == 400


def test_dataset_that_cannot_be_pickled_stays_in_a_thread():
    dataset = Numbers(400)
    dataset.lock = threading.Lock()
    with loader(dataset) as automatic:
        assert [len(list(automatic)) for _ in range(2)] == [100, 100]
        assert automatic._control.spec.engines == 1
        assert "lock" in automatic.report().chosen[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": list(range(8))}, "needs an async map-style dataset"),
        ({"dataset": Count(8), "shuffle": None}, "needs an async map-style dataset"),
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
