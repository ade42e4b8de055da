"""Workers that the program has not asked for get its functions once a batch made there was the same."""

import array
import colorsys
import dataclasses
import hashlib
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
from headrace._core.consumer import control
from headrace._core.links.comparison import Comparison, difference
from headrace._core.messages import Twin
from headrace._core.transport.pickling import PickledPayload
from headrace.options import Unset
from tests.datasets import Numbers

MAIN = os.getpid()


class Search(control.WorkerSearch):
    """Proposes two workers after five batches, once."""

    def look(self, records, setup):
        self.next_look = math.inf if self.moves else 0.0
        return 2 if len(records) >= 5 and not self.moves else None


@pytest.fixture(autouse=True)
def search(monkeypatch):
    monkeypatch.setattr(control, "WorkerSearch", Search)
    monkeypatch.setattr("headrace.loader.WorkerSearch", Search)
    monkeypatch.setattr(control, "usable_cores", lambda: 8.0)


def loader(dataset=None, **arguments):
    return hr.DataLoader(Numbers(10**6) if dataset is None else dataset, 4, seed=3, **arguments)


def until_decided(batches, loader, most=10**5):
    """The batches until workers make them, or the search has ended."""
    taken = []
    search = loader._control.search
    while not search.moves and (search.next_look != math.inf) and len(taken) < most:
        taken.append(next(batches))
    return taken


def noisy(sample):
    return sample + torch.randint(1000, ()), random_name(sample)


def random_name(sample):
    return f"{sample}:{int(np.random.randint(100))}"


def scaled(sample):
    return sample * getattr(colorsys, "factor", 1)  # of a module that workers import


def test_equal_functions_move_and_batches_stay_the_same():
    digests, used = [], []
    for make in (loader, lambda **arguments: hr.DataLoader(Numbers(10**6), 4, seed=3, num_workers=0, **arguments)):
        with make(transform=noisy, shuffle=True) as made:
            batches, digest = iter(made), hashlib.sha256()
            first = until_decided(batches, made) if make is loader else [next(batches) for _ in range(used[0])]
            used.append(len(first))
            for batch in [*first, *(next(batches) for _ in range(200))]:
                digest.update(pickle.dumps((batch[0].tolist(), batch[1])))
            digests.append(digest.hexdigest())
            if make is loader:
                assert made.num_workers == 2
                assert type(made.num_workers) is Unset
                assert made._control.search.moves
    assert digests[0] == digests[1]


def batches_of(made, batches, more=20):
    """All until the decision, and some more, as text."""
    return [str(batch) for batch in [*until_decided(batches, made), *(next(batches) for _ in range(more))]]


def expected_of(count, **arguments):
    with hr.DataLoader(Numbers(10**6), 4, seed=3, num_workers=0, **arguments) as fixed:
        batches = iter(fixed)
        return [str(next(batches)) for _ in range(count)]


def stays(made, batches, text):
    """The functions stay in this process, with its batches; the search has ended with this sentence."""
    got = batches_of(made, batches)
    assert made.num_workers == 0
    assert [said for said in made._control.search.chosen if text in said] == made._control.search.chosen[-1:]
    assert made.report().chosen[-1].endswith('num_workers="auto", or a number, moves them to workers all the same')
    return got


def test_function_that_reads_a_variable_of_a_module_stays(monkeypatch, caplog):
    monkeypatch.setattr(colorsys, "factor", 7, raising=False)
    with loader(transform=scaled) as made, caplog.at_level("INFO", "headrace"):
        got = stays(made, iter(made), "differs in a worker: int64 [4]")
        assert made._control.search.chosen == [message for message in caplog.messages if "num_workers" in message]
        assert not [record for record in caplog.records if record.levelname != "INFO"]
        assert got == expected_of(len(got), transform=scaled)
        rest = iter(made)
        assert [str(next(rest)) for _ in range(20)] == expected_of(20, transform=scaled)
        assert made.num_workers == 0


def counted(sample):
    colorsys.calls = getattr(colorsys, "calls", 0) + 1
    return colorsys.calls


def test_function_that_counts_in_a_module_stays(monkeypatch):
    monkeypatch.setattr(colorsys, "calls", 0, raising=False)
    with loader(transform=counted) as made:
        got = stays(made, iter(made), "differs in a worker: int64 [4]")
    colorsys.calls = 0
    assert got == expected_of(len(got), transform=counted)


