"""Sessions of streams that begin within their epoch give what the uninterrupted session would have given."""

import pytest

from tests.unit.engine.sessions import (
    AsyncCount,
    StatefulAsyncCount,
    StatefulTorchDataset,
    StatefulTorchIterators,
    TorchCount,
    given,
    opened,
    start_after,
)

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
