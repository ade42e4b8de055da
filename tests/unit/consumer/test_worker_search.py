"""num_workers="auto" and engines="auto": which numbers are tried, and kept."""

import pytest

from headrace._core.batches import StageTimes
from headrace._core.consumer.worker_search import HOLD, START_SECONDS, EngineSearch, WorkerSearch
from headrace.telemetry.counters import BatchRecord
from headrace.telemetry.diagnosis import Setup

COMPUTE, WORK = 0.01, 0.04  # seconds of the loop, and of transforms and collation, for a batch


class Machine:
    """A loader of which transforms are the limit: its batches, as so many workers on so many cores would make them."""

    search_class, option = WorkerSearch, "num_workers"

    def __init__(
        self, workers=0, cores=8, *, real_cores=8, work=WORK, nbytes=0, memory_budget=None, start=0.5, ahead=0.01
    ):
        self.workers, self.work, self.real_cores, self.nbytes, self.start = workers, work, real_cores, nbytes, start
        self.setup = Setup("auto", workers, 6, 6, 8, True, memory_budget, "thread", False, True, cores, 1024)
        self.search = self.search_class()
        self.ahead = ahead  # seconds from a plan to the call that takes its batch
        self.now, self.started, self.records, self.numbers = 100.0, 0.0, [], []

    def run(self, seconds):
        """Let the loop run for so long; returns the numbers of workers that were set, in order."""
        end, self.numbers = self.now + seconds, []
        while self.now < end:
            self.batch()
            if self.now <= self.search.next_look:
                continue
            setup = self.setup._replace(**{self.option: self.workers})
            if (number := self.search.look(self.records[-1024:], setup, self.most)) is not None:
                self.numbers.append(number)
                self.workers, self.started = number, self.now + self.start
        return self.numbers

    @property
    def most(self):
        return self.setup.cores

    def batch(self):
        in_workers = self.workers if self.now - self.ahead >= self.started else 0
        called = self.now
        if in_workers:
            ready = called + max(0.0, self.work / min(in_workers, self.real_cores) - COMPUTE)
            began, ended, worker = ready - self.work, ready, len(self.records) % in_workers
        else:
            began, ended, worker = called, called + self.work, -1
            ready = ended
        times = StageTimes(
            admitted=called - 1,
            began=called - 1,
            fetched=called - 0.9,
            work_began=began,
            work_ended=ended,
            assembled=ended if in_workers else called - 0.9,
            worked_by=(1, 1, worker),
            nbytes=self.nbytes,
        )
        self.now = ready + COMPUTE
        number, cpu = len(self.records), 0.1 * self.now
        self.records.append(
            BatchRecord(1, number, 8, called - self.ahead, times, called, ready, ready, ready, 2, None, cpu)
        )


def test_workers_that_the_diagnosis_asks_for_are_tried_and_kept():
    machine = Machine()
    assert machine.run(20) == [5]
    assert machine.search.chosen[0].startswith("num_workers=5: transforms and collation were the limit; ")


def test_nothing_is_changed_once_the_loop_is_the_limit():
    machine = Machine()
    machine.run(20)
    assert machine.run(3600) == []


def test_no_worker_is_started_for_work_of_microseconds():
    assert Machine(work=9e-5).run(60) == []


@pytest.mark.parametrize("least", [0, 1])
def test_workers_that_were_found_end_where_there_is_no_work_for_them(least):
    machine = Machine(workers=8, work=9e-5)
    machine.setup = machine.setup._replace(least_workers=least)
    assert machine.run(60) == [least]
    assert machine.search.chosen == [f"num_workers={least}: transforms and collation take 90 µs for a batch"]
    assert Machine(workers=8).run(60) == []


@pytest.mark.parametrize(("cores", "most"), [(1, 1), (3, 3), (4, 4)])
def test_workers_are_at_most_as_many_as_cores(cores, most):
    machine = Machine(cores=cores)
    machine.run(120)
    assert max([machine.workers, *machine.numbers]) == most


