"""What limits a loader, from records of batches whose times are known."""

import itertools

import pytest

from headrace._records.batches import FetchLoad, RequestCounts, StageTimes
from headrace.telemetry.counters import BatchRecord
from headrace.telemetry.diagnosis import Setup
from headrace.telemetry.figures import WAITS
from headrace.telemetry.report import make_report

SETUP = Setup(
    concurrency=8,
    num_workers=4,
    look_ahead=8,
    in_order=True,
    memory_budget=None,
    placement="process",
    stream=False,
    cores=16,
    most_concurrency=1024,
)
COMPUTE = 0.01  # seconds between two calls of next()
FULL = FetchLoad(in_flight=8, limit=8, queued=100)
IDLE = FetchLoad(in_flight=2, limit=8)


def records(
    *,
    count=50,
    load=IDLE,
    fetch_seconds=0.02,
    requests=None,
    cpu=0.1,
    queued=0.0,
    consumer_cpu=0.0,
    blocked=0.0,
    start_up=0.0,
    work_cpu=0.0,
    work_queued=0.0,
    **steps,
):
    """Batches, each of which waits in `next()` for the given steps, one after the other, of so many seconds.

    A step may also be a function of the batch's number.
    """
    made = []
    now = 100.0
    for number in range(count):
        called = now
        lengths = {
            step: steps.get(step.replace("-", "_").replace(" ", "_"), 0.0)
            for step in WAITS
        }
        lengths = {
            step: length(number) if callable(length) else length
            for step, length in lengths.items()
        }
        if not number:
            lengths["plan"] += start_up
        points, at = {}, called
        for step in WAITS:
            at += lengths[step]
            points[step] = at
        times = StageTimes(
            admitted=points["plan"],
            began=points["queue"],
            fetched=points["fetch"],
            work_began=points["worker queue"],
            work_ended=points["work"],
            assembled=points["loop"],
            fetch_seconds=fetch_seconds(number)
            if callable(fetch_seconds)
            else fetch_seconds,
            nbytes=1000,
            load=load(number) if callable(load) else load,
            engine_cpu=cpu * at,
            blocked=blocked * (at - 100.0),
            engine_queued=queued * at,
            work_cpu=work_cpu * lengths["work"],
            work_queued=work_queued * at,
        )
        taken = points["hand-over"]
        rest = called, times, called, taken, taken, at, 0, requests, consumer_cpu * at
        made.append(BatchRecord(1, number, 10, *rest))
        now = at + COMPUTE
    return made


def report(setup=SETUP, **steps):
    return make_report(records(**steps), setup)


@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        ("consumer", {"fetch": 0.0001}),
        ("latency", {"fetch": 0.02, "load": FULL}),
        ("latency", {"worker_queue": 0.001, "work": 0.04, "load": FULL}),
        ("look-ahead", {"fetch": 0.02, "load": IDLE}),
        ("memory-budget", {"queue": 0.02, "load": IDLE._replace(held_plans=2)}),
        (
            "throttling",
            {
                "fetch": 0.02,
                "load": FULL,
                "requests": RequestCounts(requests=10, throttled=2),
            },
        ),
        ("event-loop", {"fetch": 0.02, "load": FULL, "cpu": 0.95}),
        ("blocked-loop", {"fetch": 0.02, "load": FULL, "blocked": 0.4}),
        (
            "source",
            {
                "fetch": 0.02,
                "load": FULL,
                "fetch_seconds": lambda number: 0.1 if number > 2 else 0.01,
            },
        ),
        (
            "source",
            {"fetch": 0.02, "fetch_seconds": lambda number: 0.1 if number > 2 else 0.01},
        ),
        ("order", {"fetch": lambda number: 0.001 if number % 10 else 0.5, "load": IDLE}),
        ("event-loop", {"loop": 0.02, "cpu": 0.95}),
        ("cores", {"fetch": 0.02, "load": FULL, "cpu": 0.3, "queued": 0.6}),
        ("event-loop", {"fetch": 0.02, "load": FULL, "cpu": 0.7, "queued": 0.3}),
        (
            "cores",
            {"worker_queue": 0.001, "work": 0.04, "work_cpu": 0.05, "work_queued": 3.6},
        ),
        ("transport", {"loop": 0.02, "cpu": 0.3}),
        ("workers", {"worker_queue": 0.001, "work": 0.04}),
        ("transport", {"hand_over": 0.02}),
        ("copy", {"delivery": 0.02}),
        ("look-ahead", {"plan": 0.02}),
        ("start-up", {"start_up": 20.0, "fetch": 0.001}),
    ],
)
def test_limit_is_the_step_that_the_loop_waits_for(limit, steps):
    setup = SETUP._replace(num_workers=1) if limit == "workers" else SETUP
    found = report(setup, **steps)
    assert found.limit == limit
    assert bool(found.advice) == (limit not in ("consumer", "cores"))
    assert (found.advice or found.evidence) in str(found)


