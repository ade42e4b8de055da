"""Workers: numbered processes with torch's seeds, each with its own copy of the dataset, as torch has them."""

import functools
import multiprocessing
import os
import random
import signal

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils import data

import headrace as hr
from tests.parity import processes
from tests.parity.datasets import Counted, Indices, InThread
from tests.parity.harness import NAMES, drained, parity, raised_by

cloudpickle.register_pickle_by_value(processes)

LENGTH = 12
INLINE, READING, THREAD, WORKERS = NAMES

NO_WORKERS = {INLINE: "no workers", THREAD: "no workers"}
NOT_READ_THERE = "the dataset is not in the workers"
ONE_READER = "the stream has one reader"
BY_BATCH = "each batch has its own seed, in any worker"


def as_it_is(samples):
    return samples


def pids(samples):
    return os.getpid()


@parity("`num_workers` processes take the batches in turn",
        not_for=NO_WORKERS | {WORKERS: "a batch goes to the first free worker"})  # fmt: skip
@pytest.mark.parametrize("num_workers", [1, 2, 3, 20])
def test_workers_make_batches_in_turn(same, num_workers):
    def program(DataLoader):
        came = list(
            DataLoader(Indices(), batch_size=2, num_workers=num_workers, collate_fn=pids)
        )
        order = list(dict.fromkeys(came))
        return [order.index(pid) for pid in came]

    assert len(set(same(program))) == min(num_workers, LENGTH / 2)


