"""Workers that the program has not asked for get its functions once a batch made there was the same."""

import array
import asyncio
import colorsys
import dataclasses
import itertools
import math
import os
import pickle
import signal
import threading

import numpy as np
import pytest
import torch

import headrace as hr
from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.consumer import sessions
from headrace._core.links.comparison import Comparison, difference
from headrace._core.messages import Twin
from headrace._core.transport.pickling import PickledPayload
from headrace.options import Unset
from tests.datasets import Numbers

MAIN = os.getpid()
NAN = math.nan


class Search(sessions.WorkerSearch):
    """Proposes two workers after five batches, once."""

    def look(self, records, setup, most):
        self.next_look = math.inf if self.moves else 0.0
        return 2 if len(records) >= 5 and not self.moves else None


@pytest.fixture(autouse=True)
def search(monkeypatch):
    monkeypatch.setattr(sessions, "WorkerSearch", Search)
    monkeypatch.setattr("headrace.loader.WorkerSearch", Search)
    monkeypatch.setattr(sessions, "usable_cores", lambda: 8.0)


def loader(dataset=None, **arguments):
    return hr.DataLoader(Numbers(10**6) if dataset is None else dataset, 4, seed=3, **arguments)


def until_decided(made, batches=None, more=0):
    """The batches, as text, until workers make them or the search has ended, and some more."""
    taken, search, batches = [], made._control.sessions.search, batches or iter(made)
    while not search.moves and search.next_look != math.inf:
        taken.append(str(next(batches)))
    return taken + [str(next(batches)) for _ in range(more)]


def expected_of(count, **arguments):
    with loader(num_workers=0, **arguments) as fixed:
        batches = iter(fixed)
        return [str(next(batches)) for _ in range(count)]


def noisy(sample):
    return sample + torch.randint(1000, ()), f"{sample}:{int(np.random.randint(100))}"


def scaled(sample):
    return sample * getattr(colorsys, "factor", 1)  # of a module that workers import


def counted(sample):
    colorsys.calls = getattr(colorsys, "calls", 0) + 1
    return colorsys.calls


def fails_elsewhere(sample):
    assert os.getpid() == MAIN, f"sample {sample}"
    return sample


def dies_elsewhere(sample):
    return sample if os.getpid() == MAIN else os.kill(os.getpid(), signal.SIGKILL)


def cannot_be_sent(sample):
    return sample if os.getpid() == MAIN else threading.Lock()


def fails_at_start(worker):
    raise ValueError("not here")


GENERATORS = np.random.default_rng(0), torch.Generator()


def draws(sample):
    return sample + int(GENERATORS[0].integers(100)) + int(torch.randint(100, (), generator=GENERATORS[1]))


def skips_odd(sample):
    if sample % 2:
        raise ValueError(sample)
    return sample


@pytest.mark.parametrize(
    "arguments",
    [{"transform": noisy, "shuffle": True}, {"transform": draws}, {"transform": skips_odd, "on_error": "skip"}],
    ids=["seeded", "generators of their own", "samples lost in both"],
)
def test_equal_functions_move_and_batches_stay_the_same(arguments):
    arguments = pickle.loads(pickle.dumps(arguments))
    with loader(**arguments) as made:
        got = until_decided(made, more=200)
        assert made.num_workers == 2
        assert type(made.num_workers) is Unset
        assert made._control.sessions.search.moves
    assert got == expected_of(len(got), **arguments)


def stays(made, text):
    """The batches, where functions stay in this process; the search has ended with this sentence."""
    got = until_decided(made, more=20)
    assert made.num_workers == 0
    chosen = made._control.sessions.search.chosen
    assert [said for said in chosen if text in said] == chosen[-1:]
    assert made.report().chosen[-1].endswith('num_workers="auto", or a number, moves them to workers all the same')
    return got


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"transform": scaled}, "differs in a worker: int64 [4]"),
        ({"transform": counted}, "differs in a worker: int64 [4]"),
        ({"transform": fails_elsewhere}, "AssertionError: sample"),
        ({"transform": dies_elsewhere}, "WorkerDiedError"),
        ({"transform": cannot_be_sent, "collate_fn": list}, "Error"),
        ({"transform": scaled, "worker_init_fn": fails_at_start}, "not here"),
    ],
)
def test_functions_that_differ_or_fail_in_a_worker_stay(monkeypatch, caplog, arguments, text):
    monkeypatch.setattr(colorsys, "factor", 7, raising=False)
    monkeypatch.setattr(colorsys, "calls", 0, raising=False)
    with loader(**arguments) as made, caplog.at_level("INFO", "headrace"):
        got = stays(made, text)
        logged = [record for record in caplog.records if record.module == "worker_search"]
        assert made._control.sessions.search.chosen == [record.getMessage() for record in logged]
        assert {record.levelname for record in logged} == {"INFO"}
        colorsys.calls = 0
        assert got == expected_of(len(got), **arguments)
        colorsys.calls = 0
        assert until_decided(made, more=20) == got[:20]
        assert made.num_workers == 0


