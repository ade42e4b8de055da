"""Operations on a stream's samples before batching: `filter`, `map`, `repeat`; in the workers, in order."""

import asyncio
import itertools
import os
import random
import signal
import threading

import pytest
import torch

import headrace as hr
from headrace._streams.sample_functions import CHUNK
from tests.unit.consumer.test_epoch import drain
from tests.unit.consumer.test_skipping import Mine, lists
from tests.unit.streams.reading import Count

WHERE = pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2}, {"placement": "process"}]
)


# Filtering


@WHERE
def test_error_of_a_predicate_is_raised_in_order_and_later_samples_follow(options):
    def check(sample):
        if sample == 25:
            raise Mine("no")
        return True

    with hr.DataLoader(
        Count(40).filter(check), batch_size=None, collate_fn=int, **options
    ) as loader:
        batches = iter(loader)
        assert list(itertools.islice(batches, 25)) == list(range(25))
        with pytest.raises(Mine, match="no") as caught:
            next(batches)
        notes = "\n".join(caught.value.__notes__)
        assert "headrace: stage fetch, batch 25" in notes
        assert "in filter(" in notes
        assert "check), before batching" in notes
        assert list(batches) == list(range(26, 40))


def test_sample_that_kills_its_worker_before_batching_loses_no_other():
    def die(sample):
        if sample == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    with hr.DataLoader(
        Count(60).filter(die), batch_size=None, collate_fn=int, num_workers=1
    ) as loader:
        came = drain(iter(loader))
    error = came.pop(20)
    assert isinstance(error, hr.errors.WorkerDiedError)
    assert "on samples that are not yet in a batch, attempt 2" in str(error)
    assert came == [i for i in range(60) if i != 20]


def test_function_or_result_that_cannot_be_pickled_is_named_and_loses_no_other_sample():
    lock = threading.Lock()
    loader = hr.DataLoader(
        Count(4).filter(lambda sample: lock), num_workers=1, placement="thread"
    )
    with (
        loader,
        pytest.raises(hr.errors.NotPicklableError, match=r"filter function.*lambda"),
    ):
        next(iter(loader))
    stream = (
        Count(30)
        .map(lambda i: threading.Lock() if i == 20 else i)
        .filter(lambda sample: True)
    )
    with hr.DataLoader(stream, batch_size=None, collate_fn=int, num_workers=1) as loader:
        batches = iter(loader)
        assert list(itertools.islice(batches, 20)) == list(range(20))
        with pytest.raises(
            hr.errors.NotPicklableError, match="the result of a function before batching"
        ):
            next(batches)
        assert list(batches) == list(range(21, 30))


def test_random_predicates_under_a_split_keep_the_same_samples_on_all_ranks_without_a_seed(
    as_rank,
):
    kept = (
        Count(64)
        .map(lambda i: (i, random.random()))
        .filter(lambda sample: sample[1] < 0.6)
    )
    stream = (
        kept.split()
        .map(lambda sample: (*sample, random.random()))
        .filter(lambda sample: True)
    )
    epochs = []
    for rank in range(2):
        torch.manual_seed(rank)
        as_rank(rank, 2)
        with hr.DataLoader(stream, batch_size=None, collate_fn=tuple) as loader:
            epochs.append([list(loader), list(loader)])
    for first, second in zip(*epochs, strict=True):
        both = [sample for pair in zip(first, second, strict=True) for sample in pair]
        assert [index for index, _, _ in both] == sorted({index for index, _, _ in both})
        assert len({above for _, _, above in both}) == len(
            both
        )  # after the split each rank draws its own
    assert epochs[0][0] != epochs[0][1]


def test_interrupted_predicate_is_called_again_for_the_same_samples():
    interrupts = iter([KeyboardInterrupt, SystemExit])

    def check(sample):
        if sample == 5 and (interrupt := next(interrupts, None)) is not None:
            raise interrupt
        return True

    with hr.DataLoader(Count(8).filter(check), batch_size=None, collate_fn=int) as loader:
        batches, given = iter(loader), []
        for interrupt in (KeyboardInterrupt, SystemExit):
            with pytest.raises(interrupt):
                given.extend(batches)
        given.extend(batches)
    assert given == list(range(8))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stream_is_read_no_further_ahead_than_the_bound(num_workers):
    reads = []

    class Feed(hr.AsyncIterableDataset):
        async def __aiter__(self):
            for i in range(10_000):
                reads.append(i)
                yield i

    options = {
        "batch_size": 1,
        "num_workers": num_workers,
        "prefetch_factor": 1 if num_workers else None,
    }
    with hr.DataLoader(
        Feed().filter(lambda i: True), placement="thread", **options
    ) as loader:
        batches = iter(loader)
        for _ in range(20):
            next(batches)
        assert max(reads) < 20 + 10 + 4 * CHUNK


def test_live_feed_delivers_a_sample_before_the_next_arrives():
    more = threading.Semaphore(1)

    class Feed(hr.AsyncIterableDataset):
        async def __aiter__(self):
            for i in range(5):
                await asyncio.to_thread(more.acquire)
                yield i

    with hr.DataLoader(
        Feed().filter(lambda i: True), batch_size=None, placement="thread", num_workers=1
    ) as loader:
        for sample in loader:
            assert more.acquire(blocking=False) is False
            more.release()
            if sample == 4:
                break


# Dropping


DROPPED = {
    "filter": lambda stream: stream.filter(lambda sample: False),
    "pack": lambda stream: stream.map(lambda sample: []).pack(4),
    "mix": lambda stream: hr.mix([stream, stream], [1, 2], stop="all").filter(
        lambda sample: False
    ),
}


@pytest.mark.parametrize("drop", DROPPED.values(), ids=DROPPED)
def test_repeated_stream_of_which_nothing_is_left_is_an_error(drop):
    stream = drop(Count(3).repeat())
    for read in (iter(stream), iter(hr.DataLoader(stream))):
        with pytest.raises(ValueError, match="repeated without end"):
            next(read)


# Repeating


def test_repeated_shuffled_stream_has_another_order_each_time_and_in_each_epoch():
    stream = Count(30).shuffle(10, seed=3).repeat(3)
    with hr.DataLoader(stream, batch_size=30) as loader:
        orders = [tuple(batch.tolist()) for _ in range(2) for batch in loader]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(30)) for order in orders)


class Slow:
    """An iterator whose `aclose` takes until it is cancelled."""

    def __init__(self, count):
        self.numbers = iter(range(count))
        self.closing = threading.Event()
        self.closed = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        for number in self.numbers:
            return number
        raise StopAsyncIteration

    async def aclose(self):
        self.closing.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.closed += 1


async def test_a_cancelled_close_closes_the_other_streams_too():
    streams = [Slow(8) for _ in range(3)]
    mixed = aiter(hr.mix(streams, weights=[1] * 3))
    await anext(mixed)
    closing = asyncio.create_task(mixed.aclose())
    for _ in streams:  # each is waited for, and cancelled, by itself
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert [stream.closed for stream in streams] == [1, 1, 1]


def test_closing_a_loader_while_its_stream_is_closed_logs_nothing(caplog):
    stream = Slow(4)
    with hr.DataLoader(stream, batch_size=2) as loader:
        assert len(lists(itertools.islice(loader, 2))) == 2
        stream.closing.wait()
    assert stream.closed == 1
    assert caplog.records == []
