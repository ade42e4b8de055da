"""Log records of worker processes reach the handlers of the training process."""

import logging
import os
import threading

import pytest

import headrace as hr
from tests import datasets

log = logging.getLogger("tests.worker")


class Numbers(datasets.Numbers):
    async def aget(self, index):
        logging.getLogger("tests.loader").info("fetched %d", index)
        return index


@pytest.fixture(autouse=True)
def _levels(caplog):
    caplog.set_level(logging.INFO)


def run(transform, **options):
    with hr.DataLoader(
        Numbers(4), batch_size=2, num_workers=2, transform=transform, **options
    ) as loader:
        return [batch.tolist() for batch in loader]


def said(caplog, name="tests.worker"):
    return sorted(record.getMessage() for record in caplog.records if record.name == name)


def logs(sample):
    log = logging.getLogger("tests.worker")
    log.info("sample %d", sample, extra={"sample": sample})
    log.debug("not asked for")
    return sample


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_records_of_workers_and_the_loaders_process_reach_handlers_of_the_trainer(
    caplog, placement
):
    assert run(logs, placement=placement) == [[0, 1], [2, 3]]
    assert said(caplog) == [f"sample {number}" for number in range(4)]
    assert said(caplog, "tests.loader") == [f"fetched {number}" for number in range(4)]
    ours = [record for record in caplog.records if record.name == "tests.worker"]
    assert {record.processName for record in ours} <= {
        "headrace-worker-0",
        "headrace-worker-1",
    }
    assert all(
        record.processName == f"headrace-worker-{record.worker}" for record in ours
    )
    assert all(record.process != os.getpid() for record in ours)
    assert {record.sample for record in ours} == set(range(4))


def test_logger_with_own_handlers_and_filters_handles_records_of_workers(caplog, capfd):
    def refuse(record):
        if record.sample == 3:
            raise RuntimeError("a filter that fails")
        return True

    kept = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())
    log.addHandler(handler)
    log.addFilter(refuse)
    log.propagate = False
    try:
        assert run(logs) == [[0, 1], [2, 3]]
    finally:
        log.removeHandler(handler)
        log.removeFilter(refuse)
        log.propagate = True
    assert sorted(kept) == [f"sample {number}" for number in range(3)]
    assert said(caplog) == []
    assert "a filter that fails" in capfd.readouterr().err


def test_unpicklable_values_of_a_record_are_replaced_by_their_repr(caplog):
    def fails(sample):
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("tests.worker").exception(
                "sample %s", object, extra={"lock": threading.Lock()}
            )
        return sample

    run(fails)
    record = next(record for record in caplog.records if record.name == "tests.worker")
    assert record.getMessage().startswith("sample <class 'object'>\nTraceback")
    assert "ValueError: broken" in record.getMessage()
    assert record.lock.startswith("<unlocked _thread.lock")


def test_many_records_arrive_complete_and_once(caplog):
    def chatters(sample):
        log = logging.getLogger("tests.worker")
        threads = [
            threading.Thread(target=lambda: [log.info("x" * size) for size in range(500)])
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sample

    run(chatters)
    expected = sorted("x" * size for size in range(500) for _ in range(3 * 4))
    assert said(caplog) == expected
