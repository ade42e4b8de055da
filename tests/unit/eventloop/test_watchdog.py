"""Blocking calls on the engine's loop: one warning for each place, and none where the loop is not to blame."""

import logging
import threading
import time
from pathlib import Path

import pytest
import requests

import headrace as hr
from headrace._eventloop import watchdog
from headrace._eventloop.loop_thread import EVENT_LOOP_VARIABLE
from tests.answers import answering
from tests.datasets import Numbers

BLOCK = 0.3  # seconds: the blocking under test
KINDS = ("sleep", "request", "compute")


def line_of(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (number,) = (
        number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}")
    )
    return number


def sleep_in_the_loop():
    time.sleep(BLOCK)  # sleeps


def request_in_the_loop(url):
    requests.get(url)  # requests


def compute_in_the_loop():
    until = time.thread_time() + BLOCK
    count = 0
    while time.thread_time() < until:
        count += 1


class Blocking:
    """Blocks in each way until that has been reported: files in `reported` name the ways."""

    def __init__(self, reported: Path, url: str) -> None:
        self.reported, self.url = reported, url

    def block(self, number: int) -> int:
        kind = KINDS[number % len(KINDS)]
        if not (self.reported / kind).exists():
            match kind:
                case "sleep":
                    sleep_in_the_loop()
                case "request":
                    request_in_the_loop(self.url)
                case "compute":
                    compute_in_the_loop()
        return number


class BlockingGets(Blocking, hr.AsyncDataset):
    def __len__(self):
        return 300

    async def aget(self, index):
        return self.block(index)


class BlockingStream(Blocking, hr.AsyncIterableDataset):
    async def __aiter__(self):
        for number in range(300):
            yield self.block(number)


class Records(logging.Handler):
    """Records of headrace; each creates a file in `reported`."""

    def __init__(self, reported: Path) -> None:
        super().__init__()
        self.reported = reported
        self.messages: list[str] = []

    def emit(self, record):
        self.messages.append(record.getMessage())
        for kind in KINDS:
            if f"{kind}_in_the_loop" in record.getMessage():
                (self.reported / kind).touch()

    def all_reported(self):
        return all((self.reported / kind).exists() for kind in KINDS)


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_reported", set())
    handler = Records(tmp_path)
    logger = logging.getLogger("headrace")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def slow_url():
    def answer(request):
        time.sleep(BLOCK)  # the latency of this server
        request.send(200, b"")

    with answering(answer) as url:
        yield url


def watch_of(loader):
    return loader._control.placements._current._engine.watch


def watchdog_threads():
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name == "headrace-watchdog"
    ]


@pytest.mark.parametrize(
    ("dataset_class", "placement", "loop"),
    [(BlockingStream, "thread", "asyncio"), (BlockingGets, "process", "uvloop")],
)
def test_blocking_calls_are_reported_with_place_and_remedy(
    dataset_class, placement, loop, records, slow_url, tmp_path, monkeypatch
):
    monkeypatch.setenv(EVENT_LOOP_VARIABLE, loop)
    dataset = dataset_class(tmp_path, slow_url)
    # a stream's samples are so in any case
    one_at_a_time = {"concurrency": 1} if dataset_class is BlockingGets else {}
    with hr.DataLoader(
        dataset, batch_size=1, placement=placement, **one_at_a_time
    ) as loader:
        for _ in loader:
            if records.all_reported():
                break
    by_kind = {
        kind: [each for each in records.messages if f"{kind}_in_the_loop" in each]
        for kind in KINDS
    }
    assert {kind: len(found) for kind, found in by_kind.items()} == dict.fromkeys(
        KINDS, 1
    ), records.messages
    assert len(records.messages) == len(KINDS)
    assert all(
        each.startswith(f"{dataset_class.__name__}: {__file__}:")
        for each in records.messages
    )
    (slept,), (requested,), (computed,) = by_kind.values()
    assert f"{__file__}:{line_of('sleeps')} in sleep_in_the_loop has blocked" in slept
    assert "await anyio.sleep(seconds)" in slept
    assert (
        f"{__file__}:{line_of('requests')} in request_in_the_loop has blocked"
        in requested
    )
    assert "use an async client" in requested
    assert "in compute_in_the_loop" in computed
    assert "transform= (or dataset.map) with num_workers=" in computed
    assert watchdog_threads() == []


def test_a_place_is_reported_once_and_its_seconds_are_counted(records):
    ended = threading.Event()

    class Sleeping(Numbers):
        async def aget(self, index):
            if not ended.is_set():
                sleep_in_the_loop()
            return index

    counted = None
    with hr.DataLoader(Sleeping(300), batch_size=1, concurrency=1) as loader:
        for _ in loader:
            watch = watch_of(loader)
            if records.messages and counted is None:
                counted = watch.blocked_seconds
            if counted is not None and watch.blocked_seconds > counted + BLOCK / 2:
                ended.set()
        assert watch.place.startswith(f"{__file__}:{line_of('sleeps')} in ")
    assert len(records.messages) == 1


def test_a_call_that_does_not_end_is_reported_while_it_blocks(records):
    released = threading.Event()

    class Waiting(Numbers):
        async def aget(self, index):
            released.wait()
            return index

    def release(record):
        released.set()
        return True

    records.addFilter(release)
    with hr.DataLoader(Waiting(1), batch_size=1) as loader:
        assert len(list(loader)) == 1
    (message,) = records.messages
    assert " so far, " in message
    assert ".aget has blocked" in message


def test_short_calls_that_block_together_are_reported(records):
    class Reading(Numbers):
        async def aget(self, index):
            if not records.messages:
                time.sleep(0.02)  # noqa: ASYNC251  # the blocking under test
            return index

    with hr.DataLoader(Reading(1000), batch_size=50, concurrency=50) as loader:
        for _ in loader:
            if records.messages:
                break
    assert ".aget has blocked" in records.messages[0]


class Healthy(Numbers):
    async def aget(self, index):
        return sum(number * number for number in range(200))


def test_consumer_that_holds_the_gil_is_no_cause_of_a_warning(records, engine_loop):
    def hold():
        sum(range(4_000_000))  # in C, without releasing the GIL
        for number in range(100_000):
            number * number

    holders = [threading.Thread(target=hold) for _ in range(3)]
    with hr.DataLoader(
        Healthy(600), batch_size=100, concurrency=64, placement="thread"
    ) as loader:
        for thread in holders:
            thread.start()
        for _ in loader:
            hold()
        watch = watch_of(loader)
    for thread in holders:
        thread.join()
    assert (records.messages, watch.blocked_seconds) == ([], 0.0)