class Reports(data.Dataset):
    """A worker's view of itself: `get_worker_info`, seeds and threads."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        info = data.get_worker_info()
        return info and (
            info.id,
            info.num_workers,
            info.seed,
            type(info.dataset).__name__,
            info.dataset is self,
        )


@parity(
    "`torch.utils.data.get_worker_info()` answers as in torch: None where no numbered worker reads"
)
def test_worker_info_is_torchs(same):
    def program(DataLoader):
        loader = DataLoader(Reports(), batch_size=2, collate_fn=as_it_is, shuffle=True)
        return [list(loader) for _ in range(2)], data.get_worker_info()

    batches, here = same(program)
    assert here is None
    assert (batches[0][0][0] is None) is (same.setting.name != READING)


class Noisy(data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return (
            index,
            random.random(),
            np.random.random(),
            torch.rand(2),
            random.randrange(9),
            np.random.randint(9),
        )


DRAWS = "draws of `random`, NumPy and torch in the dataset are torch's, also where `worker_init_fn` seeds"


def reseed(worker):
    np.random.seed(worker)
    random.seed(worker)


@parity(DRAWS, not_for={THREAD: BY_BATCH, WORKERS: BY_BATCH})
def test_random_numbers_are_torchs(same):
    def program(DataLoader):
        ways = [{"shuffle": True}, {"generator": torch.Generator().manual_seed(17)}]
        if same.setting.workers:
            ways += [
                {"persistent_workers": True},
                {"num_workers": 3},
                {"worker_init_fn": reseed},
            ]
        loaders = [DataLoader(Noisy(), batch_size=2, **options) for options in ways]
        return [list(loader) for loader in loaders for _ in range(2)], torch.rand(
            1, generator=ways[1]["generator"]
        )

    same(program)


def threads(main, samples):
    return os.getpid() == main, torch.get_num_threads()


@parity(
    "batches are made in worker processes, where torch computes with one thread",
    not_for=NO_WORKERS,
)
def test_worker_has_one_torch_thread(same):
    def program(DataLoader):
        collate = functools.partial(threads, os.getpid())
        return set(
            DataLoader(Indices(), batch_size=2, num_workers=2, collate_fn=collate)
        ), torch.get_num_threads()

    assert same(program)[0] == {(False, 1)}


class Noted:
    """A `worker_init_fn` that records its argument and the state of the generators."""

    def __call__(self, worker):
        self.noted = getattr(self, "noted", ())
        info = data.get_worker_info()
        seeds = torch.initial_seed(), random.random(), np.random.random()
        self.noted += ((worker, info.id, info.seed, info.num_workers, seeds),)
        info.dataset.noted = self.noted


class Init(Indices):
    noted = None

    def __getitem__(self, index):
        return index, self.noted


INIT = (
    "`worker_init_fn` is called once in each worker, with its number, after the seeding"
)


@pytest.mark.parametrize("persistent", [False, True])
@parity(INIT, not_for=NO_WORKERS | {WORKERS: ""})
def test_worker_init_fn_is_called_after_seeding(same, persistent):
    def program(DataLoader):
        options = {
            "collate_fn": as_it_is,
            "worker_init_fn": Noted(),
            "persistent_workers": persistent,
        }
        loader = DataLoader(Init(), batch_size=2, **options)
        return [list(loader) for _ in range(2)]

    first, _ = same(program)
    assert [noted[0] for batch in first[:2] for _, (noted,) in batch] == [0, 0, 1, 1]


called_with = []


def note_call(worker):
    called_with.append(worker)


def calls(samples):
    return list(called_with)


@parity(INIT, not_for=NO_WORKERS | {READING: ""})
def test_worker_init_fn_is_called_in_each_worker_of_an_async_dataset(same):
    def program(DataLoader):
        options = {"collate_fn": calls, "worker_init_fn": note_call, "num_workers": 1}
        return list(DataLoader(Indices(), batch_size=2, **options)), called_with

    assert same(program) == ([[0]] * (LENGTH // 2), [])


@pytest.mark.parametrize(
    ("method", "by"), [("fork", "name"), ("spawn", "object"), ("forkserver", "name")]
)
@parity(
    "`multiprocessing_context` starts the workers, by name and as an object",
    not_for=NO_WORKERS | {WORKERS: ""},
)
def test_multiprocessing_context_starts_the_workers(same, method, by):
    def program(DataLoader):
        context = method if by == "name" else multiprocessing.get_context(method)
        loader = DataLoader(
            processes.Kinds(),
            batch_size=2,
            num_workers=1,
            multiprocessing_context=context,
        )
        return list(
            loader
        ), loader.multiprocessing_context is multiprocessing.get_context(method)

    batches, _ = same(program)
    assert batches[0][1][0].lower() == f"{method}process"


# "fork" and placement="process" exclude each other; with placement="auto" it is tried in
# test_process_settings.py.
@parity(
    "`multiprocessing_context` starts the workers, by name and as an object",
    not_for=NO_WORKERS | {READING: ""},
)
def test_multiprocessing_context_starts_the_workers_of_an_async_dataset(same):
    def program(DataLoader):
        options = {
            "num_workers": 1,
            "multiprocessing_context": "spawn",
            "collate_fn": processes.in_process,
        }
        return list(DataLoader(processes.Indices(), batch_size=2, **options))

    assert same(program)[0][0] == "SpawnProcess"


@pytest.mark.parametrize(
    "options", [{}, {"prefetch_factor": 1}, {"prefetch_factor": 4}], ids=str
)
@parity(
    "`prefetch_factor` batches for each worker are planned ahead; without it 2, and more in a quick loop if the "
    "sampler is torch's",
    not_for=NO_WORKERS | {WORKERS: ""},
)
def test_prefetch_factor_bounds_planned_batches_as_in_torch(same, options):
    draws_of(same, options)


@parity(
    "`prefetch_factor` batches for each worker are planned ahead; without it 2, and more in a quick loop if the "
    "sampler is torch's",
    not_for=NO_WORKERS | {READING: ""},
)
def test_given_prefetch_factor_bounds_planned_batches(same):
    draws_of(same, {"prefetch_factor": 4})


def draws_of(same, options):
    def program(DataLoader):
        sampler = Counted()
        iterator = iter(DataLoader(Indices(), sampler=sampler, num_workers=2, **options))
        drawn = [sampler.drawn]
        for _ in range(4):
            next(iterator)
            drawn.append(sampler.drawn)
        return drawn

    assert same(program)[0] == 2 * options.get("prefetch_factor", 2)


class Counting(Indices):
    """Counts its reads."""

    asked = 0
    offset = 0

    def __getitem__(self, index):
        self.asked += 1
        return index + self.offset, self.asked, os.getpid()


KEEPS = "with `persistent_workers` a dataset in a worker keeps its state; else each epoch has another copy"


@pytest.mark.parametrize("persistent", [False, True])
@parity(KEEPS, not_for=NO_WORKERS | {WORKERS: NOT_READ_THERE})
def test_dataset_keeps_its_state_in_persistent_workers(same, persistent):
    def program(DataLoader):
        dataset = Counting()
        loader = DataLoader(
            dataset, batch_size=2, collate_fn=as_it_is, persistent_workers=persistent
        )
        came, processes_of = [], []
        for epoch in range(3):
            dataset.offset = 100 * epoch  # seen by copies that are made now
            batches = list(loader)
            came.append(
                [[(value, asked) for value, asked, _ in batch] for batch in batches]
            )
            processes_of.append({pid for batch in batches for _, _, pid in batch})
        return came, len(set.union(*processes_of))

    came, count = same(program)
    assert count == (2 if persistent else 6)
    assert came[1][0][0] == ((0, 7) if persistent else (100, 1))


class Restarted(data.IterableDataset):
    def __init__(self):
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        for position in range(3):
            yield position, self.begun


@pytest.mark.parametrize("persistent", [False, True])
@parity("with `persistent_workers` a stream begins anew with each epoch, in the same copy",
        not_for=NO_WORKERS | {WORKERS: NOT_READ_THERE})  # fmt: skip
def test_stream_restarts_in_each_epoch(same, persistent):
    def program(DataLoader):
        loader = DataLoader(
            Restarted(), batch_size=2, collate_fn=as_it_is, persistent_workers=persistent
        )
        return [list(loader) for _ in range(3)]

    assert same(program)[2][0] == [
        (0, 3 if persistent else 1),
        (1, 3 if persistent else 1),
    ]


class Waits(Indices):
    """Its second sample is available when a line is written to a named pipe."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __getitem__(self, index):
        if index == 1:
            with open(self.pipe) as pipe:
                pipe.read()
        return index


