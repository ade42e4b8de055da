"""Retries: how long is waited, what is worth another attempt, and the budget that all fetchers share."""

from types import SimpleNamespace

import pytest

from headrace._store import backoff
from headrace._store.backoff import RetryGate, Tries
from headrace._store.errors import Cause, RequestFailure
from headrace._store.retry_policy import RetryPolicy, as_policy


@pytest.fixture
def clock(monkeypatch):
    """Time that advances only by waits, which are the longest of their range, and when the test advances it."""
    clock = SimpleNamespace(now=1000.0)

    async def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(backoff, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(backoff, "_dice", SimpleNamespace(random=lambda: 1.0))
    monkeypatch.setattr(backoff, "asyncio", SimpleNamespace(sleep=sleep))
    return clock


async def test_waits_double_up_to_the_longest_and_progress_extends_the_deadline(clock):
    async def waited(tries):
        before = clock.now
        may = await RetryGate().may_try_again(RequestFailure(Cause.SERVER, 500), tries)
        return round(clock.now - before, 6) if may else None

    tries = Tries(RetryPolicy(max_attempts=9, initial_backoff=0.1, max_backoff=1.0))
    assert [await waited(tries) for _ in range(8)] == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.0,
        1.0,
        1.0,
        1.0,
    ]
    assert await waited(tries) is None, "the ninth attempt was the last"

    tries = Tries(RetryPolicy(max_attempts=100, deadline=10.0, initial_backoff=0.0))
    part = Tries(tries.policy, "reading a part", whole=tries)
    clock.now += 9.0
    assert await waited(tries) is not None
    part.progress()
    clock.now += 9.0
    assert await waited(tries) is not None, "another part of the object came in"
    clock.now += 1.0
    assert await waited(tries) is None


def test_the_budget_is_a_reserve_and_a_share_of_what_succeeds(clock):
    policy, gate = RetryPolicy(burst=10, retry_ratio=0.5), RetryGate()
    assert [gate.take_retry(policy) for _ in range(10)] == [0.0] * 10
    assert gate.take_retry(policy) == 1.0, "a tenth of the burst is refilled each second"
    gate.successes = 4
    assert [gate.take_retry(policy), gate.take_retry(policy)] == [0.0, 0.0], (
        "four successes earn two retries"
    )
    assert gate.take_retry(policy) > 0
    clock.now += 1.0
    assert gate.take_retry(policy) == 0.0


def test_a_policy_that_makes_no_sense_is_refused_and_an_int_is_a_number_of_attempts():
    for name, value in {
        "max_attempts": 1.5,
        "initial_backoff": -1,
        "deadline": float("inf"),
        "burst": 0,
    }.items():
        with pytest.raises((ValueError, TypeError), match=name):
            RetryPolicy(**{name: value})
    assert as_policy(3) == RetryPolicy(max_attempts=3)
    for wrong in (True, "3", 2.0, None):
        with pytest.raises(TypeError, match="max_attempts must be an int"):
            as_policy(wrong)
