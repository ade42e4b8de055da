"""The types that travel between stages: frozen, picklable, and nothing is lost with a failed sample."""

import pytest

from headrace._core.batches import BatchPlan, HostBatch, RawBatch
from headrace._core.failure import Failure

PLAN = BatchPlan(number=3, indices=(6, 7), seed=11, positions=range(6, 8))


class Index(str):
    """An index of a class of the user's."""


@pytest.mark.parametrize(
    "with_users_objects",
    [
        PLAN._replace(indices=(6, Index("7"))),
        PLAN._replace(resume={"position": Index("7")}),
        RawBatch(PLAN, [Index("7")]),
        RawBatch(PLAN, None, stream_state={"position": Index("7")}),
        RawBatch(PLAN._replace(indices=(Index("7"),)), None),
    ],
    ids=repr,
)
def test_messages_with_objects_of_the_users_are_not_plain(with_users_objects):
    assert not with_users_objects.is_plain


def test_messages_without_objects_of_the_users_are_plain():
    assert PLAN.is_plain
    assert RawBatch(PLAN, None).is_plain


def test_failures_are_taken_out_with_their_indices():
    lost = Failure.caught(ValueError(), stage="fetch", batch=3, index=6)
    kept, failures = RawBatch(PLAN, [lost, "seven"], end=True, worker=1).without_failures()
    assert (kept.plan.indices, kept.samples, kept.end, kept.worker) == ((7,), ["seven"], True, 1)
    assert kept.plan.positions == [7]
    assert failures == (lost,)


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