@parity("a batch slower than `timeout` raises torch's error, and iteration can go on",
        not_for={INLINE: "torch asserts that there are workers"})  # fmt: skip
def test_batch_beyond_timeout_raises_torchs_error(same, tmp_path):
    num_workers = int(same.setting.name != THREAD)

    def program(DataLoader):
        pipe = str(tmp_path / ("ours" if DataLoader.is_ours else "torchs"))
        os.mkfifo(pipe)
        dataset = Waits(pipe)
        if same.setting.asynchronous and DataLoader.is_ours:
            dataset = InThread(dataset)
        workers = num_workers if DataLoader.is_ours else 1
        loader = DataLoader(
            dataset,
            sampler=[0, 1, 2],
            num_workers=workers,
            timeout=1,
            prefetch_factor=workers or None,
        )
        iterator = iter(loader)
        # A worker may take longer to come up.
        first = next(iterator) if num_workers else None
        if first is None:
            next(iterator)
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        with open(pipe, "w"):
            pass
        return str(caught.value), [batch.tolist() for batch in drained(iterator)]

    (torchs, rest), (ours, our_rest) = (
        same.torchs(program).result,
        same.ours(program).result,
    )
    assert torchs == "DataLoader timed out after 1 seconds"
    assert ours.startswith(torchs)
    assert our_rest == rest == [[1], [2]]


class Sharded(data.IterableDataset):
    """Split by the user: worker `w` of `n` reads every `n`-th, up to its own length."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        info = data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(worker, worker + workers * self.lengths[worker], workers))


@parity("a stream divided by the worker info is read once")
def test_stream_may_be_split_by_worker_info(same):
    def program(DataLoader):
        return list(DataLoader(Sharded([5, 5]), batch_size=2))

    batches = same(program)
    length = 10 if same.setting.name == READING else 5
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(length))


UNEVEN = (
    ([3, 8], {"batch_size": 2}),
    ([0, 5], {"batch_size": None}),
    ([0, 0], {"batch_size": 2}),
    ([1, 9, 4], {"batch_size": 2, "prefetch_factor": 1}),
    ([4, 4, 4], {"batch_size": 2, "persistent_workers": True}),
)


@pytest.mark.parametrize(("lengths", "options"), UNEVEN, ids=str)
@parity("workers with streams of unequal length end in turn, with batches in torch's order",
        not_for={INLINE: ONE_READER, THREAD: ONE_READER, WORKERS: ONE_READER})  # fmt: skip
def test_uneven_streams_of_workers_end_as_in_torch(DataLoader, lengths, options):
    loader = DataLoader(Sharded(lengths), num_workers=len(lengths), **options)
    return [list(loader) for _ in range(2)]


@parity("an undivided stream is read by every worker",
        not_for={INLINE: ONE_READER, THREAD: ONE_READER, WORKERS: ONE_READER})  # fmt: skip
def test_unsplit_stream_is_read_by_every_worker(same):
    def program(DataLoader):
        return list(DataLoader(Restarted(), batch_size=2, collate_fn=as_it_is))

    assert len(same(program)) == 4


class Kills(Indices):
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


# torch raises its error in a handler of SIGCHLD, wherever the program happens to be: even in a
# `__del__`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@parity("torch: a killed worker ends the run; here the worker is replaced, and an error names the batch",
        not_for=NO_WORKERS | {WORKERS: NOT_READ_THERE})  # fmt: skip
def test_killed_worker_is_an_error_as_in_torch(same):
    # Behind it torch gives batches, or waits for ever.
    def to_the_first_error(DataLoader):
        return raised_by(lambda: list(DataLoader(Kills(), batch_size=2)))

    def to_the_end(DataLoader):
        return drained(iter(DataLoader(Kills(), batch_size=2)), 7)

    torchs, ours = same.torchs(to_the_first_error).result, same.ours(to_the_end).result
    # Not always the same: under load the end of the connection may come first.
    assert torchs.kind in (RuntimeError, ConnectionResetError, EOFError)
    error = ours.pop(2)
    assert error.kind is hr.errors.WorkerDiedError
    assert "SIGKILL on batch 2, indices [4, 5]" in error.message
    assert [batch.tolist() for batch in ours] == [
        [0, 1],
        [2, 3],
        [6, 7],
        [8, 9],
        [10, 11],
    ]


class Halves(data.IterableDataset):
    """Split by `worker_init_fn`, as in torch's documentation."""

    start, stop = 0, LENGTH

    def __iter__(self):
        return iter(range(self.start, self.stop))


def split(worker):
    info = data.get_worker_info()
    part = LENGTH // info.num_workers
    info.dataset.start, info.dataset.stop = worker * part, (worker + 1) * part


@parity(
    "`worker_init_fn` can split the worker's copy of a stream",
    not_for=NO_WORKERS | {WORKERS: NOT_READ_THERE},
)
def test_stream_may_be_split_by_worker_init_fn(same):
    batches = same(
        lambda DataLoader: list(DataLoader(Halves(), batch_size=4, worker_init_fn=split))
    )
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(LENGTH))
