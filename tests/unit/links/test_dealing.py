"""The bookkeeping of plans that several engines hold."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from headrace._links.dealing import Dealer
from headrace._records.batches import BatchPlan, HostBatch


def plan(number: int) -> BatchPlan:
    return BatchPlan(number, [None], seed=0)


def deal(dealer: Dealer, numbers: Sequence[int], engines: Sequence[int]):
    dealer.waiting.extend(map(plan, numbers))
    return {
        engine: [each.number for each in given]
        for engine, given in dealer.deal(engines).items()
    }


def receive(dealer: Dealer, engine: int, number: int) -> list[int]:
    dealer.receive(engine, HostBatch(plan(number), None, 1))
    made: deque[HostBatch] = deque()
    dealer.take_made(made)
    return [host.plan.number for host in made]


def test_plans_go_to_the_engine_with_the_fewest_unfinished() -> None:
    dealer = Dealer(3)
    assert deal(dealer, range(4), range(3)) == {0: [0, 3], 1: [1], 2: [2]}
    assert [receive(dealer, 0, number) for number in (3, 0)] == [[3], [0]]
    assert deal(dealer, [4, 5, 6], range(3)) == {0: [4, 5], 1: [6]}


def test_chunks_stay_together() -> None:
    dealer = Dealer(2, chunked=True)
    assert deal(dealer, range(6), range(2)) == {0: [0, 1, 2], 1: [3, 4, 5]}
    assert deal(dealer, [6], range(2)) == {0: [6]}


def test_batch_that_ended_an_engine_waits_for_the_batches_before_it() -> None:
    dealer = Dealer(2, in_order=True)
    assert deal(dealer, [0, 1], range(2)) == {0: [0], 1: [1]}
    assert dealer.take_back([1]) == (1, 1)
    assert deal(dealer, [2], range(2)) == {1: [2]}
    assert receive(dealer, 1, 2) == []
    assert deal(dealer, [], range(2)) == {}
    assert receive(dealer, 0, 0) == [0]
    assert deal(dealer, [], range(2)) == {0: [1]}


def test_engine_in_order_begins_after_the_batches_that_have_arrived() -> None:
    dealer = Dealer(1, in_order=True)
    assert deal(dealer, [0, 1, 2], [0]) == {0: [0, 1, 2]}
    dealer.receive(0, HostBatch(plan(0), None, 1))  # Ctrl-C comes before `take_made`
    dealer.recall([0])
    assert dealer.first_missing() == 1
    assert deal(dealer, [], [0]) == {0: [1, 2]}


@pytest.mark.parametrize("in_order", [False, True])
def test_random_deaths_lose_and_double_nothing(in_order: bool) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        engines = draw.randint(1, 4)
        dealer = Dealer(engines, in_order=in_order)
        pending, delivered = list(range(60)), list[int]()
        held: dict[int, list[int]] = {engine: [] for engine in range(engines)}
        up = sorted(draw.sample(range(engines), draw.randint(1, engines)))
        while len(delivered) < 60:
            count = draw.randint(0, 4)
            for engine, given in deal(dealer, pending[:count], up).items():
                held[engine] += given
            del pending[:count]
            engine = draw.randrange(engines)
            if draw.random() < 0.05:
                held[engine].clear()
                dealer.take_back([engine])
                up = sorted(
                    {*up, engine}
                    if len(up) == 1 or draw.random() < 0.7
                    else {*up} - {engine}
                )
            elif held[engine]:
                number = held[engine].pop(
                    draw.randrange(len(held[engine])) if draw.random() < 0.3 else 0
                )
                delivered += receive(dealer, engine, number)
        assert sorted(delivered) == list(range(60))
        assert delivered == sorted(delivered) or not in_order