def test_functions_with_a_state_or_that_cannot_be_pickled_stay():
    seen, lock = [], threading.Lock()

    def locked(sample):
        with lock:
            return sample

    with loader(transform=lambda sample: seen.append(sample) or sample) as made:
        got = stays(made, "the functions change when they are called")
        assert len(seen) == 4 * len(got)
    with loader(transform=locked) as made:
        until_decided(made, more=20)
        assert made.num_workers == 0
        assert "transform" in made._control.sessions.search.chosen[0]


def test_batch_that_fails_in_both_is_raised_and_the_next_one_is_compared():
    def fails(sample):
        if 4 * 6 <= sample < 4 * 200:
            raise ValueError(f"sample {sample}")
        return sample

    with loader(transform=fails) as made:
        batches, errors = iter(made), 0
        while not made._control.sessions.search.moves:
            try:
                next(batches)
            except ValueError:
                errors += 1
        assert errors >= 194
        assert made.num_workers == 2


def test_samples_are_those_of_the_consumer_where_its_functions_change_them():
    class Arrays(Numbers):
        async def aget(self, index):
            return np.full(10**5, index)

    def add(sample):
        sample += 1
        return sample

    with loader(Arrays(10**6), transform=add) as made:
        batches = iter(made)
        while not made._control.sessions.search.moves and made._control.sessions.search.next_look != math.inf:
            next(batches)[:] = -1
        assert made.num_workers == 2


def test_worker_that_never_answers_holds_nothing_up(tmp_path):
    def waits(sample):
        if os.getpid() != MAIN:
            (tmp_path / "begun").touch()
            signal.sigwait([signal.SIGTERM])
            os._exit(0)
        return sample

    with loader(transform=waits) as made:
        batches = iter(made)
        while not (tmp_path / "begun").exists():
            next(batches)
        for _ in range(100):
            next(batches)
        assert made.num_workers == 0
        batches.close()


def test_functions_before_batching_stay():
    class Stream(hr.AsyncIterableDataset):
        async def __aiter__(self):
            for number in range(400):
                yield number

    with loader(Stream().map(scaled).filter(bool), transform=noisy) as made:
        until_decided(made)
        assert made.num_workers == 0
        assert "before batching" in made._control.sessions.search.chosen[0]
    with loader(Stream(), transform=noisy) as made, loader(Stream(), transform=noisy, num_workers=0) as fixed:
        assert str(list(made) + list(made)) == str(list(fixed) + list(fixed))


def test_numbers_of_other_loaders_are_compared_first():
    with loader(transform=noisy) as found:
        batches = iter(found)
        until_decided(found, batches)
        state = found.state_dict()
    with loader(transform=lambda sample: int(os.getpid() == MAIN)) as restored:
        restored.load_state_dict(state)
        assert set(until_decided(restored, more=20)) == {str(torch.ones(4, dtype=torch.int64))}
        assert restored.num_workers == 0
    with pickle.loads(pickle.dumps(found)) as copy:
        batches = iter(copy)
        assert copy.num_workers == 0
        assert copy._control.states(copy, 0)[0].found["num_workers"] == 2
        until_decided(copy, batches)
        assert copy.num_workers == 2


def test_dataset_stays_where_the_program_has_not_asked_for_workers():
    class Here(Numbers):
        async def aget(self, index):
            return os.getpid()

    with loader(Here(400), transform=scaled) as made:
        while not made._control.sessions.search.moves:
            list(made)
        assert {pid for batch in made for pid in batch.tolist()} == {MAIN}
        assert made.num_workers == 2
        assert made.stats().placement.startswith("thread: functions moved to workers")


def moved(made):
    """The batches of an epoch, as text, once functions have moved."""
    while not made._control.sessions.search.moves:
        got = [*map(str, made)]
        assert made._control.sessions.search.next_look != math.inf or made.num_workers == 2
    return got


def test_later_epochs_have_the_same_engine_and_its_workers():
    loops = set()

    class Connected(Numbers):
        async def aget(self, index):
            loops.add(asyncio.get_running_loop())
            return index

    with loader(Connected(2000), transform=noisy) as made:
        moved(made)
        for _ in range(2):
            list(made)
            assert made._control.sessions.counters.records()[-1].times.worked_by[0] != MAIN
        assert made.num_workers == 2
        assert len(loops) == 1
        assert made.stats().placement.startswith("thread: functions moved to workers")


def test_functions_that_cannot_be_pickled_any_more_stay_from_the_next_epoch_on():
    class Transform:
        def __call__(self, sample):
            return sample

    transform = Transform()
    with loader(Numbers(2000), transform=transform) as made:
        expected = moved(made)
        transform.lock = threading.Lock()
        assert [*map(str, made)] == expected
        assert made.num_workers == 0
        assert "cannot be pickled" in made.report().chosen[-1]


