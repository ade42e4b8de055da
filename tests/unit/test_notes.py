"""Where an error of user code happened is printed with it, whatever its class says about notes and attributes."""

import traceback

import pytest

import headrace as hr
from headrace._core.failure import Failure
from headrace._core.text import FailureLocation, add_note, has_note


class NotesAreAProperty(Exception):
    @property
    def __notes__(self):
        return ["mine"]


class NotesRaise(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("no notes here")


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


CLASSES = (NotesAreAProperty, NotesRaise, NotesAreText, RefusesNotes, DropsNotes, Frozen, Slots)


def printed(error):
    try:
        return "".join(traceback.format_exception(error))
    except RuntimeError:  # Python itself cannot print one whose notes raise; its message and its cause it can
        return f"{error}\n{printed(error.__cause__)}"


def caught(error):
    try:
        raise error
    except Exception as raised:
        return raised


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("as_torch", [False, True])
def test_location_of_a_failure_is_printed_with_an_error_of_any_class(cls, as_torch):
    failure = Failure(
        error=caught(cls("x")), stage="fetch", batch=1, index=5, worker=0, traceback="Traceback of the worker\n"
    )
    error = failure.exception(as_torch=as_torch)
    assert error is failure.error
    text = printed(error)
    assert "headrace: stage fetch, batch 1, index 5, worker 0" in text
    assert "Traceback of the worker" in text
    assert failure.exception(as_torch=as_torch) is error
    assert printed(error) == text, "the location was added twice"


def test_location_in_the_chain_of_causes_keeps_the_causes():
    error, cause = NotesRaise("x"), ValueError("the cause")
    error.__cause__ = cause
    add_note(error, "first")
    add_note(error, "second")
    assert error.__cause__ is cause
    assert type(cause.__cause__) is FailureLocation
    assert str(cause.__cause__) == "first\nsecond"
    assert has_note(error, "second")


def test_note_on_an_error_with_cyclic_causes():
    error, other = NotesRaise("x"), ValueError("other")
    error.__cause__, other.__cause__ = other, error
    add_note(error, "here")
    assert has_note(error, "here")


def test_note_on_an_ordinary_error_is_an_ordinary_note():
    error = ValueError("x")
    add_note(error, "here")
    assert error.__notes__ == ["here"]
    assert error.__cause__ is None


class Numbers(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for number in range(3):
            yield number


def refuse(number):
    raise NotesRaise(number)


class NeverEntered(Numbers):
    async def __aenter__(self):
        raise RefusesNotes("x")

    async def __aexit__(self, *error):
        pass


@pytest.mark.parametrize("num_workers", [0, 1])
def test_name_of_a_predicate_is_printed_with_an_error_of_any_class(num_workers):
    with (
        hr.DataLoader(Numbers().filter(refuse), num_workers=num_workers) as loader,
        pytest.raises(NotesRaise) as raised,
    ):
        next(iter(loader))
    assert "in filter(refuse), before batching" in printed(raised.value)


def test_dataset_is_named_with_an_error_of_any_class_from_aenter():
    with hr.DataLoader(NeverEntered()) as loader, pytest.raises(RefusesNotes) as raised:
        next(iter(loader))
    assert "raised by __aenter__ of dataset NeverEntered" in printed(raised.value)
