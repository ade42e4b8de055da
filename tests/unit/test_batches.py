"""The nouns: frozen, picklable, and a failure says where it happened."""

import asyncio
import dataclasses
import pickle

import pytest

from headrace._core.batches import BatchPlan, Failure, HostBatch, RawBatch, RequestCounts
from headrace.errors import ControlFlowError

PLAN = BatchPlan(number=3, indices=(6, 7), seed=11, positions=range(6, 8))


@pytest.mark.parametrize(
    "noun",
    [PLAN, RawBatch(PLAN, [1, 2]), HostBatch(PLAN, [1, 2], 2)],
    ids=lambda noun: type(noun).__name__,
)
def test_batch_types_are_frozen_and_picklable(noun):
    assert pickle.loads(pickle.dumps(noun)) == noun
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, dataclasses.fields(noun)[0].name, None)


def test_failure_note_has_stage_batch_index_key_worker_and_attempt():
    failure = Failure(ValueError("no"), "fetch", batch=3, index=6, key="a/b.jpg", worker=1, attempt=2)
    assert failure.where == "stage fetch, batch 3, index 6, key 'a/b.jpg', worker 1, attempt 2"
    assert str(failure) == f"ValueError: no ({failure.where})"


def test_what_is_not_known_is_left_out():
    assert Failure(ValueError("no"), "collate", batch=3).where == "stage collate, batch 3"


def test_error_keeps_its_identity_and_gets_one_note():
    error = ValueError("no")
    failure = Failure.caught(error, stage="fetch", batch=3, index=6)
    assert failure.exception() is error
    failure.exception()
    assert error.__notes__ == ["headrace: stage fetch, batch 3, index 6"]


@pytest.mark.parametrize(
    "stop",
    [StopIteration(1), StopAsyncIteration(), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(),
     GeneratorExit()],
    ids=lambda stop: type(stop).__name__,
)  # fmt: skip
def test_what_means_stop_to_python_becomes_an_error_with_the_original_as_its_cause(stop):
    error = Failure.caught(stop, stage="fetch", batch=0).error
    assert isinstance(error, ControlFlowError)
    assert error.__cause__ is stop
    assert type(stop).__name__ in str(error)


def test_failure_of_one_sample_is_located_by_its_index_and_key():
    failure = Failure(ValueError(), "fetch", batch=0, index=1, worker=2)
    located = failure.located([0, 1], "key-{}".format)
    assert located.where == "stage fetch, batch 0, index 1, key 'key-1', worker 2"
    assert failure.located([0, 1], lambda index: None).where == "stage fetch, batch 0, index 1, worker 2"


def test_failure_of_a_whole_batch_is_located_by_the_first_of_its_indices_and_keys():
    failure = Failure(ValueError(), "collate", batch=3)
    assert failure.located([4, 5], "key-{}".format).where == (
        "stage collate, batch 3, indices [4, 5], keys ['key-4', 'key-5']"
    )
    assert failure.located([4, 5], lambda index: None).where == "stage collate, batch 3, indices [4, 5]"
    assert failure.located([], str).where == "stage collate, batch 3"


def test_failure_of_a_large_batch_asks_for_few_keys_and_is_described_shortly():
    asked = []
    located = Failure(ValueError(), "collate", batch=3).located(
        range(5000), lambda index: asked.append(index) or "k" * 999
    )
    assert asked == list(range(8))
    assert "… 5000 in all" in located.where
    assert len(located.where) < 2500


def test_failures_are_taken_out_with_their_indices():
    lost = Failure.caught(ValueError(), stage="fetch", batch=3, index=6)
    kept, failures = RawBatch(PLAN, [lost, "seven"], end=True, worker=1).without_failures()
    assert (kept.plan.indices, kept.samples, kept.end, kept.worker) == ((7,), ["seven"], True, 1)
    assert kept.plan.positions == [7]
    assert failures == (lost,)


def test_batch_without_failures_is_returned_unchanged():
    raw = RawBatch(PLAN, [1, 2])
    assert raw.without_failures()[0] is raw


def test_failure_may_stand_for_a_whole_batch():
    lost = Failure.caught(ValueError(), stage="fetch", batch=3)
    kept, failures = RawBatch(PLAN, [lost]).without_failures()
    assert (kept.plan.indices, kept.samples, failures) == ((), [], (lost,))


def test_batch_that_lost_samples_is_still_the_batch_that_was_planned():
    lost = Failure.caught(ValueError(), stage="fetch", batch=3, index=6)
    late = Failure.caught(ValueError(), stage="transform", batch=3, index=7)
    raw = RawBatch(PLAN, [lost, 2])
    kept, failures = raw.without_failures()
    host = HostBatch(kept.plan, None, 0, (late,)).with_lost(raw, failures)
    assert (host.plan, host.failures) == (PLAN, (lost, late))


def test_batch_that_failed_late_keeps_all_but_its_data():
    lost = Failure.caught(ValueError(), stage="fetch", batch=3, index=6)
    state = {"position": 8}
    batch = HostBatch(PLAN, "data", 1, (lost,), end=True, worker=2, stream_state=state)
    failed = HostBatch.failed(PLAN, OSError(), stage="copy").with_failures_of(batch)
    assert (failed.end, failed.worker, failed.stream_state) == (True, 2, state)
    assert (failed.data, failed.size, failed.empty) == (None, 0, True)
    assert [failure.stage for failure in failed.failures] == ["fetch", "copy"]


def test_request_counts_are_added_field_by_field():
    fields = [field.name for field in dataclasses.fields(RequestCounts)]
    ones = RequestCounts(**dict.fromkeys(fields, 1))
    several = RequestCounts(**{name: number for number, name in enumerate(fields)})
    assert dataclasses.asdict(ones + several) == {name: number + 1 for number, name in enumerate(fields)}
