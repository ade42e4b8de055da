"""The bookkeeping of plans that several engines hold, and of the lanes of a stream that they read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.links.dealing import Dealer


def plan(number: int, lanes: int | None) -> BatchPlan:
    return BatchPlan(number, [None], seed=0, lane=None if lanes is None else number % lanes)


def deal(dealer: Dealer, numbers: Sequence[int], engines: Sequence[int], lanes: int | None = None):
    dealer.waiting.extend(plan(number, lanes) for number in numbers)
    return {engine: [each.number for each in given] for engine, given in dealer.deal(engines).items()}


def receive(dealer: Dealer, engine: int, number: int, lanes: int | None = None) -> list[int]:
    made = HostBatch(plan(number, lanes), None, 1, stream_state=None if lanes is None else {"after": number})
    return [host.plan.number for host in dealer.receive(engine, made)]


def test_plans_go_to_the_engine_with_the_fewest_unfinished() -> None:
    dealer = Dealer(3)
    assert deal(dealer, range(4), range(3)) == {0: [0, 3], 1: [1], 2: [2]}
    assert [receive(dealer, 0, number) for number in (3, 0)] == [[3], [0]]
    assert deal(dealer, [4, 5, 6], range(3)) == {0: [4, 5], 1: [6]}


def test_chunks_stay_together() -> None:
    dealer = Dealer(2, chunked=True)
    assert deal(dealer, range(6), range(2)) == {0: [0, 1, 2], 1: [3, 4, 5]}
    assert deal(dealer, [6], range(2)) == {0: [6]}


@pytest.mark.parametrize("lanes", [None, 1, 5])
@pytest.mark.parametrize("in_order", [False, True])
def test_random_deaths_lose_and_double_nothing(in_order: bool, lanes: int | None) -> None:
    """Each engine reads its lanes without a gap: from the beginning, or from the state that it was given."""
    for seed in range(60):
        draw = random.Random(seed)
        engines = draw.randint(1, 4)
        dealer = Dealer(engines, in_order=in_order, stream=lanes is not None)
        pending, delivered = list(range(60)), list[int]()
        held: dict[int, list[int]] = {engine: [] for engine in range(engines)}
        position: dict[tuple[int, int], int] = {}  # of each lane: the engine that reads it, and the last batch begun
        up = sorted(draw.sample(range(engines), draw.randint(1, engines)))
        while len(delivered) < 60:
            count = draw.randint(0, 4)
            dealer.waiting.extend(plan(number, lanes) for number in pending[:count])
            del pending[:count]
            for engine, given in dealer.deal(up).items():
                for each in given:
                    if lanes is not None and each.lane is not None:
                        place = engine, each.lane
                        if place not in position or each.resume is not None:
                            assert each.resume is None or isinstance(each.resume, dict)
                            position[place] = each.lane - lanes if each.resume is None else each.resume["after"]
                        assert each.number == position[place] + lanes
                        position[place] = each.number
                    held[engine].append(each.number)
            engine = draw.randrange(engines)
            if draw.random() < 0.05:
                held[engine].clear()
                position = {place: number for place, number in position.items() if place[0] != engine}
                dealer.take_back([engine])
                up = sorted({*up, engine} if len(up) == 1 or draw.random() < 0.7 else {*up} - {engine})
            elif held[engine]:
                number = held[engine].pop(draw.randrange(len(held[engine])) if draw.random() < 0.3 else 0)
                delivered += receive(dealer, engine, number, lanes)
        assert sorted(delivered) == list(range(60))
        assert delivered == sorted(delivered) or not (in_order or lanes)
