"""Where an error of user code happened is printed with it, whatever its class says about notes and attributes."""

import traceback

import pytest

import headrace as hr
from headrace._core.failure import Failure
from headrace._core.text import add_note


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
    raise DropsNotes(number)


class NeverEntered(Numbers):
    async def __aenter__(self):
        raise RefusesNotes("x")

    async def __aexit__(self, *error):
        pass


@pytest.mark.parametrize("num_workers", [0, 1])
def test_name_of_a_predicate_is_printed_with_an_error_of_any_class(num_workers):
    with (
        hr.DataLoader(Numbers().filter(refuse), num_workers=num_workers) as loader,
        pytest.raises(DropsNotes) as raised,
    ):
        next(iter(loader))
    assert "in filter(refuse), before batching" in printed(raised.value)


def test_dataset_is_named_with_an_error_of_any_class_from_aenter():
    with hr.DataLoader(NeverEntered()) as loader, pytest.raises(RefusesNotes) as raised:
        next(iter(loader))
    assert "raised by __aenter__ of dataset NeverEntered" in printed(raised.value)
