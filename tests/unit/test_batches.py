"""The nouns: frozen, picklable, and a failure says where it happened."""

import asyncio
import dataclasses
import pickle

import pytest

from headrace.batches import BatchPlan, Failure, HostBatch, RawBatch, ResumePoint
from headrace.errors import UserStopError

PLAN = BatchPlan(number=3, indices=(6, 7), seed=11, resume_point=ResumePoint(epoch=0, batches=4, samples=8))


@pytest.mark.parametrize(
    "noun",
    [PLAN, PLAN.resume_point, RawBatch(PLAN, [1, 2]), HostBatch(PLAN, [1, 2], 2)],
    ids=lambda noun: type(noun).__name__,
)
def test_a_noun_is_frozen_and_travels(noun):
    assert pickle.loads(pickle.dumps(noun)) == noun
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, dataclasses.fields(noun)[0].name, None)


def test_a_failure_names_everything_that_is_known():
    failure = Failure(ValueError("no"), "fetch", batch=3, index=6, key="a/b.jpg", worker=1, attempt=2)
    assert failure.where == "stage fetch, batch 3, index 6, key 'a/b.jpg', worker 1, attempt 2"
    assert str(failure) == f"ValueError: no ({failure.where})"


def test_what_is_not_known_is_left_out():
    assert Failure(ValueError("no"), "collate", batch=3).where == "stage collate, batch 3"


def test_an_error_keeps_its_identity_and_gets_one_note():
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
    assert isinstance(error, UserStopError)
    assert error.__cause__ is stop
    assert type(stop).__name__ in str(error)


def test_a_located_failure_keeps_what_it_knew():
    failure = Failure(ValueError(), "fetch", batch=0, index=1, key="k", worker=2)
    assert failure.located() == failure
    assert failure.located(key="other", worker=0).where == "stage fetch, batch 0, index 1, key 'other', worker 0"


def test_failures_are_taken_out_with_their_indices():
    lost = Failure.caught(ValueError(), stage="fetch", batch=3, index=6)
    kept, failures = RawBatch(PLAN, [lost, "seven"], end=True, worker=1).without_failures()
    assert (kept.plan.indices, kept.samples, kept.end, kept.worker) == ((7,), ["seven"], True, 1)
    assert failures == (lost,)


def test_a_batch_without_failures_is_passed_on_as_it_is():
    raw = RawBatch(PLAN, [1, 2])
    assert raw.without_failures()[0] is raw


def test_a_failure_may_stand_for_a_whole_batch():
    lost = Failure.caught(ValueError(), stage="fetch", batch=3)
    kept, failures = RawBatch(PLAN, [lost]).without_failures()
    assert (kept.plan.indices, kept.samples, failures) == ((), [], (lost,))


def test_a_batch_that_lost_samples_is_still_the_batch_that_was_planned():
    lost = Failure.caught(ValueError(), stage="fetch", batch=3, index=6)
    late = Failure.caught(ValueError(), stage="transform", batch=3, index=7)
    raw = RawBatch(PLAN, [lost, 2])
    kept, failures = raw.without_failures()
    host = HostBatch(kept.plan, None, 0, (late,)).with_lost(raw, failures)
    assert (host.plan, host.failures) == (PLAN, (lost, late))
