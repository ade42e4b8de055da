"""Datasets of torch's that have a state, or are read again: data pipes, map-style datasets, repeated streams."""

import os
import signal

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import headrace as hr
from headrace._core.batches import SessionStart, load_state
from headrace._core.torchcompat.datapipes import seed_pipe
from tests.unit.engine.sessions import (
    AsyncCount,
    StatefulAsyncCount,
    StatefulTorchIterators,
    TorchCount,
    given,
    opened,
    start_after,
)

PIPE_SEED = 5
WORKERS = pytest.mark.parametrize("workers", [0, 1, 2])


def placement(workers):
    return "thread" if workers else "inline"


class Reads(torch.utils.data.Dataset):
    """Its samples have the number of reads in its process before them."""

    def __init__(self):
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return index, self.reads


class StatefulReads(Reads):
    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


DRAWS = [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]


@pytest.mark.parametrize("many", [False, True])
@WORKERS
def test_map_style_dataset_with_a_state_continues_from_it(workers, many):
    class Many(StatefulReads):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    dataset = Many if many else StatefulReads
    options = {"placement": placement(workers), "num_workers": workers}
    with opened(dataset(), **options) as opener:
        hosts = [*opener.batches(draws=DRAWS)]
    for count in range(len(DRAWS) + 1):
        start = start_after(hosts[:count], workers or 1)
        with opened(dataset(), **options) as opener:
            rest = [*opener.batches(start, draws=DRAWS)]
        assert given(hosts[:count]) + given(rest) == given(hosts)
        assert [host.worker for host in (*hosts[:count], *rest)] == [host.worker for host in hosts]


class Dies(StatefulReads):
    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_worker_that_dies_with_the_state_of_its_dataset_is_not_replaced():
    with opened(Dies(), "thread", num_workers=1) as opener:
        first, *others = opener.batches(draws=DRAWS)
    assert given([first]) == [[(0, 1), (1, 2)]]
    assert {type(failure.error) for host in others for failure in host.failures} == {hr.errors.WorkerDiedError}
    assert all(host.empty for host in others)


@WORKERS
def test_map_style_dataset_that_is_no_longer_stateful_is_an_error(workers):
    state = {"read": 0, "dataset": {"reads": 4}}
    start = SessionStart(2, {0 if workers else None: state})
    with opened(Reads(), placement(workers), num_workers=workers) as opener:
        first = next(opener.batches(start, draws=DRAWS))
    (failure,) = first.failures
    assert (failure.stage, type(failure.error)) == ("load_state_dict", hr.StateError)


@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
@WORKERS
def test_data_pipe_that_shuffles_continues_in_the_same_order(workers):
    def batches(start=None):
        pipe = IterableWrapper(range(9)).shuffle().sharding_filter()
        if not workers:
            seed_pipe(pipe, PIPE_SEED)  # workers are sent the seed
        with opened(pipe, placement(workers), num_workers=workers, pipe_seed=PIPE_SEED) as opener:
            return [*opener.batches(*([] if start is None else [start]))]

    hosts = batches()
    assert sorted(sample for batch in given(hosts) for sample in batch) == [*range(9)]
    for count in range(len(hosts) + 1):
        assert given(hosts[:count]) + given(batches(start_after(hosts[:count], workers or 1))) == given(hosts)


@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
@pytest.mark.parametrize("make", [TorchCount, StatefulTorchIterators, AsyncCount, StatefulAsyncCount])
@WORKERS
def test_stream_read_again_for_lost_batches_continues_in_that_pass(make, workers):
    kind = "process" if make in (AsyncCount, StatefulAsyncCount) else placement(workers)
    with opened(make(7), kind, num_workers=workers) as opener:
        lost = start_after([*opener.batches()], workers or 1)
        repeated = [*opener.batches(lost, repeats=True)]
        assert given(repeated)
        for count in range(1, len(repeated) + 1):
            before = [host for host in repeated[:count] if host.stream_state is not None]
            streams = {**lost.streams, **{host.worker: load_state(host.stream_state) for host in before}}
            start = SessionStart(lost.batch + count, streams, lost.ended, lost.next_worker)
            rest = [*opener.batches(start, repeats=True)]
            assert given(repeated[:count]) + given(rest) == given(repeated)


@pytest.mark.parametrize(
    ("make", "kind", "workers"),
    [(AsyncCount, "thread", 0), (AsyncCount, "process", 1), (TorchCount, "inline", 0), (TorchCount, "thread", 2)],
)
def test_one_warning_of_the_consumers_process_says_what_is_read_again(make, kind, workers):
    with opened(make(9), kind, num_workers=workers) as opener:
        start = start_after([*opener.batches()][:4], workers or 1)
        with pytest.warns(UserWarning, match="is read again from its start") as caught:
            next(opener.batches(start))
    (warning,) = caught
    assert f"{make.__name__} has no state_dict: to continue after 8 samples" in str(warning.message)
