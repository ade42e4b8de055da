"""Functions of a loader: changes between epochs reach workers, and shared objects stay shared."""

import multiprocessing
import os
import signal
import sys
import threading
import types

import cloudpickle
import numpy as np
import pytest
import torch

import headrace as hr
from tests.datasets import Numbers
from tests.unit.streams.reading import stream

PLACEMENTS = [
    {"num_workers": 2, "placement": "process"},
    {"num_workers": 2, "placement": "thread"},
    {"num_workers": 0, "placement": "process"},
    {"num_workers": 0},
    {"num_workers": 1, "multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "spawn"},
]
IN_PROCESS, IN_THREAD = PLACEMENTS[:2]

in_processes = pytest.mark.parametrize(
    "options", [IN_PROCESS, IN_THREAD], ids=["process", "thread"]
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the loader runs:RuntimeWarning"),
]


class Add:
    def __init__(self, strength):
        self.strength = strength

    def __call__(self, sample):
        return sample + self.strength


class Counted(Add):
    """Counts how often it is unpickled, in all processes."""

    def __init__(self, strength):
        super().__init__(strength)
        self.loads = multiprocessing.get_context("spawn").Value("i", 0)

    def __setstate__(self, state):
        self.__dict__.update(state)
        with self.loads.get_lock():
            self.loads.value += 1


def once(loader):
    return sorted(x for batch in loader for x in batch.tolist())


def two_epochs(loader, change):
    """What an epoch before and one after `change` give."""
    with loader:
        before = once(loader)
        change()
        return before, once(loader)


AS_IT_WAS, CHANGED = [10, 11, 12, 13], [20, 21, 22, 23]


# Where a function may be: the arguments of the loader.
PLACES = {
    "transform": lambda add: {"dataset": Numbers(4), "transform": add},
    "map within a concatenation": lambda add: {
        "dataset": hr.concat([Numbers(4).map(add)])
    },
    "before batching": lambda add: {"dataset": stream(*range(4)).map(add).filter(bool)},
    "closure of collate_fn": lambda add: {
        "dataset": Numbers(4),
        "collate_fn": lambda all: torch.tensor([*map(add, all)]),
    },
}


@pytest.mark.parametrize(
    ("options", "place"),
    [
        *((options, "transform") for options in PLACEMENTS),
        *((IN_PROCESS, place) for place in PLACES),
    ],
    ids=str,
)
def test_attribute_of_a_function_is_applied_at_next_epoch(options, place):
    add = Add(10)
    loader = hr.DataLoader(**PLACES[place](add), **options)
    assert two_epochs(loader, lambda: setattr(add, "strength", 20)) == (
        AS_IT_WAS,
        CHANGED,
    )


def test_change_of_what_a_function_refers_to_is_applied_at_next_epoch(monkeypatch):
    cell = types.ModuleType("cell")  # a notebook's: nothing else can import it
    exec("strength = 10\ndef augment(sample): return sample + strength", vars(cell))
    monkeypatch.setitem(sys.modules, "cell", cell)
    table, state = np.zeros(100_000, dtype=np.int64), types.SimpleNamespace(of_trainer=0)

    def init(worker):
        state.in_worker = state.of_trainer

    def transform(sample):
        return cell.augment(sample) + int(table[-1]) + state.in_worker

    cloudpickle.register_pickle_by_value(cell)
    try:
        with hr.DataLoader(
            Numbers(4), transform=transform, worker_init_fn=init, **IN_PROCESS
        ) as loader:
            assert once(loader) == AS_IT_WAS
            cell.strength = 20  # a global of the main module
            assert once(loader) == CHANGED
            table.fill(-10)  # an array, written to in place
            assert once(loader) == AS_IT_WAS
            state.of_trainer = 10  # what `worker_init_fn` uses, which is called again
            assert once(loader) == CHANGED
    finally:
        cloudpickle.unregister_pickle_by_value(cell)


@in_processes
def test_workers_are_kept_and_load_functions_only_when_they_change(options):
    counted = Counted(10)
    with hr.DataLoader(
        Numbers(4), transform=lambda sample: (counted(sample), os.getpid())[1], **options
    ) as loader:
        pids = {pid for _ in range(3) for pid in once(loader)}
        assert counted.loads.value == 2
        counted.strength = 20
        assert len(pids | {*once(loader)}) == 2
        assert counted.loads.value == 4


@pytest.mark.parametrize("options", [IN_PROCESS, IN_THREAD, {"num_workers": 0}], ids=str)
def test_open_epochs_keep_the_functions_they_began_with(options):
    add = Add(100)
    options = {"prefetch_factor": 2, **options} if options["num_workers"] else options
    with hr.DataLoader(Numbers(40), transform=add, **options) as loader:
        first = iter(loader)
        got = [next(first).tolist()]
        add.strength = 200
        second = iter(loader)
        rest = [next(second).tolist()]
        for one, other in zip(first, second, strict=True):
            got.append(one.tolist())
            rest.append(other.tolist())
    expected = [[x + 200] for x in range(40)]
    assert rest == expected
    if options["num_workers"]:  # without workers functions are live objects, as in torch
        assert got == [[x + 100] for x in range(40)]


@in_processes
def test_replaced_worker_has_the_functions_of_its_epoch(options, tmp_path):
    killed = tmp_path / "killed"

    class Dies(Add):
        def __call__(self, sample):
            if self.strength == 20 and sample == 2 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(sample)

    dies = Dies(10)
    loader = hr.DataLoader(Numbers(4), transform=dies, **options)
    assert two_epochs(loader, lambda: setattr(dies, "strength", 20)) == (
        AS_IT_WAS,
        CHANGED,
    )
    assert killed.exists()


def test_functions_that_cannot_be_sent_or_loaded_fail_their_epoch_only():
    class Fails(Add):
        def __setstate__(self, state):
            if state["strength"] == 11:
                raise ValueError("not in this worker")
            self.__dict__.update(state)

    fails = Fails(10)
    with hr.DataLoader(Numbers(4), transform=fails, **IN_PROCESS) as loader:
        assert once(loader) == AS_IT_WAS
        fails.lock = threading.Lock()
        with pytest.raises(hr.errors.NotPicklableError, match="transform"):
            iter(loader)
        del fails.lock
        fails.strength = 11
        with pytest.raises(ValueError, match="not in this worker"):
            once(loader)
        fails.strength = 20
        assert once(loader) == CHANGED


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_multiprocessing_primitives_are_shared_with_workers(context):
    made = multiprocessing.get_context(context)
    counter, queue, event, array = (
        made.Value("i", 0),
        made.Queue(),
        made.Event(),
        made.Array("d", 4),
    )
    reader, writer = made.Pipe(duplex=False)

    def use(sample):
        assert event.wait(30)
        queue.put(sample)
        with counter.get_lock(), array.get_lock():
            counter.value += 1
            array[sample] = sample
            writer.send(sample)
        return sample

    event.set()
    options = (
        {"multiprocessing_context": "fork"}
        if context == "fork"
        else {"placement": "process"}
    )
    with hr.DataLoader(Numbers(4), transform=use, num_workers=2, **options) as loader:
        for epochs in (1, 2):
            assert once(loader) == [0, 1, 2, 3]
            assert sorted(queue.get(timeout=120) for _ in range(4)) == [0, 1, 2, 3]
            assert sorted(reader.recv() for _ in range(4)) == [0, 1, 2, 3]
            assert counter.value == 4 * epochs
    assert list(array) == [0, 1, 2, 3]


class Shares(Numbers):
    def __init__(self):
        super().__init__(4)
        self.offset = torch.full((1,), 10).share_memory_()

    async def aget(self, index):
        return index + int(self.offset)


def test_tensor_in_shared_memory_is_refused_where_torch_shares_by_files():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        with (
            hr.DataLoader(Shares(), **IN_PROCESS) as loader,
            pytest.raises(hr.errors.NotPicklableError, match="file_descriptor"),
        ):
            once(loader)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_tensor_in_shared_memory_is_shared_both_ways():
    dataset, shared = Shares(), torch.zeros(24, dtype=torch.int64).share_memory_()
    parameter = torch.nn.Parameter(torch.full((1,), 0.0)).share_memory_()

    def use(sample):
        shared[sample] += 1
        return sample + int(parameter)

    with hr.DataLoader(dataset, transform=use, **IN_PROCESS) as loader:
        assert once(loader) == AS_IT_WAS
        with torch.no_grad():
            parameter.fill_(10)
        assert once(loader) == CHANGED
        dataset.offset.fill_(20)
        assert once(loader) == [30, 31, 32, 33]
        assert shared.tolist() == [0] * 10 + [2] * 4 + [0] * 6 + [1] * 4


def test_lock_of_the_fork_context_is_an_error_that_names_the_remedy():
    lock = multiprocessing.get_context("fork").Lock()
    loader = hr.DataLoader(Numbers(4), transform=lambda s: lock and s, **IN_PROCESS)
    with (
        loader,
        pytest.raises(hr.errors.NotPicklableError, match=r"get_context\('spawn'\)"),
    ):
        iter(loader)


def test_samples_and_batches_in_shared_tensors_are_copied():
    class Shared(Numbers):
        def __init__(self):
            super().__init__(4)
            self.tensor = torch.zeros(1).share_memory_()

        async def aget(self, index):
            return self.tensor

    dataset = Shared()
    with hr.DataLoader(
        dataset, num_workers=1, transform=lambda sample: sample.add_(1), batch_size=None
    ) as loader:
        assert [batch.item() for batch in loader] == [1, 1, 1, 1]
    assert dataset.tensor.item() == 0


def anonymous_memory(pid):
    """Bytes that are not pages of a file: a shared page counts as private until a second process touches it."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        sizes = {
            name: int(size) for name, size, *_ in map(str.split, file.readlines()[1:])
        }
    return 1024 * sizes["Anonymous:"]


def test_large_closure_is_in_memory_once_for_all_workers():
    table = np.ones(16_000_000)

    def measure(sample):
        assert float(table.sum()) == 16_000_000  # every page is touched
        return anonymous_memory(os.getpid())

    def largest(transform):
        with hr.DataLoader(Numbers(4), transform=transform, **IN_PROCESS) as loader:
            return max(once(loader))

    assert (
        largest(measure)
        < largest(lambda sample: anonymous_memory(os.getpid())) + 64_000_000
    )  # half an array
