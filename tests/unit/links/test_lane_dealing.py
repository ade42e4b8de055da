"""Plans of lanes go to the engine that reads the lane, and after its end to the one that reads the lane on."""

import random

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.links.dealing import LaneDealer


def plans(*numbers, lanes=3):
    return [BatchPlan(number, [None], seed=0, lane=number % lanes) for number in numbers]


def made(number, lanes=3):
    return HostBatch(plans(number, lanes=lanes)[0], None, 1, worker=number % lanes, stream_state={"after": number})


def numbers(dealt):
    return {engine: [plan.number for plan in given] for engine, given in dealt.items()}


def states(dealt):
    return [plan.resume for given in dealt.values() for plan in given]


def test_plans_wait_for_an_engine_that_cannot_take_them():
    dealer = LaneDealer(2)
    assert numbers(dealer.deal(plans(*range(3)), among=[1])) == {1: [1]}
    assert dealer.waits
    assert dealer.engine_of(0) is None
    assert numbers(dealer.deal([], among=[0, 1])) == {0: [0, 2]}
    assert not dealer.waits


def test_lanes_go_to_the_engines_that_have_started():
    dealer = LaneDealer(3)
    dealer.confine([1])
    assert numbers(dealer.deal(plans(*range(4), lanes=2), among=[1])) == {1: [0, 1, 2, 3]}
    dealer.receive(1, made(0, lanes=2))
    dealer.receive(1, made(1, lanes=2))
    dealer.take_back([1])
    dealer.confine([0, 2])
    dealt = dealer.deal(plans(4, lanes=2), among=[0, 2])
    assert numbers(dealt) == {0: [2, 4], 2: [3]}
    assert states(dealt) == [{"after": 0}, None, {"after": 1}]


def test_random_deaths_lose_and_double_nothing():
    """Each engine reads its lanes without a gap: from the beginning, or from the state that it was given."""
    for seed in range(200):
        draw = random.Random(seed)
        lanes, engines = draw.randint(1, 6), draw.randint(1, 4)
        dealer, pending, delivered = LaneDealer(engines), list(range(60)), []
        held = {engine: [] for engine in range(engines)}
        position = {}  # of each lane: the engine that reads it, and the last batch that it began
        while len(delivered) < 60:
            up = [engine for engine in range(engines) if draw.random() < 0.8]
            count = draw.randint(0, 4)
            for engine, given in dealer.deal(plans(*pending[:count], lanes=lanes), among=up).items():
                for plan in given:
                    if (engine, plan.lane) not in position:
                        position[engine, plan.lane] = plan.lane - lanes if plan.resume is None else plan.resume["after"]
                    assert plan.number == position[engine, plan.lane] + lanes
                    position[engine, plan.lane] = plan.number
                    held[engine].append(plan)
            del pending[:count]
            engine = draw.randrange(engines)
            if draw.random() < 0.05:
                held[engine].clear()
                position = {place: number for place, number in position.items() if place[0] != engine}
                dealer.take_back([engine])
                dealer._losses.clear()  # none of them is the reason
            elif held[engine]:
                plan = held[engine].pop(draw.randrange(len(held[engine])) if draw.random() < 0.3 else 0)
                delivered += [host.plan.number for host in dealer.receive(engine, made(plan.number, lanes=lanes))]
        assert sorted(delivered) == list(range(60))
        assert all(
            sorted(of_lane) == of_lane
            for of_lane in ([n for n in delivered if n % lanes == lane] for lane in range(lanes))
        )
