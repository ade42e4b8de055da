"""Datasets, samplers and functions of the programs that run the loader."""

import asyncio
import gc
import os
import random
import signal
import time

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import headrace as hr
from headrace.errors import TooManySkippedError
from headrace.types import Blocks


class BadSampleError(ValueError):
    """The error of a sample that cannot be read."""


def checked(index, failing):
    if index in failing:
        raise BadSampleError(index)
    return index


def delay_of(index, slowest):
    """A latency in seconds that differs from sample to sample."""
    return slowest * (index * 7 % 5) / 5


class Sized:
    """A map-style dataset, some samples of which fail or are late."""

    def __init__(self, size, failing=(), slowest=0.0):
        self.size, self.failing, self.slowest = size, failing, slowest

    def __len__(self):
        return self.size


class Numbers(Sized, hr.AsyncDataset):
    """The samples 0, 1, 2, …, fetched one by one."""

    async def aget(self, index):
        await asyncio.sleep(delay_of(index, self.slowest))  # latency
        return checked(index, self.failing)


class BatchedNumbers(Numbers):
    """The same, fetched by one call for each batch."""

    async def agets(self, indices):
        return [await self.aget(index) for index in indices]


class RangedNumbers(Sized, hr.RangedDataset):
    """The same, as byte ranges of two objects, which the loader joins."""

    def ranges(self, indices):
        places = np.asarray(indices, dtype=np.int64)
        return hr.Ranges(places % 2, places // 2, places // 2 + 1)

    async def read_range(self, number, start, stop, *, index=None):
        await asyncio.sleep(delay_of(start, self.slowest))  # latency
        return memoryview(bytes(2 * place + number for place in range(start, stop)))

    def sample_of(self, index, data):
        return checked(data[0], self.failing)


class IndexedNumbers(RangedNumbers):
    """The same, in blocks of two: the loader reads six of them side by side, and divides these among the ranks."""

    blocks = Blocks(2, 6)


class TorchNumbers(Sized, Dataset):
    """The same, as a dataset of torch."""

    def __getitem__(self, index):
        time.sleep(delay_of(index, self.slowest))  # latency
        return checked(index, self.failing)


class BatchedTorchNumbers(TorchNumbers):
    """The same, read by one call for each batch."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Reader:
    """An iterator over the samples from `start` up to `stop`; continues after a sample that failed."""

    def __init__(self, start, stop, failing, slowest):
        self.next, self.stop, self.failing, self.slowest = start, stop, failing, slowest

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= self.stop:
            raise StopIteration
        self.next += 1
        return checked(self.next - 1, self.failing)

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(delay_of(self.next, self.slowest))  # latency
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None


class ReaderWithState(Reader):
    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Count(hr.AsyncIterableDataset):
    """The stream 0, 1, 2, …; its iterator has a state."""

    reader = ReaderWithState

    def __init__(self, size, failing=(), slowest=0.0, start=0):
        self.size, self.failing, self.slowest, self.start = size, failing, slowest, start

    def __aiter__(self):
        return self.reader(self.start, self.start + self.size, self.failing, self.slowest)


class CountAgain(Count):
    """The same stream without a state: a restored loader reads from the first sample."""

    reader = Reader


class TorchCount(IterableDataset):
    """The same, as a stream of torch; each worker reads a part if `divided`, else a copy."""

    def __init__(self, size, failing=(), divided=False):
        self.size, self.failing, self.divided = size, failing, divided

    def __iter__(self):
        worker = get_worker_info()
        reader = Reader(0, self.size, self.failing, 0.0)
        if worker is None or not self.divided:
            return reader
        return (number for number in reader if number % worker.num_workers == worker.id)


class Listed:
    """A sampler of the user's own, without a state."""

    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        return iter(self.indices)


class Shifted:
    """A sampler of the user's own whose state is its epoch and position."""

    def __init__(self, size):
        self.size, self.epoch, self.position = size, 0, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        while self.position < self.size:
            self.position += 1
            yield (self.position - 1 + self.epoch) % self.size
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class Drawing:
    """A sampler of the user's own that draws each index from a generator of the process."""

    def __init__(self, size, count, source):
        self.size, self.count, self.source = size, count, source

    def __len__(self):
        return self.count

    def __iter__(self):
        for _ in range(self.count):
            if self.source == "torch":
                yield int(torch.randint(self.size, ()))
            elif self.source == "numpy":
                yield int(np.random.randint(self.size))
            else:
                yield random.randrange(self.size)


class DrawnBatches:
    """A batch sampler of the user's own that draws from the generators of the process."""

    def __init__(self, size, count, source):
        self.indices = Drawing(size, 2 * count, source)
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        indices = iter(self.indices)
        for first in indices:
            yield [first, next(indices)]


# Functions of samples.


def odd(number):
    return number % 2 == 1


async def fetched(number):
    """A coroutine function, which takes longer for some numbers."""
    await asyncio.sleep(delay_of(number, 0.003))
    return number + 100


def tenfold(number):
    return number * 10


def document(number):
    """A document of 0 to 4 tokens."""
    return [number] * (number % 5)


def tokens(sample):
    """The number of tokens of a sample, for `batch_by_tokens`."""
    return sample % 4


def whole(samples):
    """The collate function of programs without batches."""
    return samples


def described(number):
    """A document of 0 to 7 tokens, with values to carry or to count."""
    return {
        "tokens": [number] * (number % 8),
        "source": f"source {number}",
        "images": number % 3,
    }


def plain(packed):
    """A packed sequence, as lists."""
    return {
        name: values.tolist() if hasattr(values, "tolist") else values
        for name, values in packed.items()
    }


# Transforms.


def negated(sample):
    return [sample, "negated"]


@hr.randomized
def jittered(sample, rng):
    return [sample, int(rng.integers(1 << 30))]


def noisy(sample):
    """A sample with numbers of the three generators of the process."""
    return [
        sample,
        random.getrandbits(30),
        int(np.random.randint(1 << 30)),
        int(torch.randint(1 << 30, ())),
    ]


class KillsWorkerOnce:
    """Kills the process that transforms the sample `index`, the first time."""

    def __init__(self, index, marker):
        self.index, self.marker = index, marker

    def __call__(self, sample):
        if sample == self.index:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return negated(sample)
            os.kill(os.getpid(), signal.SIGKILL)
        return negated(sample)


# What a program does.


def seed_program(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def as_rank(rank, world_size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))


def program_draws():
    """What the program itself draws, as a training step does."""
    return [
        random.getrandbits(16),
        int(np.random.randint(1 << 16)),
        int(torch.randint(1 << 16, ())),
    ]


def read(loader, count=None, *, ahead=False, pause=0.0, draws=True):
    """One iteration, left after `count` events: each is a batch or an error, and what the program drew after it.

    With `ahead` the loop is an `async for`.
    """
    events = []

    def note(event):
        time.sleep(pause)  # a training step
        events.append([event, program_draws()] if draws else [event])
        return len(events) == count

    if count == 0:
        iter(loader)
    elif ahead:
        asyncio.run(_read_async(loader, note))
    else:
        _read(loader, note)
    return events


def event_of(error):
    """What the loop notes of an error. A torch worker puts the index at the end of a text of several lines."""
    if isinstance(error, TooManySkippedError):
        return ["every sample failed"]
    return ["error", int(str(error).split()[-1])]


def _read(loader, note):
    batches = iter(loader)
    while True:
        try:
            event = next(batches)
        except StopIteration:
            return
        except (BadSampleError, TooManySkippedError) as error:
            event = event_of(error)
        if note(event):
            return


async def _read_async(loader, note):
    batches = aiter(loader)
    while True:
        try:
            event = await anext(batches)
        except StopAsyncIteration:
            return
        except (BadSampleError, TooManySkippedError) as error:
            event = event_of(error)
        if note(event):
            return


def samples_of(events):
    """The samples of all batches, sorted."""
    samples = []
    for batch, *_ in events:
        samples += batch if isinstance(batch, list) else [batch]
    return sorted(samples, key=repr)


def attempt(function, *arguments, **options):
    """The result of a call, or the name of its error."""
    # an iteration that has raised lives on in a cycle with its error, and counts as under way
    gc.collect()
    try:
        return function(*arguments, **options)
    except (IndexError, ValueError) as error:
        return type(error).__name__
