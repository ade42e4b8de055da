"""Sessions of streams that begin within their epoch give what the uninterrupted session would have given."""

import itertools

import pytest

from headrace._core.batches import SessionStart
from headrace._core.engine.streams import StreamFetch
from headrace._core.error_policy import Tolerance
from headrace._core.failure import Failure
from tests.unit.engine.sessions import (
    BEGINNING,
    AsyncCount,
    StatefulAsyncCount,
    StatefulTorchDataset,
    StatefulTorchIterators,
    TorchCount,
    given,
    opened,
    start_after,
)
from tests.unit.engine.stages import Stage, plan

ASYNC = [AsyncCount, StatefulAsyncCount]
TORCH = [TorchCount, StatefulTorchIterators, StatefulTorchDataset]
PLACES = [
    *((make, place, 0) for make in ASYNC for place in ("thread", "process")),
    *((make, place, 1) for make in ASYNC for place in ("process",)),
    *((make, "inline", 0) for make in TORCH),
    *((make, "thread", workers) for make in TORCH for workers in (1, 2, 3)),
]
pytestmark = pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")


def name(place):
    make, placement, workers = place
    return f"{make.__name__}-{placement}-{workers}"


EVERYWHERE = pytest.mark.parametrize("place", PLACES, ids=name)
FAILING = pytest.mark.parametrize(  # a generator would end with its first error
    "place", [place for place in PLACES if place[0] is not StatefulTorchDataset], ids=name
)


def check_every_position(place, length, *, failing=(), size=2, **options):
    make, placement, workers = place
    with opened(make(length, failing), placement, num_workers=workers, size=size, **options) as opener:
        hosts = [*opener.batches(size=size)]
        assert all(host.stream_state for host in hosts if not host.empty)
        full = [host for host in hosts if not host.empty]
        assert {host.worker for host in full} <= (set(range(workers)) if make in TORCH and workers else {None})
        for count in range(len(hosts) + 1):
            rest = [*opener.batches(start_after(hosts[:count], workers), size=size)]
            assert given(hosts[:count]) + given(rest) == given(hosts), f"after {count} batches"
            numbers = [host.plan.number for host in rest]
            assert numbers == [*range(count, count + len(rest))]
            expected = {host.plan.indices: host.plan.positions for host in full}
            for host in rest:
                if not host.empty and workers <= 1:
                    assert host.plan.positions == expected[host.plan.indices]
    return hosts


@EVERYWHERE
def test_restored_session_continues_after_the_last_batch(place):
    check_every_position(place, 7)


@FAILING
def test_restored_session_continues_after_failures(place):
    check_every_position(place, 7, failing=(1, 4))


@FAILING
def test_restored_session_continues_where_failures_are_skipped(place):
    check_every_position(place, 7, failing=(1, 4), skips=True)


@pytest.mark.parametrize("length", [6, 7])
@EVERYWHERE
def test_restored_session_drops_the_incomplete_last_batch(place, length):
    check_every_position(place, length, drop_last=True)


@EVERYWHERE
def test_restored_session_continues_without_batches(place):
    check_every_position(place, 4, size=None)


@EVERYWHERE
def test_restored_session_of_an_empty_stream_is_empty(place):
    check_every_position(place, 0)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("make", ASYNC)
def test_batches_assembled_on_the_consumers_thread_have_the_state_too(make, deferred):
    with opened(make(7), "thread", deferred=deferred) as opener:
        hosts = [*opener.batches()]
    assert [host.stream_state["position"] for host in hosts if host.stream_state] == [2, 4, 6, 7]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("make", TORCH)
def test_workers_that_overtake_each_other_continue_each_after_its_last_batch(make, workers):
    with opened(make(11), "thread", num_workers=workers, in_order=False) as opener:
        hosts = [*opener.batches()]
        for count in range(len(hosts) + 1):
            rest = [*opener.batches(start_after(hosts[:count], workers))]
            samples = [sample for batch in given([*hosts[:count], *rest]) for sample in batch]
            assert sorted(samples) == [*range(11)]


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("failing", [(), (0,), (3,), (2, 3), (6,)])
def test_samples_delivered_out_of_order_are_left_out(on_loop, failing, skips):
    """Whichever batches were delivered out of order, what follows is what was not delivered."""

    async def scenario():
        uninterrupted = await all_batches(None, failing, skips, 8)
        numbers = range(len(uninterrupted))
        for first in numbers:
            for beyond in itertools.chain(*(itertools.combinations(numbers[first + 1 :], n) for n in range(4))):
                streams = {None: uninterrupted[first - 1].stream_state} if first else {}
                given_before = [uninterrupted[number] for number in (*range(first), *beyond)]
                delivered = sorted(itertools.chain(*(raw.plan.indices for raw in given_before[first:])))
                ranges = tuple(range(place, place + 1) for place in delivered)
                start = SessionStart(first, streams, delivered=ranges)
                rest = await all_batches(start, failing, skips, 8)
                found = sorted(slot for raw in (*given_before, *rest) for slot in slots(raw))
                assert found == sorted(slot for raw in uninterrupted for slot in slots(raw))

    on_loop(scenario)


async def all_batches(start, failing, skips, length):
    def make(deliver, spawn):
        return StreamFetch(
            AsyncCount(length, failing), False, Tolerance(skips=skips), deliver, spawn, start or BEGINNING
        )

    async with Stage(make) as stage:
        number = 0
        while not (stage.delivered and stage.delivered[-1].end):
            await stage.admit(plan(number, [None] * 2))
            number += 1
        return [raw for raw in stage.delivered if raw.samples]


def slots(raw):
    """The position of each sample in the stream, and among those of all ranks, with the sample or the error."""
    samples = [repr(sample.error) if isinstance(sample, Failure) else str(sample) for sample in raw.samples]
    return [*zip(raw.plan.indices, raw.plan.positions, samples, strict=True)]