@pytest.mark.parametrize(
    ("most", "cpu", "advice", "predicted"),
    [
        (
            1024,
            0.1,
            "concurrency=32",
            0.0,
        ),  # 20 ms of waiting and 10 ms of computing: three times the rate is needed
        # 20 ms for a batch, of which 10 ms are computed.
        (12, 0.1, "concurrency=12", 0.5),
        (
            1024,
            0.7,
            "concurrency=16",
            1 - 10 / 21,
        ),  # the engine's thread computes 21 ms for a batch
    ],
)
def test_prediction_for_more_fetches_is_bounded_by_descriptors_and_other_stages(
    most, cpu, advice, predicted
):
    found = report(SETUP._replace(most_concurrency=most), fetch=0.02, load=FULL, cpu=cpu)
    assert (found.limit, found.advice.partition(", if the source serves more")[0]) == (
        "latency",
        advice,
    )
    assert found.wait_share == pytest.approx(2 / 3, abs=0.01)
    assert found.predicted == pytest.approx(predicted, abs=0.01)


def test_adaptive_limit_that_has_tried_more_and_came_back_is_that_of_the_source():
    auto = SETUP._replace(concurrency="auto")
    for setup, steps, limit in [
        (auto, {}, "source"),
        (SETUP, {}, "latency"),
        (auto, {"fetch_seconds": 0.2}, "latency"),  # too few fetches one after the other
        (
            auto,
            {
                "load": lambda number: (
                    FULL if number < 30 else FULL._replace(limit=16, in_flight=16)
                )
            },
            "latency",
        ),
    ]:
        found = report(
            setup, **{"fetch": 0.02, "load": FULL, "fetch_seconds": 0.02, **steps}
        )
        assert found.limit == limit
        assert ("if the source serves more at once" in str(found)) == (limit == "latency")


@pytest.mark.parametrize(
    ("limit", "setup", "steps", "change"),
    [
        (  # a GIL that the engine shares with the loop
            "event-loop",
            {"placement": "thread"},
            {"fetch": 0.02, "load": FULL, "cpu": 0.5, "consumer_cpu": 0.45},
            {"placement": "process"},
        ),
        (  # a prefetch_factor that was given is left out with more concurrency
            "latency",
            {"look_ahead": 4, "fixed_look_ahead": True},
            {"fetch": 0.08, "load": FULL._replace(in_flight=40, limit=40)},
            {"concurrency": 512, "prefetch_factor": None},
        ),
        (  # workers that are busy all the time, beside calls that wait
            "workers",
            {"num_workers": 1, "concurrency": "auto"},
            {
                "work": 0.2,
                "loop": 0.003,
                "cpu": 0.03,
                "work_cpu": 1.0,
                "load": FetchLoad(in_flight=80, limit=128),
            },
            {"num_workers": 16},
        ),
        (  # three times the rate is needed, and some to spare
            "memory-budget",
            {"memory_budget": 2 << 20},
            {"queue": 0.02, "load": IDLE._replace(held_plans=2)},
            {"memory_budget": 8 << 20},
        ),
        ("event-loop", {}, {"loop": 0.02, "cpu": 0.95}, {"engines": 4}),
        ("event-loop", {"stream": True}, {"loop": 0.02, "cpu": 0.95}, {}),
        *(
            (
                "workers",
                {"num_workers": 1},
                {"work": 0.04, "work_cpu": cpu},
                {"num_workers": 5},
            )
            for cpu in (0.01, 0.9)
        ),
    ],
)
def test_change_that_is_advised_is_of_the_limit(limit, setup, steps, change):
    found = report(SETUP._replace(**setup), **steps)
    assert (found.limit, found.change) == (limit, change)
    # the advice for transforms that wait names another remedy
    assert ("await in aget" in found.advice) == (steps.get("work_cpu") == 0.01)


@pytest.mark.parametrize(("cores", "change"), [(2, {}), (5, {"num_workers": 5})])
def test_number_of_workers_is_limited_by_the_cores(cores, change):
    # waiting for a core looks as waiting for anything else
    busy = records(worker_queue=0.01, work=0.05, work_cpu=0.2)
    overlapping = [
        each._replace(times=each.times._replace(work_began=each.times.work_began - 0.06))
        for each in busy
    ]
    found = make_report(overlapping, SETUP._replace(num_workers=2, cores=cores))
    assert found.limit == "workers"
    assert found.change == change
    assert found.advice


def test_fetches_that_take_longer_than_the_first_ones_share_a_link():
    def fetch_seconds(number):
        return 0.001 * (8 + 2 * number)

    crowded = report(fetch=0.02, load=FULL, fetch_seconds=fetch_seconds)
    assert crowded.limit == "source"
    assert (
        "the first ones, which had to wait for few others, took 10 ms" in crowded.evidence
    )
    assert report(fetch=0.02, load=FULL, fetch_seconds=0.02).limit == "latency"


