"""What is printed with an error of user code: torch's words, where they take nothing away, and where it happened."""

import traceback

import pytest

import headrace as hr
from headrace._records.failure import Failure
from headrace._transport.pickling import format_error
from headrace.errors import RemoteError
from tests.unit.streams.reading import stream


class NotesAreText(Exception):
    __notes__ = "text"


class RefusesNotes(Exception):
    def add_note(self, note):
        raise TypeError("no notes, please")


class DropsNotes(Exception):
    def add_note(self, note):
        pass


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class Slots(Exception):
    __slots__ = ("detail",)


CLASSES = (NotesAreText, RefusesNotes, DropsNotes, Frozen, Slots)


def printed(error):
    return "".join(traceback.format_exception(error))


def raised(error):
    with pytest.raises(type(error)) as found:
        raise error
    return found.value


def failure(error, worker=0, traceback=None):
    return Failure(
        error,
        "fetch",
        batch=1,
        index=5,
        worker=worker,
        traceback=traceback or format_error(error),
    )


def test_remote_error_is_recorded_by_its_original_class_name():
    error = failure(RemoteError(type_name="m.Odd", message="odd")).exception(
        as_torch=True
    )
    assert str(error).startswith("Caught Odd in DataLoader worker process 0.\nOriginal ")


@pytest.mark.parametrize(("worker", "process"), [(0, "a worker"), (None, "the loader's")])
def test_other_failures_keep_their_message_and_note_the_traceback(worker, process):
    error = failure(raised(ValueError("bad")), worker).exception()
    assert str(error) == "bad"
    assert error.__notes__[0].startswith(
        f"in {process} process:\nTraceback (most recent call last):\n"
    )


# Errors of classes that refuse notes


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("as_torch", [False, True])
def test_location_of_a_failure_is_printed_with_an_error_of_any_class(cls, as_torch):
    record = failure(raised(cls("x")), traceback="Traceback of the worker\n")
    error = record.exception(as_torch=as_torch)
    assert error is record.error
    text = printed(error)
    assert "headrace: stage fetch, batch 1, index 5, worker 0" in text
    assert "Traceback of the worker" in text
    assert record.exception(as_torch=as_torch) is error
    assert printed(error) == text, "the location was added twice"


def refuse(number):
    raise DropsNotes(number)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_name_of_a_predicate_is_printed_with_an_error_of_any_class(num_workers):
    with (
        hr.DataLoader(stream(0, 1, 2).filter(refuse), num_workers=num_workers) as loader,
        pytest.raises(DropsNotes) as caught_error,
    ):
        next(iter(loader))
    assert "in filter(refuse), before batching" in printed(caught_error.value)