def test_functions_that_were_put_in_their_place_are_compared_too():
    counts = itertools.count()
    with loader(Numbers(2000), transform=noisy) as made:
        moved(made)
        made.collate_fn = lambda samples: next(counts)
        assert [*made] == [*range(500)]
        assert made.num_workers == 0


def test_worker_makes_its_version_after_the_consumer(tmp_path):
    class Files(Numbers):
        async def aget(self, index):
            (path := tmp_path / str(index)).write_text(str(index))
            return path

    def read(path):
        text = path.read_text()
        path.unlink()
        return int(text)

    with loader(Files(2000), transform=read) as made:
        stays(made, "FileNotFoundError")


def test_objects_of_a_class_of_a_script_are_no_change_of_the_functions():
    @dataclasses.dataclass
    class Sample:
        number: int

    with loader(transform=lambda sample: Sample(sample), collate_fn=list) as made:
        until_decided(made)
        assert made.num_workers == 2


Point = dataclasses.make_dataclass("Point", ["x", "values"])
SENTINEL, NAMED = object(), torch.zeros(2)
NAMED.path = "a.jpg"


@pytest.mark.parametrize(
    ("one", "other", "part"),
    [
        (torch.tensor([NAN]), torch.tensor([NAN]), None), (torch.zeros(4, 4)[:, ::2], torch.zeros(4, 2), None),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), None),
        (np.array([NAN, 1]), np.array([NAN, 1]), None), (np.array(["a", None]), np.array(["a", None]), None),
        ({"a": [1, (2, "x")]}, {"a": [1, (2, "x")]}, None), ({"x": {"a", "b", "c"}}, {"x": {"c", "b", "a"}}, None),
        ([1, NAN, None, b"x"], [1, float("nan"), None, b"x"], None),
        (Point(NAN, torch.ones(2)), Point(float("nan"), torch.ones(2)), None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "float32 [1]"),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), "float32 [1]"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "float32 [2, 3]"),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), "float32 [2]"),
        (np.array([1, 2]), np.array([1, 3]), "int64 [2]"),
        ([np.zeros(3, np.uint8)], [np.ones(3, np.uint8)], "[0], uint8 [3]"),
        ({"a": [1, (2, "x")]}, {"a": [1, (2, "y")]}, "['a'][1][1], str"), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "dict"),
        ([1, 2], [1], "list"), ((1,), [1], "tuple"), ([1], [True], "[0], int"),
        (Point(1.0, torch.ones(2)), Point(1.0, torch.zeros(2)), "Point"),
        (array.array("i", [1]), array.array("i", [2]), "array"),
        (SENTINEL, SENTINEL, None), (object(), object(), "object"), (NAMED, torch.zeros(2), "float32 [2]"),
    ],
)  # fmt: skip
def test_parts_that_differ(one, other, part):
    assert difference(one, other) == part


class Lossy:
    def __reduce__(self):
        return dict, ()


HOST = HostBatch(BatchPlan(7, (), 0), [1], 1)


@pytest.mark.parametrize(
    ("data", "text"), [(threading.Lock(), "cannot pickle"), (Lossy(), "Lossy"), ([Lossy()], "[0], Lossy")]
)
def test_what_cannot_be_sent_as_it_is_counts_as_different(data, text):
    comparison = Comparison(lambda: True)
    comparison.on_twin(Twin(7))
    comparison.on_batch(HOST._replace(data=data))
    comparison.on_twin(Twin(7, HOST._replace(data=PickledPayload.dumps(1))))
    assert text in comparison.difference


def test_batch_is_compared_once_both_versions_are_there():
    comparison = Comparison(lambda: True)
    comparison.on_twin(Twin(7))
    assert not comparison.on_batch(HOST._replace(plan=BatchPlan(6, (), 0), data=[2]))
    assert comparison.on_batch(HOST)
    assert comparison.difference is None
    comparison.on_twin(Twin(7, HOST._replace(data=PickledPayload.dumps([1]))))
    assert comparison.difference == ""


WITHOUT = [{"num_workers": 0}, {"executor": "thread"}, {"engines": 2}, {"engines": "auto"}, {"dataset": np.arange(8)}]
WITHOUT += [{"placement": "thread"}, {"placement": "process"}]


@pytest.mark.parametrize("arguments", WITHOUT, ids=str)
def test_arguments_without_a_search_by_default(arguments):
    made = hr.DataLoader(**{"dataset": Numbers(8)} | arguments)
    assert made._control.sessions.search is None
    assert (made.num_workers, made.prefetch_factor) == (0, None)


def test_loader_is_shown_and_rebuilt_as_one_without_num_workers():
    made = loader()
    assert "num_workers" not in repr(made)
    assert (made.num_workers, made.prefetch_factor) == (0, None)
    assert not loader(num_workers=made.num_workers)._control.sessions.search.asked
    with pytest.raises(ValueError, match="persistent_workers"):
        loader(persistent_workers=True)