@pytest.mark.parametrize("steps", [{"fetch": 0.0001}, {"hand_over": 0.02}], ids=str)
def test_event_loop_that_holds_the_gil_is_the_limit_where_it_slows_the_rest(steps):
    thread = SETUP._replace(placement="thread")
    assert report(thread, cpu=0.95, **steps).limit == "event-loop"
    assert report(thread, cpu=0.95, consumer_cpu=0.5, **steps).limit != "event-loop"
    assert report(thread, cpu=0.5, **steps).limit != "event-loop"


def test_slow_shard_of_a_stream_is_read_beside_more_others():
    stream = SETUP._replace(stream=True)
    found = report(
        stream, fetch=lambda number: 0.1 if 10 <= number < 15 else 0.001, load=FetchLoad()
    )
    assert found.limit == "latency"
    assert "shards_in_parallel=" in found.advice
    assert "hedge" not in found.advice  # streams are not hedged
    assert found.change == {}


@pytest.mark.parametrize(
    ("placement", "searched"),
    [
        ("process", ', or num_workers="auto", which finds the number'),
        ("inline", ""),
        ("ray", ""),
    ],
)
def test_work_inside_next_asks_for_workers(placement, searched):
    at_end = []
    for each in records(work=0.03):
        # The engine is done before the call; transforms run inside it.
        times = each.times._replace(
            admitted=99.0,
            began=99.0,
            fetched=99.0,
            assembled=each.called,
            work_began=each.called,
        )
        at_end.append(each._replace(times=times, planned=99.0))
    found = make_report(at_end, SETUP._replace(num_workers=0, placement=placement))
    assert found.limit == "workers"
    assert (
        found.advice == f"num_workers=4{searched}"
    )  # 30 ms of work for each 10 ms of the loop, with a fifth to spare


def contradictions(found, setup):
    """What the figures of a report say against its verdict."""
    loop, workers = (
        found.engine_cpu + found.engine_queued,
        found.workers_busy / max(1, setup.num_workers),
    )
    with_gil = (
        found.engine_cpu + found.consumer_cpu if setup.placement == "thread" else 0.0
    )
    fast = found.wait_share < 0.05 or found.waited < 50e-6 * found.batches
    allowed = {
        "consumer": fast,
        "start-up": found.start_up > found.waited,
        "event-loop": loop > 0.85 or with_gil > 0.85,
        "blocked-loop": found.blocked >= 0.1,
        "workers": workers > 0.7
        or found.waits["work"] + found.waits["worker queue"] > found.waited / 3,
        "copy": found.waits["delivery"] > found.waited / 3,
    }
    if not allowed.get(found.limit, True):
        yield f"the figures do not show it: loop {loop:.2f}, workers {workers:.2f}, {found.waits}"
    other = found.limit in ("workers", "event-loop", "start-up") or loop > 0.85
    if workers > 0.9 and not fast and not other:
        yield f"the workers are busy {workers:.2f} of the time"
    if (
        found.advice
        and found.predicted is not None
        and found.limit != "start-up"
        and not fast
    ):
        before, after = found.period, found.compute / (1 - found.predicted)
        if before < 1.04 * after:
            yield f"{found.advice}: {before} s for a batch would become {after}"
    if found.change and not found.advice:
        yield f"{found.change} without advice"


@pytest.mark.parametrize("placement", ["thread", "process"])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_no_verdict_contradicts_the_figures_beside_it(placement, workers):
    loads = FULL, IDLE, IDLE._replace(held_plans=2), FetchLoad(in_flight=64, limit=64)
    steps = [
        "plan",
        "queue",
        "fetch",
        "worker_queue",
        "work",
        "loop",
        "hand_over",
        "delivery",
    ]
    pairs = [
        {step: 0.02, other: seconds}
        for step in steps
        for other in steps
        for seconds in (0.015, 0.1)
    ]
    grid = itertools.product(
        pairs, loads, (0.05, 0.95), (0.03, 0.5), ((2, "auto"), (16, 8))
    )
    for lengths, load, cpu, blocked, (cores, concurrency) in grid:
        setup = SETUP._replace(
            num_workers=workers, placement=placement, cores=cores, concurrency=concurrency
        )
        found = report(
            setup,
            count=12,
            load=load,
            cpu=cpu,
            blocked=blocked,
            fetch_seconds=0.002,
            **lengths,
        )
        wrong = list(contradictions(found, setup))
        assert not wrong, (
            f"{lengths}, {load}, cpu {cpu}, blocked {blocked}, {setup}: {found} {wrong}"
        )


def test_few_batches_or_none_have_no_diagnosis():
    found = report(count=5, fetch=0.02)
    assert found.limit == "few-batches"
    assert "only 4 batches" in found.evidence
    found = make_report([], SETUP)
    assert found.batches == 0
    assert str(found).startswith("No batch")


def test_counts_are_in_the_text():
    requests = RequestCounts(requests=10, hedges=1, cache_hits=2)
    text = str(report(fetch=0.02, load=FULL, requests=requests))
    for fact in ("waits for             fetch 100 %", "hedges", "cache hits"):
        assert fact in text
