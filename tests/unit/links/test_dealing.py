"""The bookkeeping of plans that several engines hold."""

from __future__ import annotations

import random

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.links.dealing import Dealer


def plans(*numbers: int) -> list[BatchPlan]:
    return [BatchPlan(number, [number], seed=number) for number in numbers]


def made(number: int) -> HostBatch:
    return HostBatch(plans(number)[0], None, 1)


def numbers(dealt: dict[int, list[BatchPlan]]) -> dict[int, list[int]]:
    return {engine: [plan.number for plan in plans] for engine, plans in dealt.items()}


def test_plans_go_to_the_engine_with_the_fewest_unfinished() -> None:
    dealer = Dealer(3)
    assert numbers(dealer.deal(plans(0, 1, 2, 3), among=range(3))) == {0: [0, 3], 1: [1], 2: [2]}
    dealer.receive(0, made(0))
    dealer.receive(0, made(3))
    assert numbers(dealer.deal(plans(4, 5, 6), among=range(3))) == {0: [4, 5], 1: [6]}


def test_chunks_stay_together() -> None:
    dealer = Dealer(2, chunked=True)
    assert numbers(dealer.deal(plans(*range(6)), among=range(2))) == {0: [0, 1, 2], 1: [3, 4, 5]}
    assert numbers(dealer.deal(plans(6), among=range(2))) == {0: [6]}


def test_batch_that_was_lost_twice_is_made_alone() -> None:
    dealer = Dealer(2)
    dealer.deal(plans(0, 1), among=[0])
    dealer.take_back([0])
    dealer.deal(plans(2), among=[1])
    dealer.take_back([1])  # 0 and 1 for the second time
    assert numbers(dealer.deal([], among=[0, 1])) == {0: [0], 1: [1]}
    assert dealer.deal(plans(3), among=[0, 1]) == {}
    dealer.receive(0, made(0))
    assert numbers(dealer.deal([], among=[0, 1])) == {0: [2, 3]}
    dealer.receive(1, made(1))
    assert numbers(dealer.deal(plans(4), among=[0, 1])) == {1: [4]}


def test_an_engine_is_kept_free_for_a_batch_that_is_made_alone() -> None:
    dealer = Dealer(2)
    dealer.deal(plans(0), among=[0])
    dealer.take_back([0])
    dealer.deal([], among=[0])
    dealer.deal(plans(1, 2), among=[1])
    dealer.take_back([0])
    assert numbers(dealer.deal(plans(3), among=[1])) == {}  # engine 1 finishes what it has
    dealer.receive(1, made(1))
    dealer.receive(1, made(2))
    assert numbers(dealer.deal([], among=[1])) == {1: [0]}


def test_each_plan_is_at_one_engine_or_waits_whatever_happens() -> None:
    draw = random.Random(0)
    dealer, alive, outstanding, number = Dealer(4), [0, 1, 2, 3], set[int](), 0
    for _ in range(3000):
        event, new = draw.random(), []
        if event < 0.4 and len(outstanding) < 20:
            new = plans(*range(number, number + draw.randrange(1, 5)))
            number += len(new)
            outstanding |= {plan.number for plan in new}
        elif event < 0.9:
            held = [each for each in sorted(outstanding) if dealer.engine_of(each) is not None]
            if held:
                batch = draw.choice(held)
                engine = dealer.engine_of(batch)
                assert engine is not None
                dealer.receive(engine, made(batch))
                outstanding.remove(batch)
        else:
            dealer.take_back([draw.choice(alive)])
            alive = alive[1:] if draw.random() < 0.01 and len(alive) > 1 else alive
        given = [plan.number for plans in dealer.deal(new, among=alive).values() for plan in plans]
        assert len(given) == len(set(given))
        assert set(given) <= outstanding
        assert dealer.waits or all(dealer.engine_of(batch) is not None for batch in outstanding)
    while outstanding:  # nothing is lost
        held = [each for each in outstanding if dealer.engine_of(each) is not None]
        for batch in held:
            engine = dealer.engine_of(batch)
            assert engine is not None
            dealer.receive(engine, made(batch))
            outstanding.remove(batch)
        dealer.deal([], among=alive)
        assert held
    assert number > 500
