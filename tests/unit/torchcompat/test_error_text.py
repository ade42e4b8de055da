"""Torch's words for an error from a worker: put where they take nothing away, and torch's own where torch has them."""

import json
import threading
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from headrace._core.failure import Failure
from headrace._core.torchcompat.error_text import set_torch_error_text, torch_error_text
from headrace._core.transport.pickling import format_error
from headrace.errors import NotPicklableError, RemoteError


class Composed(Exception):
    def __init__(self, path):
        super().__init__(f"corrupt: {path}")
        self.path = path


class Several(Exception):
    def __init__(self, path, code):
        super().__init__(path, code)


class OwnText(Exception):
    def __init__(self, status):
        super().__init__(status)
        self.status = status

    def __str__(self):
        return f"status {self.status}"


class Speechless(Exception):
    def __str__(self):
        raise LookupError("no words")


def caught(action):
    with pytest.raises(Exception) as excinfo:
        action()
    return excinfo.value


def raised(error):
    def fail():
        raise error

    return caught(fail)


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), ValueError(), ValueError("bad", 3), KeyError("k"), KeyError(("a", 1)), Composed("a.jpg"),
     ImportError("no", name="m"), OSError("just text"), AssertionError({"a": 1})],
    ids=repr,
)  # fmt: skip
def test_message_is_worded_as_by_torch(error):
    error = raised(error)
    wrapped = ExceptionWrapper((type(error), error, error.__traceback__), where="in DataLoader worker process 3")
    words = torch_error_text(error, 3, format_error(error))
    before = dict(vars(error))
    assert set_torch_error_text(error, words)
    if not isinstance(error, Composed):  # torch has its constructor compose the message once more
        assert str(error) == str(caught(wrapped.reraise))
        assert repr(error) == repr(caught(wrapped.reraise)) or isinstance(error, ImportError)
    assert str(error).startswith(f"Caught {type(error).__name__} in DataLoader worker process 3.\nOriginal Traceback (")
    assert vars(error) == before


def test_message_of_an_os_error_stands_between_its_number_and_file_name():
    error = caught(Path("/no/such/file").read_bytes)
    assert set_torch_error_text(error, torch_error_text(error, 0, format_error(error)))
    assert str(error).startswith("[Errno 2] Caught FileNotFoundError in DataLoader worker process 0.\n")
    assert (error.errno, error.filename) == (2, "/no/such/file")


def test_syntax_error_keeps_its_line():
    error = caught(lambda: compile("a b", "script.py", "exec"))
    assert set_torch_error_text(error, torch_error_text(error, 0, format_error(error)))
    assert str(error).startswith("Caught SyntaxError in DataLoader worker process 0.\n")
    assert (error.filename, error.lineno) == ("script.py", 1)


def test_fields_beside_the_message_stay():
    error = caught(lambda: json.loads("{"))
    assert set_torch_error_text(error, torch_error_text(error, 0, format_error(error)))
    assert (error.pos, error.doc) == (1, "{")
    error = caught(lambda: __import__("no_such_module_at_all"))
    assert set_torch_error_text(error, torch_error_text(error, 0, format_error(error)))
    assert error.name == "no_such_module_at_all"


@pytest.mark.parametrize(
    "error",
    [Several("a.jpg", 7), OwnText(404), Speechless(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
     ExceptionGroup("two", [ValueError("one")]), NotPicklableError(what="it", reason="so", remedy="do")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_error_with_a_text_of_its_own_is_left_as_it_is(error):
    before = error.args, dict(vars(error))
    assert not set_torch_error_text(error, torch_error_text(error, 0, format_error(error)))
    assert (error.args, vars(error)) == before


def test_remote_error_is_recorded_by_its_original_class_name():
    error = RemoteError(type_name="m.Odd", message="odd")
    assert set_torch_error_text(error, torch_error_text(error, 0, "Traceback …\nm.Odd: odd\n"))
    assert str(error).startswith("Caught Odd in DataLoader worker process 0.\nOriginal Traceback")


def failure(error, worker=0):
    return Failure(error, "fetch", batch=1, index=5, worker=worker, traceback=format_error(error))


def test_failure_of_a_torch_dataset_is_worded_as_by_torch_once():
    record = failure(raised(ValueError("bad")))
    assert str(record).startswith("ValueError: bad")
    error = record.exception(as_torch=True)
    text = str(error)
    assert text.startswith("Caught ValueError in DataLoader worker process 0.\n")
    assert error.__notes__ == ["headrace: stage fetch, batch 1, index 5, worker 0"]
    assert str(record.exception(as_torch=True)) == text
    assert len(error.__notes__) == 1


def test_where_the_words_cannot_be_the_message_they_are_a_note():
    words, where = failure(raised(OwnText(404))).exception(as_torch=True).__notes__
    assert words.startswith("Caught OwnText in DataLoader worker process 0.\nOriginal Traceback")
    assert where == "headrace: stage fetch, batch 1, index 5, worker 0"


@pytest.mark.parametrize(("worker", "process"), [(0, "a worker"), (None, "the loader's")])
def test_other_failures_keep_their_message_and_note_the_traceback(worker, process):
    error = failure(raised(ValueError("bad")), worker).exception()
    assert str(error) == "bad"
    assert error.__notes__[0].startswith(f"in {process} process:\nTraceback (most recent call last):\n")


def test_error_that_takes_no_notes_is_raised():
    class Stubborn(Exception):
        def add_note(self, note):
            raise TypeError(threading.current_thread().name)

    record = failure(raised(Stubborn("bad")))
    assert str(record.exception(as_torch=True)).startswith("Caught Stubborn")
