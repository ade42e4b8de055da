"""`headrace.progress`: the line of real iterations, and of records whose times are known."""

import asyncio
import gc
import io
import threading

import pytest

import headrace as hr
from headrace._core.batches import StageTimes
from headrace.telemetry.batch_log import BatchRecord
from headrace.telemetry.counters import Counters
from headrace.telemetry.displays import TerminalDisplay
from headrace.telemetry.live_line import LiveLine
from headrace.telemetry.report import make_report
from tests.unit.telemetry.test_diagnosis import SETUP


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 64

    async def aget(self, index):
        return index


class Stream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for number in range(64):
            yield number


@pytest.fixture
def threads():
    """No thread of a line is left."""
    yield
    gc.collect()
    assert [thread for thread in threading.enumerate() if thread.name == "headrace-progress"] == []


@pytest.fixture
def file(threads):
    return io.StringIO()


def test_last_line_has_the_position_and_the_rate(file):
    with hr.DataLoader(Numbers(), 4) as loader:
        line = hr.progress(loader, name="train", file=file)
        assert len(line) == 16
        for epoch in range(2):
            assert [batch.tolist() for batch in line] == [batch.tolist() for batch in hr.DataLoader(range(64), 4)]
            last = file.getvalue().splitlines()[-1]
            assert last.startswith(f"train epoch {epoch}, batch 16/16, ")
            assert " samples/s, in 0 s" in last
            assert ", waited " in last
            assert ", limit: " in last


def test_async_iteration_has_the_line_too(file):
    async def main():
        async with hr.DataLoader(Numbers(), 4) as loader:
            return [batch async for batch in hr.progress(loader, file=file)]

    assert len(asyncio.run(main())) == 16
    assert file.getvalue().startswith("epoch 0, batch 16/16, ")


def test_stream_without_length(file):
    with hr.DataLoader(Stream(), 4) as loader:
        line = hr.progress(loader, file=file)
        assert len(list(line)) == 16
        with pytest.raises(TypeError):
            len(line)
    assert file.getvalue().startswith("epoch 0, batch 16, ")


def test_resumed_iteration_goes_on_with_the_number(file):
    with hr.DataLoader(Numbers(), 4) as loader:
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        state = loader.state_dict()
    with hr.DataLoader(Numbers(), 4) as loader:
        loader.load_state_dict(state)
        batches = iter(hr.progress(loader, file=file))
        next(batches)
        del batches
        gc.collect()
    assert file.getvalue().startswith("epoch 0, stopped at batch 11/16, ")


def test_break_and_exceptions_end_the_line_before_the_loop_is_left(file):
    with hr.DataLoader(Numbers(), 4) as loader:
        for _ in hr.progress(loader, file=file):
            break
        assert file.getvalue().startswith("epoch 0, stopped at batch 1/16, ")

        def train():
            for _ in hr.progress(loader, file=file):
                raise RuntimeError("the step failed")

        with pytest.raises(RuntimeError):
            train()
        assert file.getvalue().splitlines()[-1].startswith("epoch 1, stopped at batch 1/16, ")


def test_iteration_goes_on_after_an_error_of_a_batch(file):
    class Failing(Numbers):
        async def aget(self, index):
            if index == 5:
                raise ValueError("no such image")
            return index

    with hr.DataLoader(Failing(), 4) as loader:
        batches = iter(hr.progress(loader, file=file))
        next(batches)
        with pytest.raises(ValueError, match="no such image"):
            next(batches)
        assert file.getvalue() == ""
        assert len(list(batches)) == 14
    assert file.getvalue().startswith("epoch 0, batch 16/16, ")


