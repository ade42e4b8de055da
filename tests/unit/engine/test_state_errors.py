"""A state that cannot be saved or restored is an error in every placement, and never another order."""

import pytest

import headrace as hr
from headrace._core.batches import SessionStart
from tests.unit.engine.sessions import (
    AsyncCount,
    AsyncCounter,
    Counter,
    StatefulTorchIterators,
    TorchCount,
    given,
    opened,
    start_after,
)

PLACES = [("async", "thread", 0), ("async", "process", 0), ("torch", "inline", 0), ("torch", "thread", 1)]
EVERYWHERE = pytest.mark.parametrize(("kind", "placement", "workers"), PLACES)
pytestmark = pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")


class Unpicklable:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("a lock")


class Faulty:
    """The state of an iterator, with a fault."""

    def state_dict(self):
        if self.owner.fault == "save" and self.next > 2:
            raise KeyError("cursor")
        return {"next": Unpicklable() if self.owner.fault == "pickle" else self.next}

    def load_state_dict(self, state):
        if self.owner.fault == "load":
            raise KeyError("cursor")
        self.next = state["next"]


class AsyncFaulty(Faulty, AsyncCounter):
    pass


class TorchFaulty(Faulty, Counter):
    pass


class AsyncDataset(AsyncCount):
    def __init__(self, fault):
        super().__init__(5)
        self.fault = fault

    def __aiter__(self):
        return AsyncFaulty(self)


class TorchDataset(TorchCount):
    def __init__(self, fault):
        super().__init__(5)
        self.fault = fault

    def __iter__(self):
        return TorchFaulty(self)


FAULTY = {"async": AsyncDataset, "torch": TorchDataset}
COUNT = {"async": AsyncCount, "torch": TorchCount}


def failures(hosts):
    return [(failure.stage, type(failure.error)) for host in hosts for failure in host.failures]


@pytest.mark.parametrize("skips", [False, True])
@EVERYWHERE
def test_state_dict_that_raises_is_the_error_of_its_batch(kind, placement, workers, skips):
    with opened(FAULTY[kind]("save"), placement, num_workers=workers, skips=skips) as opener:
        hosts = [*opener.batches()]
    assert given(hosts)[0] == [0, 1]
    assert failures(hosts)[:2] == [("state_dict", KeyError)] * 2
    assert not any(failure.is_skippable for host in hosts for failure in host.failures)


@EVERYWHERE
def test_state_that_cannot_be_pickled_is_an_error_where_it_leaves_its_process(kind, placement, workers):
    with opened(FAULTY[kind]("pickle"), placement, num_workers=workers) as opener:
        hosts = [*opener.batches()]
    if workers or placement == "process":
        assert {*failures(hosts)} == {("state_dict", hr.errors.NotPicklableError)}
        assert "the state of the dataset" in given(hosts)[0]
        assert hosts[-1].end
    else:
        assert given(hosts) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("skips", [False, True])
@EVERYWHERE
def test_load_state_dict_that_raises_ends_the_epoch(kind, placement, workers, skips):
    state = {"position": 2, "stream": {"read": 2, "iterator": {"next": 2}}}
    start = SessionStart(1, {0 if workers else None: state})
    with opened(FAULTY[kind]("load"), placement, num_workers=workers, skips=skips) as opener:
        first, *others = opener.batches(start)
    assert failures([first]) == [("load_state_dict", KeyError)]
    assert not first.failures[0].is_skippable
    assert (first.end, first.empty, first.stream_state) == (True, True, None)
    assert given(others) == []


@pytest.mark.parametrize("skips", [False, True])
@EVERYWHERE
def test_stream_that_has_become_shorter_ends_the_epoch_with_both_numbers(kind, placement, workers, skips):
    options = {"placement": placement, "num_workers": workers, "skips": skips}
    with opened(COUNT[kind](7), **options) as opener:
        start = start_after([*opener.batches()][:2], 1)
    with opened(COUNT[kind](3), **options) as opener:
        first, *others = opener.batches(start)
    assert failures([first]) == [("load_state_dict", hr.StateError)]
    assert "ended after 3 samples, but 4 had been read" in str(first.failures[0].error)
    assert first.end
    assert given(others) == []


class OfWorkerZero(StatefulTorchIterators):
    """Worker 0 cannot restore its iterator."""

    def __iter__(self):
        return CannotLoad(self) if self.part()[0] == 0 else super().__iter__()


class CannotLoad(Counter):
    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        raise KeyError("cursor")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_nothing_is_given_out_after_a_state_that_could_not_be_restored(workers, on_error):
    def loader():
        return hr.DataLoader(OfWorkerZero(12), batch_size=2, num_workers=workers, collate_fn=list, on_error=on_error)

    with loader() as first:
        running = iter(first)
        batches = [next(running), next(running)]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        running = iter(second)
        with pytest.raises(KeyError, match="cursor"):
            next(running)
        assert list(running) == []
        assert second.state_dict() == state
    assert batches == ([[0, 2], [1, 3]] if workers == 2 else [[0, 1], [2, 3]])