def test_function_that_counts_without_a_trace_in_its_batches_stays():
    seen = []

    def note(sample):
        seen.append(sample)
        return sample

    with loader(transform=note) as made:
        got = stays(made, iter(made), "the functions change when they are called")
        assert len(seen) == 4 * len(got)


def test_random_generators_among_functions_are_no_change():
    generators = np.random.default_rng(0), torch.Generator()

    def draw(sample):
        return sample + int(generators[0].integers(100)) + int(torch.randint(100, (), generator=generators[1]))

    with loader(transform=draw) as made:
        got = batches_of(made, iter(made))
        assert made.num_workers == 2
        assert got == expected_of(len(got), transform=draw)


def fails_elsewhere(sample):
    if os.getpid() != MAIN:
        raise ValueError(f"sample {sample}")
    return sample


def dies_elsewhere(sample):
    if os.getpid() != MAIN:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def cannot_be_sent(sample):
    return threading.Lock() if os.getpid() != MAIN else sample


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (fails_elsewhere, "ValueError: sample"),
        (dies_elsewhere, "WorkerDiedError"),
        (cannot_be_sent, "Error"),
    ],
)
def test_function_that_fails_in_a_worker_only_stays(transform, text):
    with loader(transform=transform, collate_fn=list) as made:
        got = stays(made, iter(made), text)
        assert got == [str(list(range(at, at + 4))) for at in range(0, 4 * len(got), 4)]


def test_start_of_a_worker_that_fails_is_a_difference():
    def init(worker):
        raise ValueError("not here")

    with loader(transform=noisy, worker_init_fn=init) as made:
        stays(made, iter(made), "not here")


def test_functions_that_cannot_be_pickled_stay():
    lock = threading.Lock()

    def locked(sample):
        with lock:
            return sample

    with loader(transform=locked) as made:
        batches_of(made, iter(made))
        assert made.num_workers == 0
        assert "transform" in made._control.search.chosen[0]


def odd_fails(sample):
    if sample >= 4 * 6 and sample < 4 * 200:
        raise ValueError(f"sample {sample}")
    return sample


def test_batch_that_fails_in_both_is_raised_and_the_next_one_is_compared():
    with loader(transform=odd_fails) as made:
        batches, errors = iter(made), 0
        while not made._control.search.moves:
            try:
                next(batches)
            except ValueError:
                errors += 1
        assert errors >= 194
        assert made.num_workers == 2


def test_batches_that_lost_samples_in_both_are_the_same():
    def half(sample):
        if sample % 2:
            raise ValueError(sample)
        return sample

    with loader(transform=half, on_error="skip") as made:
        until_decided(iter(made), made)
        assert made.num_workers == 2


def test_samples_are_those_of_the_consumer_where_its_functions_change_them():
    class Arrays(Numbers):
        async def aget(self, index):
            return np.full(10**5, index)

    def add(sample):
        sample += 1
        return sample

    with loader(Arrays(10**6), transform=add) as made:
        for batch in until_decided(iter(made), made):
            batch[:] = -1
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
        until_decided(iter(made), made)
        assert made.num_workers == 0
        assert "before batching" in made._control.search.chosen[0]
    with loader(Stream(), transform=noisy) as made, loader(Stream(), transform=noisy, num_workers=0) as fixed:
        assert [str(batch) for batch in list(made) + list(made)] == [str(batch) for batch in list(fixed) + list(fixed)]


def test_numbers_of_other_loaders_are_compared_first():
    def where(sample):
        return int(os.getpid() == MAIN)

    with loader(transform=noisy) as found:
        batches = iter(found)
        until_decided(batches, found)
        state = found.state_dict()
    with loader(transform=where) as restored:
        restored.load_state_dict(state)
        batches = iter(restored)
        assert all(batch.all() for batch in until_decided(batches, restored))
        assert restored.num_workers == 0
        assert all(next(batches).all() for _ in range(20))
    copy = pickle.loads(pickle.dumps(found))
    batches = iter(copy)
    assert copy.num_workers == 0
    assert copy._control.states(copy, 0)[0].found["num_workers"] == 2
    until_decided(batches, copy)
    assert copy.num_workers == 2
    copy.close()


