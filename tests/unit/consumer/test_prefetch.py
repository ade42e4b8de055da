"""The look-ahead keeps the engine fed, in groups where that does no harm."""

import itertools

import pytest

from headrace._consumer.prefetch import CALM, PROMPT, Prefetcher
from headrace._engine.look_ahead import LookAheadSize
from headrace._records.batches import (
    NO_TIMES,
    BatchPlan,
    FetchLoad,
    HostBatch,
    StageTimes,
)


def plans():
    for number in itertools.count():
        yield BatchPlan(number, (number,), 0)


class Engine:
    """Has what it was sent ready at once, or late."""

    def __init__(self, drawn, size, most=None, **options):
        self.sent = []
        self.look_ahead = LookAheadSize(size, most or size)
        self.ahead = Prefetcher(drawn, self.admit, self.look_ahead, **options)
        self.arrived = 0
        self.taken = 0

    def admit(self, group):
        self.sent.append([plan.number for plan in group])

    def ready(self):
        return self.arrived - self.taken

    def arrive(self):
        self.arrived = sum(map(len, self.sent))

    def stall(self):
        self.ahead.on_stall(1.0)

    def take(self, times=NO_TIMES):
        number, self.taken = self.taken, self.taken + 1
        host = HostBatch(BatchPlan(number, (number,), 0), None, 1, times=times)
        if self.ahead.on_batch(host, self.ready()):
            self.ahead.fill()

    def run_without_waiting(self, batches):
        for _ in range(batches):
            self.arrive()
            self.take()


def sizes(engine, batches, **times):
    """The look-ahead after each of some batches, all of which the consumer has to wait for."""
    for _ in range(batches):
        engine.stall()
        engine.arrive()
        engine.take(StageTimes(**times))
        yield engine.look_ahead.batches


def numbers(groups):
    return list(itertools.chain(*groups))


def test_plans_are_sent_in_groups_while_the_consumer_never_waits():
    engine = Engine(plans(), 6)
    engine.ahead.fill()
    engine.run_without_waiting(PROMPT + 50)
    groups = engine.sent[PROMPT + 1 :]
    assert {len(group) for group in groups} == {5}
    assert numbers(engine.sent) == list(range(engine.ahead.planned))


def test_plans_that_are_less_than_a_group_are_sent_when_nothing_is_under_way():
    engine = Engine(plans(), 2, group=0.5, group_of=lambda position: 0)
    engine.ahead.plans = (
        BatchPlan(n, (n,), 0, positions=range(n, n + 1)) for n in range(9)
    )
    engine.ahead.fill()
    engine.run_without_waiting(9)
    assert numbers(engine.sent) == list(range(9))


IDLE = FetchLoad(in_flight=7, limit=8, unused=1)


def test_look_ahead_shrinks_while_the_consumer_never_waits():
    engine = Engine(plans(), 6, most=20)
    engine.ahead.fill()
    *_, grown = sizes(engine, 9, fetched=2.0, load=IDLE)  # the consumer waits since 1.0
    shrunk = [grown]
    for _ in range(5):
        engine.run_without_waiting(CALM)
        shrunk.append(engine.look_ahead.batches)
        assert len(engine.ahead.under_way) <= shrunk[-2]
    assert shrunk == [15, 10, 8, 7, 6, 6]
    assert numbers(engine.sent) == list(range(engine.ahead.planned))


def test_look_ahead_of_a_stream_grows_while_its_batches_are_small():
    engine = Engine(plans(), 6, most=64, group=0.5)
    engine.ahead.fill()

    small = {"fetched": 2.0, "nbytes": 8 << 10}
    assert set(sizes(engine, CALM - 12, **small)) == {6}  # an epoch may be short
    assert max(sizes(engine, CALM, **small)) == 64
    assert [*sizes(engine, 6, fetched=2.0, nbytes=1 << 20)][-1] == 6
    assert max(sizes(engine, CALM, fetched=2.0)) == 6  # of unknown size


@pytest.mark.parametrize(
    "options", [{"free": 0}, {"by_size": True, "in_workers": True}], ids=str
)
@pytest.mark.parametrize(
    "waits", [lambda batch: True, lambda batch: False, lambda batch: batch % 7 < 3]
)
def test_number_of_drawn_plans_does_not_depend_on_speed(options, waits):
    engine = Engine(plans(), 4, most=32, **options)
    engine.ahead.fill()
    quick = StageTimes(
        fetched=2.0, work_began=2.0, work_ended=2.0001, nbytes=1 << 18, load=IDLE
    )
    ahead = []
    for batch in range(4 * CALM):
        if waits(batch):
            engine.stall()
        engine.arrive()
        engine.take(quick._replace(load=IDLE if "free" in options else FetchLoad()))
        ahead.append(engine.ahead.planned - engine.taken)
    grown = itertools.accumulate((4, *[2] * 3), int.__mul__)
    assert sorted(set(ahead)) == ([4] if "free" in options else list(grown))
    assert ahead.index(max(ahead)) <= CALM
    assert numbers([*engine.sent, [plan.number for plan in engine.ahead.held]]) == list(
        range(engine.ahead.planned)
    )


def test_look_ahead_of_workers_grows_while_their_batches_are_small_and_quick():
    engine = Engine(plans(), 4, most=32, in_workers=True)
    engine.ahead.fill()

    quick = {"fetched": 0.5, "work_began": 2.0, "work_ended": 2.0005, "nbytes": 1 << 18}
    slow, large = {**quick, "work_ended": 2.002}, {**quick, "nbytes": 1 << 23}
    assert set(sizes(engine, CALM - 8, **quick)) == {4}  # an epoch may be short
    assert set(sizes(engine, CALM, **slow)) == {4}
    assert set(sizes(engine, CALM, **large)) == {4}
    before = len(engine.sent)
    assert [*sizes(engine, CALM, **quick)][-1] == 32
    assert {len(group) for group in engine.sent[before + 4 :]} == {16}
    assert numbers(engine.sent) == list(range(engine.ahead.planned))
    assert [*sizes(engine, 8, **large)][-1] == 4