def test_other_ranks_show_nothing(file, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with hr.DataLoader(Numbers(), 4) as loader:
        for rank in ("1", "0"):
            monkeypatch.setenv("RANK", rank)
            assert file.getvalue() == ""
            assert len(list(hr.progress(loader, file=file))) == 16
    assert file.getvalue()


def test_thread_draws_while_the_loader_does_not_answer(threads, monkeypatch):
    drawn = threading.Event()

    class Terminal(io.StringIO):
        def isatty(self):
            return True

        def write(self, text):
            if "waiting for the first batch" in text:
                drawn.set()
            return super().write(text)

    class Blocked(Numbers):
        async def aget(self, index):
            await asyncio.to_thread(drawn.wait)
            return index

    monkeypatch.setenv("TERM", "xterm")
    with hr.DataLoader(Blocked(), 64) as loader:
        assert len(list(hr.progress(loader, file=Terminal(), interval=0.001))) == 1


def test_closed_file_does_not_end_the_iteration(file):
    with hr.DataLoader(Numbers(), 4) as loader:
        batches = iter(hr.progress(loader, file=file, interval=0.001))
        next(batches)
        file.close()
        assert len(list(batches)) == 15


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"headrace\.progress\(\) needs a headrace\.DataLoader"):
        hr.progress([1, 2])
    with hr.DataLoader(Numbers()) as loader, pytest.raises(ValueError, match="interval must be a positive number"):
        hr.progress(loader, interval=0)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Shown:
    interval = 3600.0

    def __init__(self):
        self.lines = []

    def show(self, fields):
        self.lines.append([field.text for field in fields])

    end = show


@pytest.fixture
def line(threads):
    """A line of 100 batches of 10, of which `line.deliver` adds some; each takes a second, half of it in `next()`."""
    clock, shown, counters = Clock(), Shown(), Counters()
    reports = []

    def report():
        reports.append(clock.now)
        return make_report(counters.log.records(), SETUP)

    live = LiveLine(
        counters,
        shown,
        report=report,
        name="train",
        epoch=3,
        batches=100,
        interval=shown.interval,
        clock=clock,
    )
    live.begin()

    def deliver(batches):
        for _ in range(batches):
            called, number = clock.now + 0.5, len(counters.log.records())
            clock.now += 1
            times = StageTimes(called, called, clock.now, 0.0, 0.0, clock.now, 0.5)
            now = clock.now
            counters.log.add(BatchRecord(1, number, 10, called, times, called, now, now, now, 0, None))

    def update():
        live.update()
        return shown.lines[-1]

    live.deliver, live.now, live.clock, live.reports, live.counters = deliver, update, clock, reports, counters
    yield live
    live.end()


def test_line_before_the_first_batch_says_how_long_it_takes(line):
    line.clock.now += 7
    assert line.now() == ["train epoch 3", "waiting for the first batch for 7 s"]


def test_rate_remaining_time_and_waiting_share(line):
    line.deliver(20)
    assert line.now()[:5] == ["train epoch 3", "batch 20/100", "10 samples/s", "ETA 80 s", "waiting 50 %"]


def test_rate_is_that_of_the_last_seconds(line):
    for _ in range(30):
        line.deliver(1)
        line.now()
    line.clock.now += 20
    assert line.now()[2:5] == ["0 samples/s", "ETA 1 min 58 s", "waiting 0 %"]


def test_running_wait_counts_and_is_named(line):
    line.deliver(20)
    line.now()
    with line.counters.waiting():
        line.counters._waiting_since = line.clock.now
        line.clock.now += 30
        assert line.now() == [
            "train epoch 3",
            "batch 20/100",
            "0 samples/s",
            "ETA 3 min 26 s",
            "waiting 100 %",
            "no batch for 30 s",
        ]


def test_limit_is_computed_seldom_and_not_of_few_batches(line):
    line.deliver(5)
    assert len(line.now()) == 5
    assert len(line.reports) == 0
    line.deliver(20)
    assert line.now()[5].startswith("limit: ")
    line.clock.now += 0.9
    line.now()
    assert len(line.reports) == 1
    line.clock.now += 0.2
    line.now()
    assert len(line.reports) == 2


def test_terminal_is_closed_once_by_the_last_of_two_ends(monkeypatch):
    file = io.StringIO()
    display = TerminalDisplay(file)
    live = LiveLine(Counters(), display, report=lambda: None, name="", epoch=0, batches=None, interval=3600.0)
    live.begin()
    live.end()
    live.end(complete=True)
    assert file.getvalue() == "epoch 0  stopped before the first batch\n"


def test_epoch_without_a_batch(file):
    with hr.DataLoader(Numbers(), batch_sampler=[]) as loader:
        assert list(hr.progress(loader, file=file)) == []
    assert file.getvalue() == "epoch 0, ended without a batch\n"
