"""A failure says where it happened, and is not mistaken for control flow."""

import asyncio

import pytest

from headrace._core.failure import Failure
from headrace.errors import ControlFlowError


def test_failure_note_has_stage_batch_index_key_worker_and_attempt():
    failure = Failure(ValueError("no"), "fetch", batch=3, index=6, key="a/b.jpg", worker=1, attempt=2)
    assert failure.where == "stage fetch, batch 3, index 6, key 'a/b.jpg', worker 1, attempt 2"
    assert str(failure) == f"ValueError: no ({failure.where})"


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
