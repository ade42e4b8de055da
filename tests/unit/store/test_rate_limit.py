"""A limit of calls a second, in the order of the calls, on any loop."""

import asyncio
import math
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace._core.store.rate_limit import _Slots


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@given(
    burst=st.integers(1, 20),
    waits=st.lists(st.tuples(st.floats(0, 5), st.booleans()), min_size=1, max_size=200),
)
def test_no_stretch_of_time_has_more_slots_than_the_rate_allows(burst, waits):
    clock, taken = Clock(), []
    slots = _Slots(1.0, burst, clock)
    for seconds, waited in waits:
        clock.now += seconds
        while not slots.take(waited=waited):
            taken.append(clock.now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            # One more than the burst: a waiting caller may have been woken late, by up to the time between two slots.
            assert last - first + 1 <= burst + 1 + math.floor(taken[last] - taken[first] + 1e-6)


def test_late_timers_do_not_add_up():
    clock = Clock()
    slots = _Slots(1.0, 1, clock)
    assert not slots.take(waited=False)
    for number in range(1, 1000):
        assert slots.take(waited=True) == pytest.approx(100.0 + number - clock.now)
        clock.now = 100.0 + number + 0.9
        assert not slots.take(waited=True)


async def test_callers_proceed_in_the_order_of_their_calls():
    limit, order = hr.RateLimit(5000), []

    async def call(number):
        async with limit:
            order.append(number)

    await asyncio.gather(*map(call, range(100)))
    assert order == list(range(100))


async def test_burst_goes_at_once_and_the_next_waits():
    limit = hr.RateLimit(1 / 3600, burst=3)
    for _ in range(3):
        await limit.__aenter__()
    late = asyncio.ensure_future(limit.__aenter__())
    await asyncio.sleep(0)
    assert not late.done()
    late.cancel()


async def test_cancelled_caller_loses_only_its_own_slot():
    limit, order = hr.RateLimit(1000), []

    async def call(number):
        async with limit:
            order.append(number)

    calls = [asyncio.ensure_future(call(number)) for number in range(30)]
    await asyncio.sleep(0)
    for number in (1, 7, 29):
        calls[number].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert order == [number for number in range(30) if number not in (1, 7, 29)]


async def test_caller_cancelled_as_its_turn_comes_gives_the_turn_back():
    limit = hr.RateLimit(200)
    await limit.__aenter__()
    first, second = (asyncio.ensure_future(limit.__aenter__()) for _ in range(2))
    await asyncio.sleep(0)
    slots, loop = limit._slots, asyncio.get_running_loop()
    take = slots.take

    def take_and_cancel(*, waited):
        seconds = take(waited=waited)
        if not seconds:  # it is the turn of the first
            slots.take = take
            loop.call_soon(first.cancel)  # before the first is resumed
        return seconds

    slots.take = take_and_cancel
    await second
    assert first.cancelled()


def test_loops_share_the_limit():
    limit, left = hr.RateLimit(1 / 3600, burst=5), []

    async def try_to_begin():
        async with asyncio.timeout(0.05):  # enough for the burst
            while True:
                await limit.__aenter__()
                left.append(None)

    def run():
        with pytest.raises(TimeoutError):
            asyncio.run(try_to_begin())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(left) == 5


async def test_decorated_function_keeps_name_and_result():
    @hr.RateLimit(1000)
    async def fetch(index, *, twice):
        """Fetch."""
        return index * (2 if twice else 1)

    assert await fetch(3, twice=True) == 6
    assert (fetch.__name__, fetch.__doc__) == ("fetch", "Fetch.")


def test_copy_has_the_same_numbers():
    assert repr(pickle.loads(pickle.dumps(hr.RateLimit(2.5, burst=4)))) == "RateLimit(per_second=2.5, burst=4)"


@pytest.mark.parametrize("numbers", [(0,), (-1,), (math.inf,), ("3",), (True,), (3, 0), (3, 1.5), (3, True)])
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(ValueError, match="must be"):
        hr.RateLimit(*numbers)