def test_a_core_that_the_training_loop_uses_is_left_to_it():
    machine = Machine(cores=4)
    batch = machine.batch

    def busy():
        batch()
        machine.records[-1] = machine.records[-1]._replace(cpu=machine.now)

    machine.batch = busy
    assert machine.run(60)[0] == 3


def test_batches_in_workers_stay_within_the_memory_budget():
    machine = Machine(nbytes=100, memory_budget=250)
    assert machine.run(20) == [2]


def test_a_change_without_half_the_gain_is_taken_back_and_fewer_are_tried():
    machine = Machine(work=0.08, cores=8, real_cores=2)  # 8 promise 8 times the rate, and two give it twice
    machine.run(120)
    assert machine.workers == 2, machine.search.chosen
    assert machine.search.chosen[0].startswith("num_workers=0, not 8: ")


def test_changes_in_vain_become_rare():
    machine = Machine(work=0.04, real_cores=0.2)  # workers are slower than the loop's thread
    assert machine.run(HOLD + 15)[:6] == [5, 0, 2, 0, 1, 0]
    machine.run(3600)
    assert len(machine.run(3600)) <= 12


def test_workers_that_do_not_start_are_given_up():
    machine = Machine(start=1e9)
    assert machine.run(START_SECONDS + 20)[:2] == [5, 0]


def test_workers_are_not_judged_by_batches_that_were_planned_before_them():
    machine = Machine(ahead=START_SECONDS + 5)
    assert machine.run(60)[0] == 5
    assert machine.search.chosen[0].startswith("num_workers=5: ")


def test_end_of_the_search_has_its_reason():
    search = WorkerSearch()
    search.end("the transform cannot be pickled")
    assert search.chosen == ["num_workers=0: the transform cannot be pickled"]


class BusyLoop(Machine):
    """A loader whose event loop is the limit: batches that take 40 ms of it, divided among real cores."""

    search_class, option = EngineSearch, "engines"

    def __init__(self, **arguments):
        super().__init__(1, **arguments)
        self.setup = self.setup._replace(num_workers=0, placement="process")
        self.cpu = 0.0

    @property
    def most(self):
        return self.setup.cores // 2

    def batch(self):
        called, number = self.now, len(self.records)
        period = max(self.work / min(self.workers, self.real_cores), COMPUTE)
        ready = max(called, self.started) + period - COMPUTE
        self.now = ready + COMPUTE
        self.cpu += self.work / self.workers
        begun = ready - 1
        times = StageTimes(admitted=begun, began=begun, fetched=begun, assembled=self.now, engine_cpu=self.cpu)
        planned = called - self.ahead
        self.records.append(BatchRecord(1, number, 8, planned, times, called, ready, ready, ready, 2, None, 0.0))


def test_engines_that_the_diagnosis_asks_for_are_tried_and_kept():
    loop = BusyLoop()
    assert loop.run(20) == [4]
    assert loop.search.chosen[0].startswith("engines=4: the event loop was the limit; ")
    assert loop.run(3600) == []


def test_engines_without_a_core_of_their_own_are_taken_back_and_half_as_many_tried():
    loop = BusyLoop(real_cores=1)
    assert loop.run(HOLD) == [4, 1, 2, 1]
    assert loop.search.chosen[0].startswith("engines=1, not 4: 1.00 times the rate with 1")
    assert len(loop.run(3600)) <= 24


def test_batches_before_another_change_are_not_counted():
    loop = BusyLoop()
    loop.run(1.9)
    loop.search.measure_anew()
    assert loop.run(1.5) == []
    assert loop.run(3) == [4]


@pytest.mark.parametrize(("make", "option"), [(Machine, "workers"), (BusyLoop, "engines")])
def test_rate_is_measured_over_batches_that_were_planned_since_the_change(make, option):
    machine = make(ahead=5.0)
    while not machine.run(0.1):
        pass
    machine.run(6.5 if option == "engines" else 2.0)
    assert machine.search.tries
    machine.run(2.5 if option == "engines" else 7.0)
    assert not machine.search.tries
    assert machine.search.chosen
