"""num_workers="auto": which numbers are tried, and kept."""

import pytest

from headrace._consumer.worker_search import HOLD, START_SECONDS, WorkerSearch
from headrace._records.batches import StageTimes
from headrace.telemetry.counters import BatchRecord
from headrace.telemetry.diagnosis import Setup

# Seconds of the loop, and of transforms and collation, for a batch.
COMPUTE, WORK = 0.01, 0.04


class Machine:
    """A loader of which transforms are the limit: its batches, as so many workers on so many cores would make them."""

    def __init__(
        self,
        workers=1,
        cores=8,
        *,
        real_cores=8,
        work=WORK,
        nbytes=0,
        memory_budget=None,
        start=0.5,
        ahead=0.01,
    ):
        self.work, self.real_cores, self.nbytes, self.start = (
            work,
            real_cores,
            nbytes,
            start,
        )
        self.setup = Setup(
            "auto", workers, 6, True, memory_budget, "thread", False, cores, 1024
        )
        self.search = WorkerSearch(1, workers)
        self.ahead = ahead  # seconds from a plan to the call that takes its batch
        self.working = workers  # workers that have started
        self.now, self.started, self.records, self.cpu_share = 100.0, 0.0, [], 0.1

    def run(self, seconds):
        """Let the loop run for so long; returns the numbers of workers that were set, in order."""
        end, numbers = self.now + seconds, []
        while self.now < end:
            self.batch()
            setup = self.setup._replace(num_workers=self.search.number)
            if self.now > self.search.next_look and self.search.look(
                self.records[-1024:], setup
            ):
                numbers.append(self.search.number)
                self.started = self.now + self.start
        return numbers

    def batch(self):
        called = self.now
        if called - self.ahead >= self.started:
            self.working = self.search.number
        ready = called + max(
            0.0, self.work / min(self.working, self.real_cores) - COMPUTE
        )
        times = StageTimes(
            admitted=called - 1,
            began=called - 1,
            fetched=called - 0.9,
            work_began=ready - self.work,
            work_ended=ready,
            assembled=ready,
            worked_by=(1, 1, len(self.records) % self.working),
            nbytes=self.nbytes,
        )
        self.now = ready + COMPUTE
        number, cpu = len(self.records), self.cpu_share * self.now
        self.records.append(
            BatchRecord(
                1,
                number,
                8,
                called - self.ahead,
                times,
                called,
                ready,
                ready,
                ready,
                2,
                None,
                cpu,
            )
        )


@pytest.fixture
def said(caplog):
    """What the search logs."""
    caplog.set_level("INFO", logger="headrace")
    return lambda: [record.getMessage() for record in caplog.records]


def test_workers_are_added_one_by_one_until_the_loop_is_the_limit(said):
    machine = Machine()
    assert machine.run(60) == [2, 3, 4]
    first = "num_workers=2: transforms and collation were the limit; 2.00 times the rate with 1, where 2.00 were"
    assert said()[0].startswith(first)
    assert len(said()) == 3
    assert machine.run(600) == []


def test_workers_with_nothing_to_do_are_ended(said):
    machine = Machine(workers=8, work=9e-5)
    assert machine.run(60) == [7, 6, 5, 4, 3, 2, 1]
    assert said()[0] == "num_workers=7: 0.0 of 8 workers were busy"
    assert Machine(workers=6).run(60) == []


@pytest.mark.parametrize("cores", [1, 3, 4])
def test_workers_are_at_most_as_many_as_cores(cores):
    assert max([1, *Machine(cores=cores).run(120)]) == cores


def test_a_core_that_the_training_loop_uses_is_left_to_it():
    machine = Machine(cores=4)
    machine.cpu_share = 1.0
    assert machine.run(60) == [2, 3]


def test_batches_in_workers_stay_within_the_memory_budget():
    assert Machine(nbytes=100, memory_budget=250).run(20) == [2]


def test_worker_without_half_the_gain_is_taken_back(said):
    machine = Machine(work=0.08, real_cores=2)
    assert machine.run(12) == [2, 3, 2]
    assert said()[1].startswith(
        "num_workers=2, not 3: 1.00 times the rate with 2, where 1.50 were"
    )


def test_trials_in_vain_become_rare():
    machine = Machine(work=0.08, real_cores=1)
    assert machine.run(HOLD + 15) == [2, 1, 2, 1]
    machine.run(3600)
    assert len(machine.run(3600)) <= 6


def test_worker_that_does_not_start_is_given_up():
    assert Machine(start=1e9).run(START_SECONDS + 20)[:2] == [2, 1]


@pytest.mark.parametrize("ahead", [5.0, START_SECONDS + 5])
def test_worker_is_judged_by_batches_that_were_planned_since_it_works(ahead, said):
    machine = Machine(ahead=ahead)
    assert machine.run(3 + 2 * ahead) == [2]
    assert said() == []
    machine.run(ahead)
    assert said()[0].startswith("num_workers=2: ")