def test_dataset_stays_where_the_program_has_not_asked_for_workers():
    class Here(Numbers):
        async def aget(self, index):
            return os.getpid()

    with loader(Here(400), transform=noisy_name) as made:
        while not made._control.search.moves:
            list(made)
        last = list(made)
        assert made.num_workers == 2
        assert made.stats().placement.startswith("thread: functions moved to workers")
        assert {pid for batch in last for pid in batch[0].tolist()} == {MAIN}
        assert MAIN not in {pid for batch in last for pid in batch[1].tolist()}


def noisy_name(sample):
    return sample, 0


@dataclasses.dataclass
class Point:
    x: float
    values: object = None


NAN = math.nan


@pytest.mark.parametrize(
    ("one", "other", "part"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "float32 [1]"),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), "float32 [1]"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "float32 [2, 3]"),
        (torch.zeros(4, 4)[:, ::2], torch.zeros(4, 2), None),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), None),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), "float32 [2]"),
        (np.array([NAN, 1]), np.array([NAN, 1]), None),
        (np.array([1, 2]), np.array([1, 3]), "int64 [2]"),
        (np.array(["a", None]), np.array(["a", None]), None),
        ([np.zeros(3, np.uint8)], [np.ones(3, np.uint8)], "[0], uint8 [3]"),
        ({"a": [1, (2, "x")]}, {"a": [1, (2, "x")]}, None),
        ({"a": [1, (2, "x")]}, {"a": [1, (2, "y")]}, "['a'][1][1], str"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "dict"),
        ([1, 2], [1], "list"),
        ((1,), [1], "tuple"),
        ([1], [True], "[0], int"),
        ([1, NAN, None, b"x"], [1, float("nan"), None, b"x"], None),
        ({"x": {"a", "b", "c"}}, {"x": {"c", "b", "a"}}, None),
        (Point(NAN, torch.ones(2)), Point(float("nan"), torch.ones(2)), None),
        (Point(1.0, torch.ones(2)), Point(1.0, torch.zeros(2)), "Point"),
        (array.array("i", [1]), array.array("i", [2]), "array"),
    ],
)
def test_parts_that_differ(one, other, part):
    assert difference(one, other) == part


class Lossy:
    def __init__(self):
        self.note = "here"

    def __reduce__(self):
        return dict, ()


@pytest.mark.parametrize(
    ("data", "text"), [(threading.Lock(), "cannot pickle"), (Lossy(), "Lossy"), ([Lossy()], "[0], Lossy")]
)
def test_what_cannot_be_sent_as_it_is_counts_as_different(data, text):
    host = HostBatch(BatchPlan(7, (), 0), data, 1)
    comparison = Comparison(None)
    comparison.on_twin(Twin(7))
    comparison.on_batch(host)
    comparison.on_twin(Twin(7, host._replace(data=PickledPayload.dumps(1))))
    assert text in comparison.difference


def test_either_version_may_be_there_first():
    host = HostBatch(BatchPlan(7, (), 0), [1], 1)
    twin = Twin(7, host._replace(data=PickledPayload.dumps([1])))
    for steps in ([twin, host], [host, twin]):
        comparison = Comparison(None)
        comparison.on_twin(Twin(7))
        comparison.on_batch(host._replace(plan=BatchPlan(6, (), 0), data=[2]))
        for step in steps:
            assert comparison.difference is None
            (comparison.on_batch if step is host else comparison.on_twin)(step)
        assert comparison.difference == ""


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 0},
        {"executor": "thread"},
        {"placement": "thread"},
        {"placement": "process"},
        {"engines": 2},
        {"engines": "auto"},
        {"dataset": np.arange(8)},
    ],
    ids=str,
)
def test_arguments_without_a_search_by_default(arguments):
    made = hr.DataLoader(**{"dataset": Numbers(8)} | arguments)
    assert made._control.search is None
    assert (made.num_workers, made.prefetch_factor) == (0, None)


def test_loader_is_shown_and_rebuilt_as_one_without_num_workers():
    made = loader()
    assert "num_workers" not in repr(made)
    assert (made.num_workers, made.prefetch_factor) == (0, None)
    assert not loader(num_workers=made.num_workers)._control.search.asked
    with pytest.raises(ValueError, match="persistent_workers"):
        loader(persistent_workers=True)
