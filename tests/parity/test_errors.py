"""Errors: of torch's type, with torch's message, at torch's place, and iteration continues as torch's does."""

import json
import threading
from pathlib import Path

import pytest
import torch
from torch.utils import data

import headrace as hr
from tests.parity.harness import NAMES, Raised, drained, end_torchs_workers, own_message, parity

LENGTH, BAD = 10, 5
INLINE, READING, THREAD, WORKERS = NAMES

NO_WORKERS = "no workers"
OWN_WORDS = "keeps its own message; the traceback is in a note"
IN_THIS_PROCESS = "raised in this process, with its traceback"
NO_WORDING = {INLINE: IN_THIS_PROCESS, THREAD: IN_THIS_PROCESS, WORKERS: OWN_WORDS}
NOT_IN_WORKERS = {INLINE: NO_WORKERS, THREAD: NO_WORKERS}


class Plain(Exception):
    """A class of the user's that adds nothing."""


class Composed(Exception):
    """Takes one argument, and composes its message from it."""

    def __init__(self, path):
        super().__init__(f"corrupt: {path}")
        self.path = path


class TwoArguments(Exception):
    def __init__(self, path, code):
        super().__init__(path, code)
        self.code = code


class OwnText(Exception):
    """Its `str` depends on its attributes."""

    def __init__(self, status, url):
        super().__init__(status, url)
        self.status = status

    def __str__(self):
        return f"status {self.status}"


class WithMessage(Exception):
    """As torch looks for it: a class with a `message`, whose constructor takes that keyword."""

    message = "nothing was said"

    def __init__(self, message):
        super().__init__(message)
        self.message = message


class Refuses(Exception):
    def __reduce__(self):
        raise LookupError("not me")


