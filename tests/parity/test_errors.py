"""Errors: of torch's type, with torch's message, at torch's place, and iteration continues as torch's does."""

import json
import threading
from pathlib import Path

import pytest
import torch
from torch.utils import data

import headrace as hr
from tests.parity.harness import (
    NAMES,
    Raised,
    drained,
    end_torchs_workers,
    own_message,
    parity,
)

LENGTH, BAD = 10, 5
INLINE, READING, THREAD, WORKERS = NAMES

NO_WORKERS = "no workers"
OWN_WORDS = "keeps the original message; the traceback is in a note"
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
    """Fails at one index in ten, each time in another way."""

    def __init__(self, *failures):
        self.failures = failures

    def __len__(self):
        return LENGTH * len(self.failures)

    def __getitem__(self, index):
        if index % LENGTH == BAD:
            self.failures[index // LENGTH]()
        return torch.tensor(index)


class Stumbling:
    """An iterator that fails at one position in ten, and can continue after it."""

    def __init__(self, failures):
        self.failures = failures
        self.position = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        if self.position >= LENGTH * len(self.failures):
            raise StopIteration
        if self.position % LENGTH == BAD:
            self.failures[self.position // LENGTH]()
        return self.position


class Stream(data.IterableDataset):
    def __init__(self, *failures):
        self.failures = failures

    def __iter__(self):
        return Stumbling(self.failures)


class Breaking(Stream):
    """A generator, which an exception ends."""

    def __iter__(self):
        yield from range(BAD)
        self.failures[0]()


class CannotStart(Stream):
    def __iter__(self):
        self.failures[0]()


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
    "KeyError": raising(lambda: KeyError("missing")),
    "a user's class": raising(lambda: Plain("bad")),
    "a class with a message": raising(lambda: WithMessage("bad")),
    "a cause": chained,
    "a context": in_context,
    "an import": lambda: __import__("no_such_module_at_all"),
    "torch's own": lambda: torch.zeros(2) + torch.zeros(3),
}


def bad():
    raise ValueError("bad")


def errors_of(loader):
    """The errors of an epoch, as they were raised, without this process's part of the traceback."""
    iterator, errors = iter(loader), []
    while True:
        try:
            next(iterator)
        except StopIteration:
            return errors
        except Exception as error:
            errors.append(error.with_traceback(None))


def one_error(loader):
    (error,) = errors_of(loader)
    return error


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


@parity(
    "errors of `__getitem__` keep type and message, and iteration goes on behind the batch"
)
def test_getitem_error_costs_its_batch(same):
    def program(DataLoader):
        return drained(iter(DataLoader(Map(*FAILURES.values()), batch_size=2)))

    came = same(program)
    assert [type(batch) for batch in came].count(Raised) == len(FAILURES)
    assert len(came) == len(FAILURES) * LENGTH / 2


@parity(
    "an error without batches, in the last batch of all, and anew in every epoch, also of `persistent_workers`"
)
def test_error_costs_its_sample_in_every_epoch(DataLoader):
    loader = DataLoader(
        Map(bad), batch_size=4, persistent_workers=bool(DataLoader.options["num_workers"])
    )
    return [
        drained(iter(DataLoader(Map(bad), batch_size=None))),
        drained(iter(DataLoader(Map(bad), sampler=[1, 2, BAD], batch_size=2))),
        *(drained(iter(loader)) for _ in range(2)),
    ]


@parity("with `in_order=False` an error costs no other batch")
def test_error_with_in_order_false_costs_its_batch(DataLoader):
    came = drained(iter(DataLoader(Map(bad), batch_size=2, in_order=False)))
    errors = [one for one in came if isinstance(one, Raised)]
    return errors, sorted(
        batch.tolist() for batch in came if not isinstance(batch, Raised)
    )


class Many(Map):
    def __getitems__(self, indices):
        if BAD in indices:
            self.failures[0]()
        return indices


@parity("errors of `__getitems__` keep type and message")
def test_getitems_error_costs_its_batch(same):
    same(lambda DataLoader: drained(iter(DataLoader(Many(bad), batch_size=4))))


@parity(
    "errors of a stream's `__next__` are raised in order; the next batch begins behind the error"
)
def test_stream_error_is_raised_at_its_batch(same):
    def program(DataLoader):
        return drained(iter(DataLoader(Stream(*FAILURES.values()), batch_size=2)), 200)

    assert any(isinstance(batch, Raised) for batch in same(program))


@parity("a generator ends with its error")
def test_generator_error_ends_the_stream(same):
    def program(DataLoader):
        return [
            drained(iter(DataLoader(Breaking(bad), batch_size=2, drop_last=last)))
            for last in (False, True)
        ]

    assert all(isinstance(batches[-1], Raised) for batches in same(program))


@parity("errors of a stream's `__iter__` keep type and message")
def test_iter_error_is_raised_at_the_first_batch(same):
    def program(DataLoader):
        return [first_error(DataLoader(CannotStart(bad), batch_size=2))]

    assert same(program) == [Raised(ValueError, "bad")]


def fussy(samples):
    if BAD in samples:
        raise ValueError(f"not {BAD}")
    return samples


@parity("errors of `collate_fn` keep type and message, and iteration goes on")
def test_collate_error_costs_its_batch(same):
    same(
        lambda DataLoader: drained(
            iter(DataLoader(range(LENGTH), batch_size=2, collate_fn=fussy))
        )
    )


def init_fails(worker):
    raise LookupError(f"worker {worker} cannot start")


@parity("errors of `worker_init_fn` keep type and message", not_for=NOT_IN_WORKERS)
def test_worker_init_fn_error_is_raised_for_each_batch(same):
    def program(DataLoader):
        options = {"batch_size": 2, "num_workers": 1, "worker_init_fn": init_fails}
        return [
            first_error(DataLoader(dataset, **options))
            for dataset in (range(LENGTH), Breaking(bad))
        ]

    assert same(program) == [Raised(LookupError, "worker 0 cannot start")] * 2


@parity("torch: a worker that could not start raises `UnboundLocalError` from the second batch on; here the same error",
        not_for=NOT_IN_WORKERS)  # fmt: skip
def test_worker_that_cannot_start_raises_its_reason_each_time(same):
    def program(DataLoader):
        return drained(
            iter(
                DataLoader(
                    range(LENGTH), batch_size=4, num_workers=1, worker_init_fn=init_fails
                )
            )
        )

    torchs, ours = same.torchs(program).result, same.ours(program).result
    assert [error.kind for error in torchs] == [
        LookupError,
        UnboundLocalError,
        UnboundLocalError,
    ]
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
@parity("errors of a sampler keep type and message")
def test_sampler_error_is_raised_at_its_place(same):
    def program(DataLoader):
        return [
            first_error(DataLoader(range(LENGTH), **options))
            for options in SAMPLERS.values()
        ]

    assert all(isinstance(error, Raised) for error in same(program))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@parity("the batches before a sampler's error are delivered")
def test_batches_before_a_sampler_error_are_delivered(same):
    def program(DataLoader):
        try:
            iterator = iter(DataLoader(range(LENGTH), **SAMPLERS["a batch sampler"]))
        except LookupError:
            return "raised before the first batch"
        return drained(iterator)

    torchs, (*batches, error) = same.torchs(program).result, same.ours(program).result
    assert [batch.tolist() for batch in batches] == [[3], [1, 4]]
    assert error == Raised(LookupError, "no more batches")
    if same.setting.name == READING:
        assert torchs == "raised before the first batch"
    else:
        assert torchs[-1] == error
        assert [batch.tolist() for batch in torchs[:-1]] == [[3], [1, 4]]


@parity("the message is torch's: \"Caught … in DataLoader worker process N.\", then the worker's traceback",
        not_for=NO_WORDING)  # fmt: skip
def test_message_of_every_stage_in_a_worker_is_torchs(same):
    def program(DataLoader):
        failing = {
            "__next__": DataLoader(Breaking(bad), batch_size=2, num_workers=1),
            "__iter__": DataLoader(CannotStart(bad), batch_size=2, num_workers=1),
            "collate_fn": DataLoader(
                range(LENGTH), batch_size=2, collate_fn=fussy, num_workers=1
            ),
            "worker_init_fn": DataLoader(
                range(LENGTH), batch_size=20, worker_init_fn=init_fails, num_workers=1
            ),
        }
        errors = errors_of(DataLoader(Map(*FAILURES.values()), batch_size=2))
        for loader in failing.values():
            with pytest.raises(Exception, match="Caught") as caught:
                list(loader)
            errors.append(caught.value)
            if not DataLoader.is_ours:
                end_torchs_workers()
        texts = [str(error).splitlines() for error in errors]
        return [(text[:2], text[-1]) for text in texts]

    said = same(program)
    assert len(said) == len(FAILURES) + 4
    ends = {(first[:7], first.partition(" in ")[2]) for (first, _), _ in said}
    assert ends == {
        ("Caught ", f"DataLoader worker process {worker}.") for worker in (0, 1)
    }


@parity(
    "the worker's traceback comes with the error",
    not_for={INLINE: IN_THIS_PROCESS, THREAD: IN_THIS_PROCESS},
)
def test_message_has_the_remote_traceback(same):
    def program(DataLoader):
        error = one_error(DataLoader(Map(bad), batch_size=2, num_workers=2))
        text = f"{error}\n{notes_of(error)}"
        return [
            name
            for name in ("Traceback (most recent call last)", "in __getitem__", "in bad")
            if name in text
        ]

    assert len(same(program)) == 3


@parity("torch: no sample is named; here a note names stage, batch, index and worker")
def test_note_names_the_index(same):
    def program(DataLoader):
        return notes_of(one_error(DataLoader(Map(bad), batch_size=2)))

    assert str(BAD) not in same.torchs(program).result
    noted = same.ours(program).result
    assert f"headrace: stage fetch, batch 2, index {BAD}" in noted
    assert ("worker 0" in noted) is (same.setting.name == READING)


KEPT = (
    raising(lambda: TwoArguments("a.jpg", 7)),
    raising(lambda: OwnText(404, "u")),
    lambda: json.loads("{"),
    lambda: b"\xff".decode(),
    raising(lambda: Composed("a.jpg")),
    raising(lambda: Locked("bad")),
    Path("/no/such/file.jpg").read_bytes,
    chained,
)


@parity(
    "torch: a class of several arguments becomes a `RuntimeError`, attributes are lost, and a cause is only in the "
    "message; here an error keeps all three",
    not_for=NOT_IN_WORKERS,
)
def test_class_attributes_and_cause_of_an_error_are_kept(same):
    def program(DataLoader):
        return errors_of(DataLoader(Map(*KEPT), batch_size=2, num_workers=1))

    torchs, ours = same.torchs(program).result, same.ours(program).result
    *_, missing, caused = torchs
    assert [type(error) for error in torchs].count(RuntimeError) == 4
    assert (missing.errno, caused.__cause__) == (None, None)
    for failure, torchs_error, error in zip(KEPT, torchs, ours, strict=True):
        with pytest.raises(
            (ValueError, OSError, TwoArguments, OwnText, Composed, Locked)
        ) as found:
            failure()
        original = found.value
        assert type(error) is type(original)
        assert own_message(error) == str(original)
        # what cannot be pickled stays behind
        attributes = {**vars(error), "lock": None, "__notes__": None}
        assert attributes == {**vars(original), "lock": None, "__notes__": None}
        assert type(error.__cause__) is type(original.__cause__)
        if same.setting.name == READING and type(torchs_error) is RuntimeError:
            assert str(torchs_error).splitlines()[0] in f"{error}\n{notes_of(error)}", (
                "in the message or in a note"
            )


def stops():
    raise StopIteration


def stopping(samples):
    if BAD in samples:
        raise StopIteration
    return samples


@parity(
    "torch: `StopIteration` in `__getitem__` or `collate_fn` ends the epoch silently; here an error"
)
def test_stop_iteration_of_the_dataset_or_of_collate_is_an_error(same):
    def program(DataLoader):
        loaders = (
            DataLoader(Map(stops), batch_size=2),
            DataLoader(range(LENGTH), batch_size=2, collate_fn=stopping),
        )
        return [
            [
                each if isinstance(each, Raised) else list(map(int, each))
                for each in drained(iter(one))
            ]
            for one in loaders
        ]

    assert same.torchs(program).result == [[[0, 1], [2, 3]]] * 2
    of_dataset, of_collate = same.ours(program).result
    # Python has already made an error of it where it comes out of a coroutine.
    kinds = (
        RuntimeError if same.setting.asynchronous else hr.errors.ControlFlowError,
        hr.errors.ControlFlowError,
    )
    for batches, kind in ((of_dataset, kinds[0]), (of_collate, kinds[1])):
        error = batches.pop(2)
        assert error.kind is kind
        assert "StopIteration" in error.message
        assert batches == [[0, 1], [2, 3], [6, 7], [8, 9]]


def locked(samples):
    return threading.Lock() if BAD in samples else samples


@parity("torch: a batch that cannot be pickled hangs; here an error, and iteration goes on",
        not_for={INLINE: "nothing is pickled", THREAD: "nothing is pickled"})  # fmt: skip
def test_unpicklable_batch_is_an_error(same):
    def program(DataLoader):
        most = 3 if DataLoader.is_ours else 1
        options = {
            "num_workers": 1,
            "timeout": 60 if DataLoader.is_ours else 1,
            "sampler": [BAD, 1, 2],
        }
        return drained(
            iter(DataLoader(range(LENGTH), collate_fn=locked, **options)), most
        )

    assert same.torchs(program).result == [
        Raised(RuntimeError, "DataLoader timed out after 1 seconds")
    ]
    error, *rest = same.ours(program).result
    assert error.kind is hr.errors.NotPicklableError
    assert "lock" in error.message
    assert rest == [[1], [2]]


@parity("torch: an exception that cannot be pickled hangs; here the text arrives",
        not_for={INLINE: "nothing is pickled", THREAD: "nothing is pickled"})  # fmt: skip
def test_unpicklable_exception_is_an_error(same):
    class Local(Refuses):
        """Of a function: no other process can import it, nor can it be made to travel by value."""

    kind = Refuses if same.setting.asynchronous else Local

    def program(DataLoader):
        most = 60 if DataLoader.is_ours else 1
        options = {
            "num_workers": 1,
            "timeout": 60 if DataLoader.is_ours else 1,
            "sampler": [BAD, 1],
        }
        return drained(
            iter(DataLoader(Map(raising(lambda: kind("text"))), **options)), most
        )

    if same.setting.name == READING:
        assert same.torchs(program).result == [
            Raised(RuntimeError, "DataLoader timed out after 1 seconds")
        ]
    error, rest = same.ours(program).result
    assert error.kind is hr.errors.RemoteError
    assert "text" in error.message
    assert rest.tolist() == [1]


class StartsOnce(data.IterableDataset):
    def __init__(self):
        self.started = 0

    def __iter__(self):
        self.started += 1
        if self.started == 2:
            raise ValueError("not again")
        return iter(range(4))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@parity("torch: with `persistent_workers` an error of a second `__iter__` kills the worker; here the error is raised",
        not_for=NOT_IN_WORKERS | {WORKERS: "workers always persist, and read nothing"})  # fmt: skip
def test_stream_that_cannot_be_restarted_raises_torchs_error(same):
    def program(DataLoader):
        loader = DataLoader(
            StartsOnce(), batch_size=2, num_workers=1, persistent_workers=True
        )
        return len(list(loader)), first_error(loader)

    (torchs_batches, torchs), (ours_batches, ours) = (
        same.torchs(program).result,
        same.ours(program).result,
    )
    assert torchs_batches == ours_batches == 2
    assert torchs.kind is RuntimeError
    assert "exited unexpectedly" in torchs.message
    assert ours == Raised(ValueError, "not again")
