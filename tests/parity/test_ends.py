"""Ends: leaving early, beginning again, several at once, and how a program ends that is in the middle of an epoch."""

import functools
import os
import signal
import textwrap

import pytest
import torch
from torch.utils import data

import headrace as hr
from tests.parity.datasets import Indices
from tests.parity.harness import NAMES, Raised, drained, parity

LENGTH = 12
INLINE, READING, THREAD, WORKERS = NAMES
KINDS = pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(range(LENGTH))


def dataset(stream):
    return Stream() if stream else Indices()


@KINDS
@parity("leaving an epoch early does not change length or order of the next epoch")
def test_break_ends_the_epoch_as_in_torch(DataLoader, stream):
    loader = DataLoader(dataset(stream), batch_size=2, shuffle=None if stream else True)
    came = []
    for stop in (1, 3, 100):
        for number, batch in enumerate(loader):
            came.append(batch)
            if number == stop:
                break
    return came


@KINDS
@parity(
    "an ended iterator stays ended, has the loader's length, and `iter` returns the iterator itself"
)
def test_next_after_the_end_raises_stop_iteration(same, stream):
    def program(DataLoader):
        iterator = iter(DataLoader(dataset(stream), batch_size=5))
        lengths = [] if stream else [len(iterator), next(iterator) is None, len(iterator)]
        return (
            iter(iterator) is iterator,
            lengths,
            list(iterator),
            drained(iterator),
            drained(iterator),
        )

    is_itself, lengths, _, *nothing = same(program)
    assert is_itself
    assert lengths == ([] if stream else [3, False, 3])
    assert nothing == [[], []]


@pytest.mark.parametrize(
    ("stream", "order"),
    [(False, {}), (False, {"shuffle": True}), (True, {})],
    ids=["map", "map-shuffled", "stream"],
)
@parity(
    "a second iterator, begun while the first lives, reads the whole, and so does the first"
)
def test_two_iterators_of_one_loader_are_independent(DataLoader, stream, order):
    loader = DataLoader(dataset(stream), batch_size=5, **order)
    first = iter(loader)
    begun = [next(first)]
    second = iter(loader)
    begun.append(next(second))
    return begun, list(zip(first, second, strict=True)), list(loader)


@parity("nested loops over one loader")
def test_nested_loops_over_one_loader_are_independent(same):
    def program(DataLoader):
        loader = DataLoader(Indices(), batch_size=6)
        return [(outer, inner) for outer in loader for inner in loader]

    assert len(same(program)) == 4


@parity("torch: with `persistent_workers` a second `iter` replaces the first; here both read the whole",
        not_for={INLINE: "no workers", THREAD: "no workers", WORKERS: "workers always persist"})  # fmt: skip
def test_second_iterator_with_persistent_workers_resets_the_first(same):
    def program(DataLoader):
        loader = DataLoader(Indices(), batch_size=5, persistent_workers=True)
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        return (
            first is second,
            [batch.tolist() for batch in first],
            [batch.tolist() for batch in second],
        )

    rest = [[5, 6, 7, 8, 9], [10, 11]]
    assert same.torchs(program).result == (True, rest, [])
    assert same.ours(program).result == (False, rest, rest)


@KINDS
@parity("two loaders at once, of one dataset")
def test_two_loaders_run_at_once(DataLoader, stream):
    shared = dataset(stream)
    first, second = DataLoader(shared, batch_size=5), DataLoader(shared, batch_size=3)
    pairs = list(zip(first, second, strict=False))
    return pairs, list(second), list(first)


class Nests(data.Dataset):
    """Reads each sample through a loader of its own."""

    def __init__(self, loader_class, **options):
        self.loader_class = loader_class
        self.options = options

    def __len__(self):
        return 3

    def __getitem__(self, index):
        # Its own, as the global one is another in another process.
        generator = torch.Generator()
        samples = list(range(index, index + 4))
        loader = self.loader_class(
            samples, batch_size=2, generator=generator, **self.options
        )
        return [batch.tolist() for batch in loader]


@parity("a loader inside a dataset, in any process")
def test_dataset_may_iterate_a_loader(same):
    def program(DataLoader):
        return list(
            DataLoader(Nests(DataLoader.loader_class), batch_size=2, collate_fn=list)
        )

    assert same(program)[0] == [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]


@parity("workers inside a worker are refused, with the message of `multiprocessing`",
        not_for={INLINE: "no workers", THREAD: "no workers", WORKERS: "the dataset is not in the workers"})  # fmt: skip
