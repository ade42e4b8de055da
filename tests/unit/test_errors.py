"""Every error travels between processes as it is, and can be caught by the builtin a user would catch."""

import copy
import pickle
import pydoc

import cloudpickle
import pytest
from torch._utils import ExceptionWrapper

from headrace import errors
from tests.documents import text_of

EXAMPLES = {
    "HeadraceError": lambda: errors.HeadraceError("something"),
    "DatasetTypeError": lambda: errors.DatasetTypeError(dataset=3),
    "NotPicklableError": lambda: errors.NotPicklableError(
        what="transform f", reason="a lock", remedy="Do this."
    ),
    "DeviceUnavailableError": lambda: errors.DeviceUnavailableError(
        device="cuda:9", reason="there are 2, numbered from 0"
    ),
    "CudaGraphError": lambda: errors.CudaGraphError(),
    "ControlFlowError": lambda: errors.ControlFlowError(error=SystemExit(3)),
    "RemoteError": lambda: errors.RemoteError(type_name="m.Odd", message="odd"),
    "WorkerDiedError": lambda: errors.WorkerDiedError(
        "killed", worker=1, exit_code=-9, batch=4, indices=(8, 9)
    ),
    "EngineDiedError": lambda: errors.EngineDiedError(why="SystemExit(3)"),
    "EngineStartError": lambda: errors.EngineStartError(
        running=1, engines=4, least=4, seconds=60, shortage="each asks for 8 CPUs"
    ),
    "LoaderClosedError": lambda: errors.LoaderClosedError(),
    "LoaderTimeoutError": lambda: errors.LoaderTimeoutError(
        seconds=5.0, waiting_for="batch 3", batch=3
    ),
    "DeadlockError": lambda: errors.DeadlockError(what="next() of a loader"),
    "ForkedError": lambda: errors.ForkedError(what="a store", made_in=1, used_in=2),
    "CoordinationError": lambda: errors.CoordinationError("rank 1 has failed", ranks=(1,)),
    "UnknownRankError": lambda: errors.UnknownRankError(why="WORLD_SIZE=2 is set, and RANK is not"),
    "LostBatchError": lambda: errors.LostBatchError(planned=3, accounted=2),
    "TooManySkippedError": lambda: errors.TooManySkippedError(
        reason="every sample failed",
        skipped=8,
        delivered=0,
        examples=("ValueError: no",),
        failures="ValueError: no",
    ),
    "MissingExtraError": lambda: errors.MissingExtraError(
        what="zstd", package="backports.zstd", extra="zstd"
    ),
    "CacheFolderError": lambda: errors.CacheFolderError(
        folder="/tmp/cache", reason="it belongs to user 7"
    ),
    "StateError": lambda: errors.StateError("the state has 3 shards, but there are 4 now"),
    "ShardError": lambda: errors.ShardError(
        "damaged", shard="s3://bucket/0.tar", member="a.jpg", offset=512
    ),
    "TruncatedShardError": lambda: errors.TruncatedShardError("cut", shard="s3://bucket/0.tar"),
    "UnsafeMemberError": lambda: errors.UnsafeMemberError(
        "a link", shard="s3://bucket/0.tar", member="a"
    ),
    "StoreError": lambda: errors.StoreError("no", url="s3://bucket/key"),
    "ObjectNotFoundError": lambda: errors.ObjectNotFoundError("gone", url="s3://bucket/key"),
    "EmptyListingError": lambda: errors.EmptyListingError("empty", url="s3://bucket/"),
    "StoreUnreachableError": lambda: errors.StoreUnreachableError("silent", url="s3://bucket/"),
    "ObjectChangedError": lambda: errors.ObjectChangedError(
        "changed", url="s3://bucket/", key="k", index=3
    ),
    "ChecksumError": lambda: errors.ChecksumError(
        "damaged", url="s3://bucket/", key="k", index=3, attempts=4, elapsed=1.5, status=200
    ),
}
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


@pytest.mark.parametrize("name", errors.__all__)
def test_error_names_its_entry_which_has_causes_and_remedy_in_the_shell_and_on_the_site(name):
    note = EXAMPLES[name]().__notes__[0]
    # autodoc's anchor has that name too
    entry = pydoc.plain(pydoc.render_doc(note.rpartition("python -m pydoc ")[2]))
    assert f"class {name}(" in entry
    assert ("What to do: " in entry) >= (name != "HeadraceError")
    assert ".. automodule:: headrace.errors\n   :members:" in text_of("docs/reference/errors.md")


def test_subclass_by_a_user_names_the_entry_of_its_base():
    assert type("Mine", (errors.StoreError,), {})("no").__notes__ == [
        f"{errors.HELP} headrace.errors.StoreError"
    ]


def test_examples_are_complete():
    assert EXAMPLES.keys() == set().union(*BUILTINS.values()) == set(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
@pytest.mark.parametrize(
    "through",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_errors_survive_pickling_and_copies(name, through):
    error = EXAMPLES[name]()
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
        raise EXAMPLES[name]()
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
    fields = vars(EXAMPLES[name]()).keys() - {"__notes__"}
    assert all(getattr(caught.value, field) is None for field in fields)


@pytest.mark.parametrize("name", errors.__all__)
def test_ray_raises_an_error_of_a_task_as_its_own_class_too(name):
    exceptions = pytest.importorskip("ray.exceptions")
    error = EXAMPLES[name]()
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
    error = EXAMPLES[name]()
    assert isinstance(error, errors.HeadraceError)
    assert all(isinstance(error, builtin) for builtin, names in BUILTINS.items() if name in names)
    assert str(error)


def test_subclass_by_a_user_survives_pickling_and_copies():
    class Mine(errors.HeadraceError):
        def __init__(self, *, left, right):
            super().__init__(f"{left} {right}")
            self.left = left

    travelled = cloudpickle.loads(cloudpickle.dumps(Mine(left=1, right=2)))
    assert (str(travelled), travelled.left) == ("1 2", 1)