class Locked(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()
        self.path = "a.jpg"


class Map(data.Dataset):
    """Fails at one index."""

    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == BAD:
            self.fail()
        return torch.tensor(index)


class Stumbling:
    """An iterator that fails at one position and can continue after it."""

    def __init__(self, fail):
        self.fail = fail
        self.position = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        if self.position == BAD:
            self.fail()
        if self.position >= LENGTH:
            raise StopIteration
        return self.position


class Stream(data.IterableDataset):
    def __init__(self, fail):
        self.fail = fail

    def __iter__(self):
        return Stumbling(self.fail)


class AsyncStream(hr.AsyncIterableDataset):
    def __init__(self, stream):
        self.stream = stream

    def __aiter__(self):
        return AsyncStumbling(iter(self.stream))


class AsyncStumbling:
    def __init__(self, stream):
        self.stream = stream

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            return next(self.stream)
        except StopIteration:
            raise StopAsyncIteration from None


class Breaking(Stream):
    """A generator, which an exception ends."""

    def __iter__(self):
        yield from range(BAD)
        self.fail()


class CannotStart(Stream):
    def __iter__(self):
        self.fail()


class Numbers(data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index


def raising(make):
    def fail():
        raise make()

    return fail


def chained():
    try:
        {}["inner"]
    except KeyError as inner:
        raise ValueError("outer") from inner


def in_context():
    try:
        {}["inner"]
    except KeyError:
        raise ValueError("outer")  # noqa: B904  # the context is what is tested


FAILURES = {
    "ValueError": raising(lambda: ValueError("bad")),
    "no message": raising(ValueError),
    "two lines": raising(lambda: ValueError("bad\nworse: ValueError: worst")),
    "a builtin with two arguments": raising(lambda: ValueError("bad", 3)),
    "KeyError": raising(lambda: KeyError("missing")),
    "KeyError with a tuple": raising(lambda: KeyError(("a", 1))),
    "a user's class": raising(lambda: Plain("bad")),
    "a class with a message": raising(lambda: WithMessage("bad")),
    "a cause": chained,
    "a context": in_context,
    "an import": lambda: __import__("no_such_module_at_all"),
    "torch's own": lambda: torch.zeros(2) + torch.zeros(3),
}
FAILURE = pytest.mark.parametrize("failure", FAILURES)


def bad():
    raise ValueError("bad")


def one_error(loader):
    """The only error of an epoch, as it was raised, without this process's part of the traceback."""
    iterator, errors = iter(loader), []
    while True:
        try:
            next(iterator)
        except StopIteration:
            (error,) = errors
            return error
        except Exception as error:
            errors.append(error.with_traceback(None))


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


def first_error(loader):
    """What an epoch raises first. Nothing of it is kept: torch's iterator would wait for its workers whenever, and on
    whatever thread, the garbage collector comes upon it."""
    try:
        list(loader)
    except Exception as error:
        return Raised(type(error), own_message(error))
    return None


@FAILURE
@parity("what `__getitem__` raises keeps its type and message, and iteration goes on behind its batch")
def test_getitem_error_costs_its_batch(same, failure):
    def program(DataLoader):
        return drained(iter(DataLoader(Map(FAILURES[failure]), batch_size=2)))

    came = same(program)
    assert [type(batch) for batch in came].count(Raised) == 1
    assert len(came) == LENGTH / 2


@parity("an error without batches, and in the last batch of all")
def test_error_without_batches_costs_its_sample(same):
    def program(DataLoader):
        return [
            drained(iter(DataLoader(Map(bad), batch_size=None))),
            drained(iter(DataLoader(Map(bad), sampler=[1, 2, BAD], batch_size=2))),
            drained(iter(DataLoader(Map(bad), sampler=[BAD] * 4, batch_size=1))),
        ]

    same(program)


@parity("every epoch raises its errors anew")
def test_next_epoch_fails_at_the_same_place(same):
    def program(DataLoader):
        loader = DataLoader(Map(bad), batch_size=4)
        return [drained(iter(loader)) for _ in range(3)]

    same(program)


@parity("with `in_order=False` an error costs its batch and no other")
def test_error_with_in_order_false_costs_its_batch(same):
    def program(DataLoader):
        came = drained(iter(DataLoader(Map(bad), batch_size=2, in_order=False)))
        errors = [one for one in came if isinstance(one, Raised)]
        return errors, sorted(batch.tolist() for batch in came if not isinstance(batch, Raised))

    same(program)


class Many(Map):
    def __getitems__(self, indices):
        if BAD in indices:
            self.fail()
        return indices


@parity("what `__getitems__` raises keeps its type and message")
def test_getitems_error_costs_its_batch(same):
    same(lambda DataLoader: drained(iter(DataLoader(Many(bad), batch_size=4))))


@FAILURE
@parity("what a stream's `__next__` raises is raised at its place; the next batch begins behind it")
def test_stream_error_is_raised_at_its_batch(same, failure):
    def program(DataLoader):
        dataset = Stream(FAILURES[failure])
        if same.setting.asynchronous and DataLoader.is_ours:
            dataset = AsyncStream(dataset)
        return drained(iter(DataLoader(dataset, batch_size=2)))

    assert same(program)


@pytest.mark.parametrize("drop_last", [False, True])
@parity("a generator that raises has ended behind its error")
def test_generator_error_ends_the_stream(same, drop_last):
    def program(DataLoader):
        return drained(iter(DataLoader(Breaking(bad), batch_size=2, drop_last=drop_last)))

    assert any(isinstance(batch, Raised) for batch in same(program))


@parity(
    "what a stream's `__iter__` raises keeps its type and message",
    not_for={THREAD: "", WORKERS: ""},
)
def test_iter_error_is_raised_at_the_first_batch(same):
    def program(DataLoader):
        loader = DataLoader(CannotStart(bad), batch_size=2)
        return [first_error(loader)]

    assert same(program) == [Raised(ValueError, "bad")]


class AsyncCannotStart(hr.AsyncIterableDataset):
    def __init__(self, fail):
        self.fail = fail

    def __aiter__(self):
        self.fail()


@parity(
    "what a stream's `__iter__` raises keeps its type and message",
    not_for={INLINE: "", READING: ""},
)
def test_aiter_error_is_raised_at_the_first_batch(same):
    def program(DataLoader):
        loader = DataLoader(AsyncCannotStart(bad) if DataLoader.is_ours else CannotStart(bad), batch_size=2)
        return [first_error(loader)]

    assert same(program) == [Raised(ValueError, "bad")]


def fussy(samples):
    if BAD in samples:
        raise ValueError(f"not {BAD}")
    return samples


@parity("what `collate_fn` raises keeps its type and message, and iteration goes on")
def test_collate_error_costs_its_batch(same):
    same(lambda DataLoader: drained(iter(DataLoader(Numbers(), batch_size=2, collate_fn=fussy))))


class Ragged(Numbers):
    def __getitem__(self, index):
        return torch.zeros(index)


@parity("torch's words for samples that do not stack")
def test_ragged_samples_raise_torchs_error(same):
    came = same(lambda DataLoader: drained(iter(DataLoader(Ragged(), batch_size=2))))
    assert all(isinstance(batch, Raised) for batch in came)
    assert "stack expects each tensor to be equal size" in came[0].message


def init_fails(worker):
    raise LookupError(f"worker {worker} cannot start")


@pytest.mark.parametrize("stream", [False, True])
@parity("what `worker_init_fn` raises keeps its type and message", not_for=NOT_IN_WORKERS)
def test_worker_init_fn_error_is_raised_for_each_batch(same, stream):
    def program(DataLoader):
        dataset = Breaking(bad) if stream else Numbers()
        loader = DataLoader(dataset, batch_size=2, num_workers=1, worker_init_fn=init_fails)
        return [first_error(loader)]

    assert same(program) == [Raised(LookupError, "worker 0 cannot start")]


@parity("torch: a worker that could not start raises `UnboundLocalError` from its second batch on; here the same again",
        not_for=NOT_IN_WORKERS)  # fmt: skip
def test_worker_that_cannot_start_raises_its_reason_each_time(same):
    def program(DataLoader):
        return drained(iter(DataLoader(Numbers(), batch_size=4, num_workers=1, worker_init_fn=init_fails)))

    torchs, ours = same.torchs(program).result, same.ours(program).result
    assert [error.kind for error in torchs] == [LookupError, UnboundLocalError, UnboundLocalError]
    assert ours == [torchs[0]] * 3


class Broken:
    """A sampler that fails on the way."""

    def __iter__(self):
        yield from [3, 1, 4]
        raise LookupError("no more indices")


class NeverBegins:
    def __iter__(self):
        raise LookupError("no indices")


class BrokenBatches:
    def __iter__(self):
        yield from [[3], [1, 4]]
        raise LookupError("no more batches")


SAMPLERS = {
    "a sampler": {"sampler": Broken(), "batch_size": 2},
    "a sampler that never begins": {"sampler": NeverBegins(), "batch_size": 2},
    "without batches": {"sampler": Broken(), "batch_size": None},
    "without batches, never begins": {"sampler": NeverBegins(), "batch_size": None},
    "a batch sampler": {"batch_sampler": BrokenBatches()},
    "a batch that is none": {"batch_sampler": [[1], 7]},
}


# Torch's iterator complains of its own half-made state when its constructor fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sampler", SAMPLERS)
@parity("what a sampler raises keeps its type and message")
def test_sampler_error_is_raised_at_its_place(same, sampler):
    def program(DataLoader):
        return [first_error(DataLoader(Numbers(), **SAMPLERS[sampler]))]

    assert isinstance(same(program)[0], Raised)


@parity("the batches before a sampler's error are delivered", not_for={READING: ""})
def test_batches_before_a_sampler_error_are_delivered(same):
    same(lambda DataLoader: drained(iter(DataLoader(Numbers(), **SAMPLERS["a batch sampler"]))))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@parity("the batches before a sampler's error are delivered", not_for={INLINE: "", THREAD: "", WORKERS: ""})
def test_batches_before_a_sampler_error_that_torch_raises_too_early_are_delivered(same):
    def program(DataLoader):
        try:
            iterator = iter(DataLoader(Numbers(), **SAMPLERS["a batch sampler"]))
        except LookupError:
            return "raised before the first batch"
        return drained(iterator)

    assert same.torchs(program).result == "raised before the first batch"
    *batches, error = same.ours(program).result
    assert [batch.tolist() for batch in batches] == [[3], [1, 4]]
    assert error == Raised(LookupError, "no more batches")


@pytest.mark.parametrize("failure", FAILURES)
@parity("the message is torch's: \"Caught … in DataLoader worker process N.\", then the worker's traceback",
        not_for=NO_WORDING)  # fmt: skip
def test_message_is_torchs(same, failure):
    def program(DataLoader):
        text = str(one_error(DataLoader(Map(FAILURES[failure]), batch_size=2, num_workers=1)))
        lines = text.splitlines(keepends=True)
        where = [line for line in lines if "test_errors.py" in line or not line.startswith(" ")]
        return lines[:2], where

    first, _ = same(program)
    assert first[0].startswith("Caught ")
    assert first[0].endswith(" in DataLoader worker process 0.\n")


@parity("the message is torch's: \"Caught … in DataLoader worker process N.\", then the worker's traceback",
        not_for=NO_WORDING)  # fmt: skip
def test_message_names_the_worker(same):
    def program(DataLoader):
        return [
            str(one_error(DataLoader(Map(bad), batch_size=size, sampler=range(order))))[:50]
            for size, order in ((5, 6), (2, 6), (6, 6), (1, 6))
        ]

    assert len(set(same(program))) == 2, "of both workers"


@parity("the message is torch's: \"Caught … in DataLoader worker process N.\", then the worker's traceback",
        not_for=NO_WORDING)  # fmt: skip
def test_message_of_every_stage_in_a_worker_is_torchs(same):
    def program(DataLoader):
        failing = {
            "__next__": DataLoader(Breaking(bad), batch_size=2, num_workers=1),
            "__iter__": DataLoader(CannotStart(bad), batch_size=2, num_workers=1),
            "collate_fn": DataLoader(Numbers(), batch_size=2, collate_fn=fussy, num_workers=1),
            "worker_init_fn": DataLoader(Numbers(), batch_size=20, worker_init_fn=init_fails, num_workers=1),
        }
        said = {}
        for stage, loader in failing.items():
            try:
                list(loader)
            except Exception as error:
                said[stage] = str(error).splitlines()[:2], str(error).splitlines()[-1]
            if not DataLoader.is_ours:
                end_torchs_workers()
        return said

    assert len(same(program)) == 4


@parity("the worker's traceback comes with the error", not_for={INLINE: IN_THIS_PROCESS, THREAD: IN_THIS_PROCESS})
def test_message_has_the_remote_traceback(same):
    def program(DataLoader):
        error = one_error(DataLoader(Map(bad), batch_size=2, num_workers=2))
        text = f"{error}\n{notes_of(error)}"
        return [name for name in ("Traceback (most recent call last)", "in __getitem__", "in bad") if name in text]

    assert len(same(program)) == 3


@parity("torch: no sample is named; here a note names stage, batch, index and worker")
def test_note_names_the_index(same):
    def program(DataLoader):
        return notes_of(one_error(DataLoader(Map(bad), batch_size=2)))

    assert str(BAD) not in same.torchs(program).result
    noted = same.ours(program).result
    assert f"headrace: stage fetch, batch 2, index {BAD}" in noted
    assert ("worker 0" in noted) is (same.setting.name == READING)


@parity("torch: a class that takes several arguments becomes a `RuntimeError`; here it stays what it is",
        not_for=NOT_IN_WORKERS)  # fmt: skip
@pytest.mark.parametrize(
    "failure",
    [raising(lambda: TwoArguments("a.jpg", 7)), raising(lambda: OwnText(404, "u")), lambda: json.loads("{"),
     lambda: b"\xff".decode()],
    ids=["several", "its own text", "JSON", "Unicode"],
)  # fmt: skip
def test_exception_class_with_several_arguments_is_kept(same, failure):
    with pytest.raises((ValueError, TwoArguments, OwnText)) as original:
        failure()

    def program(DataLoader):
        return one_error(DataLoader(Map(failure), batch_size=2, num_workers=1))

    torchs, ours = same.torchs(program).result, same.ours(program).result
    assert type(torchs) is RuntimeError
    assert type(ours) is original.type
    if same.setting.name == READING:
        assert str(torchs).splitlines()[0] in f"{ours}\n{notes_of(ours)}", "torch's words, in the message or in a note"
    assert own_message(ours) == str(original.value)
    assert {name: value for name, value in vars(ours).items() if name != "__notes__"} == vars(original.value)


@parity("torch: attributes are lost; here they come with the error", not_for=NOT_IN_WORKERS)
def test_attributes_of_an_error_are_kept(same):
    def failing_with(failure):
        def program(DataLoader):
            return one_error(DataLoader(Map(failure), batch_size=2, num_workers=1))

        return same.torchs(program).result, same.ours(program).result

    torchs, ours = failing_with(raising(lambda: Composed("a.jpg")))
    assert type(torchs) is type(ours) is Composed
    assert torchs.path.startswith("Caught Composed"), "the constructor was given torch's words"
    assert ours.path == "a.jpg"
    assert own_message(ours) == "corrupt: a.jpg", "composed once"

    torchs, ours = failing_with(lambda: Path("/no/such/file.jpg").read_bytes())
    assert type(torchs) is type(ours) is FileNotFoundError
    assert (torchs.errno, torchs.filename) == (None, None)
    assert (ours.errno, ours.filename) == (2, "/no/such/file.jpg")
    assert "No such file or directory" in str(ours)
    if same.setting.name == READING:
        assert str(torchs).splitlines()[0] in notes_of(ours)

    torchs, ours = failing_with(raising(lambda: Locked("bad")))
    assert type(torchs) is type(ours) is Locked
    assert own_message(torchs) == own_message(ours) == "bad"
    assert (ours.path, hasattr(ours, "lock")) == ("a.jpg", False), "what cannot be pickled stays behind"


@parity("torch: an error's cause is only in its message; here it is also its `__cause__`", not_for=NOT_IN_WORKERS)
def test_cause_of_an_error_is_kept(same):
    def program(DataLoader):
        return one_error(DataLoader(Map(chained), batch_size=2, num_workers=1))

    torchs, ours = same.torchs(program).result, same.ours(program).result
    assert "KeyError: 'inner'" in str(torchs)
    assert "KeyError: 'inner'" in f"{ours}\n{notes_of(ours)}"
    assert (type(torchs.__cause__), type(ours.__cause__)) == (type(None), KeyError)


def stops():
    raise StopIteration


@parity("torch: `StopIteration` in `__getitem__` or `collate_fn` ends the epoch silently; here it is an error")
def test_stop_iteration_of_the_dataset_is_an_error(same):
    def program(DataLoader):
        return drained(iter(DataLoader(Map(stops), batch_size=2)))

    torchs, ours = same.torchs(program).result, same.ours(program).result
    assert [batch.tolist() for batch in torchs] == [[0, 1], [2, 3]]
    error = ours.pop(2)
    # Python has already made an error of it where it comes out of a coroutine.
    assert error.kind is (RuntimeError if same.setting.asynchronous else hr.errors.ControlFlowError)
    assert "StopIteration" in error.message
    assert [batch.tolist() for batch in ours] == [[0, 1], [2, 3], [6, 7], [8, 9]]


def stopping(samples):
    if BAD in samples:
        raise StopIteration
    return samples


@parity("torch: `StopIteration` in `__getitem__` or `collate_fn` ends the epoch silently; here it is an error")
def test_stop_iteration_of_collate_is_an_error(same):
    def program(DataLoader):
        return drained(iter(DataLoader(Numbers(), batch_size=2, collate_fn=stopping)))

    torchs, ours = same.torchs(program).result, same.ours(program).result
    assert torchs == [[0, 1], [2, 3]]
    error = ours.pop(2)
    assert error.kind is hr.errors.ControlFlowError
    assert ours == [[0, 1], [2, 3], [6, 7], [8, 9]]


def locked(samples):
    return threading.Lock() if BAD in samples else samples


@parity("torch: a batch that cannot be pickled hangs; here it is an error, and iteration goes on",
        not_for={INLINE: "nothing is pickled", THREAD: "nothing is pickled"})  # fmt: skip
def test_unpicklable_batch_is_an_error(same):
    def program(DataLoader):
        most = 3 if DataLoader.is_ours else 1
        options = {"num_workers": 1, "timeout": 60 if DataLoader.is_ours else 1, "sampler": [BAD, 1, 2]}
        return drained(iter(DataLoader(Numbers(), collate_fn=locked, **options)), most)

    assert same.torchs(program).result == [Raised(RuntimeError, "DataLoader timed out after 1 seconds")]
    error, *rest = same.ours(program).result
    assert error.kind is hr.errors.NotPicklableError
    assert "lock" in error.message
    assert rest == [[1], [2]]


@parity("torch: an exception whose class cannot be pickled hangs; here its text arrives",
        not_for={INLINE: "nothing is pickled", THREAD: "nothing is pickled", WORKERS: ""})  # fmt: skip
def test_unpicklable_exception_is_an_error(same):
    class Local(Refuses):
        """Of a function: no other process can import it, nor can it be made to travel by value."""

    def program(DataLoader):
        most = 60 if DataLoader.is_ours else 1
        options = {"num_workers": 1, "timeout": 60 if DataLoader.is_ours else 1, "sampler": [BAD, 1]}
        return drained(iter(DataLoader(Map(raising(lambda: Local("text"))), **options)), most)

    assert same.torchs(program).result == [Raised(RuntimeError, "DataLoader timed out after 1 seconds")]
    error, rest = same.ours(program).result
    assert error == Raised(hr.errors.RemoteError, "text")
    assert rest.tolist() == [1]


@parity("torch: an exception whose class cannot be pickled hangs; here its text arrives",
        not_for={INLINE: "nothing is pickled", THREAD: "nothing is pickled", READING: ""})  # fmt: skip
def test_unpicklable_exception_of_aget_is_an_error(same):
    error, rest = same.ours(
        lambda DataLoader: drained(iter(DataLoader(Map(raising(lambda: Refuses("text"))), sampler=[BAD, 1])))
    ).result
    assert error.kind is hr.errors.RemoteError
    assert "text" in error.message
    assert rest.tolist() == [1]


@parity("an error in a worker ends no worker: the next epoch of `persistent_workers` is read by the same processes",
        not_for=NOT_IN_WORKERS | {WORKERS: "its workers always persist, and read nothing"})  # fmt: skip
def test_persistent_workers_survive_an_error(same):
    def program(DataLoader):
        loader = DataLoader(Map(bad), batch_size=2, persistent_workers=True)
        return [drained(iter(loader)) for _ in range(2)]

    same(program)


class StartsOnce(data.IterableDataset):
    def __init__(self):
        self.started = 0

    def __iter__(self):
        self.started += 1
        if self.started == 2:
            raise ValueError("not again")
        return iter(range(4))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@parity("torch: with `persistent_workers` a second `__iter__` that raises kills the worker; here it is its error",
        not_for=NOT_IN_WORKERS | {WORKERS: "its workers always persist, and read nothing"})  # fmt: skip
def test_stream_that_cannot_be_restarted_raises_torchs_error(same):
    def program(DataLoader):
        loader = DataLoader(StartsOnce(), batch_size=2, num_workers=1, persistent_workers=True)
        return len(list(loader)), first_error(loader)

    (torchs_batches, torchs), (ours_batches, ours) = same.torchs(program).result, same.ours(program).result
    assert torchs_batches == ours_batches == 2
    assert torchs.kind is RuntimeError
    assert "exited unexpectedly" in torchs.message
    assert ours == Raised(ValueError, "not again")
