"""Every error travels between processes as it is, and can be caught by the builtin a user would catch."""

import copy
import pickle
import pydoc
from string import Formatter

import cloudpickle
import pytest
from torch._utils import ExceptionWrapper

from headrace import errors
from tests.documents import text_of

BUILTINS = {
    Exception: ["HeadraceError"],
    TypeError: ["DatasetTypeError", "NotPicklableError"],
    RuntimeError: [
        "DeviceUnavailableError",
        "CudaGraphError",
        "ControlFlowError",
        "RemoteError",
        "WorkerDiedError",
        "EngineDiedError",
        "EngineStartError",
        "LoaderClosedError",
        "LoaderTimeoutError",
        "DeadlockError",
        "ForkedError",
        "CoordinationError",
        "UnknownRankError",
        "LostBatchError",
        "TooManySkippedError",
    ],
    ImportError: ["MissingExtraError"],
    PermissionError: ["CacheFolderError"],
    ValueError: ["StateError", "ShardError"],
    errors.ShardError: ["TruncatedShardError", "UnsafeMemberError"],
    EOFError: ["TruncatedShardError"],
    OSError: ["StoreError"],
    errors.StoreError: [
        "ObjectNotFoundError",
        "EmptyListingError",
        "StoreUnreachableError",
        "ObjectChangedError",
        "ChecksumError",
    ],
    FileNotFoundError: ["ObjectNotFoundError", "EmptyListingError"],
    ConnectionError: ["StoreUnreachableError"],
}


def example(name):
    """An error with a value for each attribute and each place of its text."""
    kind = getattr(errors, name)
    places = [
        place.partition(".")[0] for _, place, *_ in Formatter().parse(kind._text) if place
    ]
    attributes = {each for each in dir(kind) if getattr(kind, each) is None} - {
        "lost_samples"
    }
    message = [] if kind._text else ["a message"]
    return kind(*message, **dict.fromkeys([*places, *attributes], 7))


@pytest.mark.parametrize("name", errors.__all__)
def test_error_names_its_entry_which_has_causes_and_remedy_in_the_shell_and_on_the_site(
    name,
):
    note = example(name).__notes__[0]
    # autodoc's anchor has that name too
    entry = pydoc.plain(pydoc.render_doc(note.rpartition("python -m pydoc ")[2]))
    assert f"class {name}(" in entry
    assert ("What to do: " in entry) >= (name != "HeadraceError")
    assert ".. automodule:: headrace.errors\n   :members:" in text_of(
        "docs/reference/errors.md"
    )


def test_subclass_by_a_user_names_the_entry_of_its_base():
    assert type("Mine", (errors.StoreError,), {})("no").__notes__ == [
        f"{errors.HELP} headrace.errors.StoreError"
    ]


def test_builtins_of_all_errors_are_known():
    assert set().union(*BUILTINS.values()) == set(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
@pytest.mark.parametrize(
    "through",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_errors_survive_pickling_and_copies(name, through):
    error = example(name)
    error.add_note("a note")
    travelled = through(error)
    assert type(travelled) is type(error)
    assert str(travelled) == str(error)
    assert repr(travelled) == repr(error)
    assert travelled.__dict__ == error.__dict__
    assert travelled.__notes__ == [f"{errors.HELP} headrace.errors.{name}", "a note"]


@pytest.mark.parametrize("name", errors.__all__)
def test_torch_raises_an_error_of_a_worker_as_its_own_class(name):
    try:
        raise example(name)
    except errors.HeadraceError as error:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
        message = str(error)
    with pytest.raises(errors.HeadraceError) as caught:
        pickle.loads(pickle.dumps(wrapped)).reraise()
    assert type(caught.value) is getattr(errors, name)
    assert str(caught.value).startswith(
        f"Caught {name} in DataLoader worker process 0.\nOriginal Traceback"
    )
    assert message in str(caught.value)
    travelled = pickle.loads(pickle.dumps(caught.value))
    assert str(travelled) == str(caught.value)
    fields = vars(example(name)).keys() - {"__notes__"}
    assert all(getattr(caught.value, field) is None for field in fields)


@pytest.mark.parametrize("name", errors.__all__)
def test_ray_raises_an_error_of_a_task_as_its_own_class_too(name):
    exceptions = pytest.importorskip("ray.exceptions")
    error = example(name)
    of_task = exceptions.RayTaskError(
        "task", "Traceback", error, proctitle="task", pid=7, ip="127.0.0.1"
    )
    raised = of_task.as_instanceof_cause()
    for each in (raised, pickle.loads(cloudpickle.dumps(raised))):
        assert isinstance(each, getattr(errors, name))
        assert isinstance(each, exceptions.RayTaskError)
        assert str(each.cause) == str(error)
        assert vars(each.cause) == vars(error)


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_subclass_a_builtin_and_headrace_error(name):
    error = example(name)
    assert isinstance(error, errors.HeadraceError)
    assert all(
        isinstance(error, builtin) for builtin, names in BUILTINS.items() if name in names
    )
    assert str(error)