def test_loader_with_workers_in_a_worker_fails_as_in_torch(same):
    def program(DataLoader):
        return drained(
            iter(
                DataLoader(
                    Nests(DataLoader.loader_class, num_workers=1),
                    batch_size=2,
                    num_workers=1,
                )
            )
        )

    refused = same(program)
    assert (
        refused
        == [Raised(AssertionError, "daemonic processes are not allowed to have children")]
        * 2
    )


class AsyncNumbers(hr.AsyncDataset):
    def __init__(self, start):
        self.start = start

    def __len__(self):
        return 4

    async def aget(self, index):
        return self.start + index


class NestsAsync(Nests):
    def __getitem__(self, index):
        if self.loader_class is data.DataLoader:
            return super().__getitem__(index)
        with hr.DataLoader(
            AsyncNumbers(index), batch_size=2, generator=torch.Generator()
        ) as loader:
            return [batch.tolist() for batch in loader]


@parity("an async loader inside a dataset's worker",
        not_for={THREAD: "the dataset is on the loop", WORKERS: "the dataset is on the loop"})  # fmt: skip
def test_async_dataset_may_iterate_a_loader(same):
    same(
        lambda DataLoader: list(
            DataLoader(NestsAsync(DataLoader.loader_class), batch_size=2, collate_fn=list)
        )
    )


@KINDS
@parity("a loader or an iterator that was never used ends with the last reference")
def test_iterator_without_any_next_call_ends_as_in_torch(DataLoader, stream):
    loader = DataLoader(dataset(stream), batch_size=2)
    iter(loader)
    del loader
    return len(list(DataLoader(dataset(stream), batch_size=2)))


PRELUDE = """
import asyncio, multiprocessing, sys, time
import torch
multiprocessing.set_start_method("fork", force=True)  # no main guard
from torch.utils import data
import headrace as hr

class Slow(data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        while index >= 40:  # never seen: user code that hangs
            time.sleep(0.01)  # a signal before a long sleep would not wake it
        return index

class AsyncSlow(hr.AsyncDataset):
    def __len__(self):
        return 1000

    async def aget(self, index):
        if index >= 40:
            await asyncio.sleep(600)  # the same
        return index

def loader():
    dataset = AsyncSlow() if {asynchronous} else Slow()
    return {loader_class}(dataset, batch_size=4, **{options})
"""

ENDINGS = {
    "sys.exit with the iterator in a global": """
        iterator = iter(loader())
        print(next(iterator).tolist(), flush=True)
        sys.exit(3)
    """,
    "sys.exit in the loop": """
        for batch in loader():
            print(batch.tolist(), flush=True)
            sys.exit(3)
    """,
    "an uncaught error, with the iterator in its traceback": """
        def train():
            iterator = iter(loader())
            print(next(iterator).tolist(), flush=True)
            raise LookupError("in training")
        train()
    """,
}

INTERRUPTED = """
    try:
        for batch in loader():
            if batch[-1] == 39:
                print("waiting", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def child(same, ours):
    """The start of a program of this setting, for one side."""
    asynchronous = ours and same.setting.asynchronous
    options = dict(same.setting.ours if ours else same.setting.torchs)
    loader_class = "hr.DataLoader" if ours else "data.DataLoader"
    return PRELUDE.format(
        asynchronous=asynchronous, loader_class=loader_class, options=options
    )


@pytest.fixture(scope="module")
def ended(forks):
    @functools.cache  # torch's part is the same in several settings
    def run(script):
        done = forks.run_source(script)
        return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]

    return run


@pytest.mark.parametrize("ending", ENDINGS)
@parity("a program may end in the middle of an epoch: same status, same output, no hang")
def test_program_that_ends_in_mid_epoch_has_torchs_status_and_output(same, ended, ending):
    body = textwrap.dedent(ENDINGS[ending])
    torchs, ours = (ended(child(same, ours) + body) for ours in (False, True))
    assert ours == torchs
    assert torchs[:2] == (3 if "sys.exit" in ending else 1, "[0, 1, 2, 3]\n")


@pytest.fixture(scope="module")
def interrupted(forks):
    @functools.cache
    def run(script):
        with forks.start_source(script) as process:
            line = process.stdout.readline()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            out, err = process.communicate()
            return line, process.wait(), out, "Traceback" in err

    return run


@parity(
    "Ctrl-C while the loop waits for a batch raises `KeyboardInterrupt` there, and the program decides how to end"
)
def test_ctrl_c_in_mid_epoch_raises_keyboard_interrupt(same, interrupted):
    body = textwrap.dedent(INTERRUPTED)
    torchs, ours = (interrupted(child(same, ours) + body) for ours in (False, True))
    assert torchs[:3] == ("waiting\n", 0, "interrupted\n")
    assert ours == ("waiting\n", 0, "interrupted\n", False)
