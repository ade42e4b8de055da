"""The record of an error of user code: where it happened, and whether it may be skipped."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from headrace._core.text import (
    LIST_ITEMS,
    add_note,
    error_message,
    short_repr,
    shorten,
    shorten_list,
)
from headrace._core.torchcompat.private import KeyErrorMessage
from headrace.errors import ControlFlowError, HeadraceError, RemoteError, WorkerDiedError

KEY_LIMIT = 500  # characters of a key in an error; an URL of an object has fewer
MESSAGE_LIMIT = 500  # characters of an exception's message in a record that is kept


class Stage(enum.StrEnum):
    """The step in which user code failed; the values are the words in errors and records."""

    SAMPLING = "sampling"
    FETCH = "fetch"
    TRANSFORM = "transform"
    COLLATE = "collate"
    ASSEMBLE = "assemble"  # in a worker, outside of transform and collate
    WORKER_START = "worker start"
    SAVE_STATE = "state_dict"  # of a stream, after a batch
    RESTORE = "load_state_dict"
    CLAIM = "claim"  # unpickling in the consumer's thread
    PIN = "pin"
    COPY = "copy"  # to a device
    ON_ERROR = "on_error"


@dataclass(frozen=True, slots=True)
class Failure:
    """The record of an error of user code.

    Attributes:
        error: the exception; those that Python treats as control flow are replaced by a
            `ControlFlowError`.
        stage: the step in which it was raised. A `Stage` is a str: ``failure.stage == "fetch"``.
        batch: the batch's number.
        index: the sampler's index, or the position in a stream; None where the whole batch failed.
        key: the dataset's name for that index (an object's key, a path); None if it has none.
        samples: text with the first indices and keys, where the whole batch failed.
        worker: the worker's number, None outside a worker.
        attempt: number of the attempt, from 1.
        traceback: printed traceback of another process; None if the error is of this one.
        unskippable: the reason why it is raised under every `on_error`; None where the policy
            decides.
    """

    error: Exception
    stage: Stage
    batch: int
    index: object = None
    key: str | None = None
    samples: str | None = None
    worker: int | None = None
    attempt: int = 1
    traceback: str | None = None
    unskippable: str | None = None

    @classmethod
    def caught(cls, error: BaseException, stage: Stage, batch: int, **where: Any) -> Failure:
        """Record `error` where it was caught."""
        return cls(error=as_exception(error), stage=stage, batch=batch, **where)

    def located(
        self, indices: Sequence[object], sample_key: Callable[[object], str | None]
    ) -> Failure:
        """This record with the sample's key; where the whole batch failed, with the batch's indices and keys."""
        if self.index is not None:
            return replace(self, key=self.key or sample_key(self.index))
        return replace(
            self,
            samples=self.samples or (describe_samples(indices, sample_key) if indices else None),
        )

    def as_text(self) -> Failure:
        """This record to be kept, with short text in place of the exception, its traceback, and objects of the user's.

        Its error is a `RemoteError` with the message; `type_name` is that of the exception's type.
        """
        error = RemoteError(shorten(self.message, MESSAGE_LIMIT), type_name=self.type_name)
        index = self.index
        if index is not None and type(index) is not int:
            index = shorten(index) if type(index) is str else short_repr(index)
        key = None if self.key is None else shorten(self.key)
        return replace(self, error=error, index=index, key=key, traceback=None)

    @property
    def is_skippable(self) -> bool:
        """Whether an `on_error` policy may skip it: it concerns samples, not the whole pipeline."""
        if isinstance(self.error, WorkerDiedError):
            return self.error.batch is not None or self.index is not None
        return self.unskippable is None and self.stage in (
            Stage.FETCH,
            Stage.TRANSFORM,
            Stage.COLLATE,
        )

    @property
    def lost(self) -> int | None:
        """Samples of the rest of a shard that are lost with it, 0 if unknown; None where no shard has ended."""
        return self.error.lost_samples if isinstance(self.error, HeadraceError) else None

    @property
    def type_name(self) -> str:
        """The name of the error's type; in another process, where that type does not exist here."""
        remote = self.error.type_name if isinstance(self.error, RemoteError) else None
        return remote or type(self.error).__name__

    @property
    def message(self) -> str:
        """The error's message, or the name of its class."""
        return error_message(self.error)

    @property
    def where(self) -> str:
        """Where it happened, in words: stage, batch, index, key, worker, attempt."""
        stage = (
            f"stage {self.stage}"
            if self.unskippable is None
            else f"stage {self.stage} ({self.unskippable})"
        )
        known = (
            None if self.index is None else f"index {short_repr(self.index)}",
            None if self.key is None else f"key {short_repr(self.key, KEY_LIMIT)}",
            self.samples,
            None if self.worker is None else f"worker {self.worker}",
            f"attempt {self.attempt}" if self.attempt > 1 else None,
        )
        return ", ".join([stage, f"batch {self.batch}", *filter(None, known)])

    def exception(self, *, as_torch: bool = False) -> Exception:
        """The error, to be raised to the consumer: its location is a note, its worker one too, or in torch's words."""
        note = f"headrace: {self.where}"
        noted = vars(self.error).get("__notes__")
        if isinstance(noted, list) and note in noted:
            return self.error
        found = (
            remedy
            for stage, words, remedy in _REMEDIES
            if stage is self.stage and re.search(words, self.message)
        )
        notes = [note, *(f"headrace: {remedy}" for remedy in found)]
        if self.traceback is not None and as_torch and self.worker is not None:
            name = self.type_name.rpartition(".")[2]
            words = f"Caught {name} in DataLoader worker process {self.worker}.\nOriginal {self.traceback}"
            if not _set_message(self.error, words):
                notes.insert(0, words.rstrip())
        elif self.traceback is not None:
            process = "the loader's" if self.worker is None else "a worker"
            notes.insert(0, f"in {process} process:\n{self.traceback.rstrip()}")
        for each in notes:
            add_note(self.error, each)
        return self.error

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message} ({self.where})"


_PER_LOOP = "make clients, which belong to one event loop, by headrace.per_loop"
# By words of errors of asyncio, aiohttp and torch.
_REMEDIES = (
    (
        Stage.FETCH,
        "'await' expression|be awaited",
        "write `async def aget`, and await only what is async",
    ),
    (Stage.FETCH, "loop is closed|a different (event )?loop|used inside a task", _PER_LOOP),
    (
        Stage.COLLATE,
        "equal size",
        "pad by torch's pad_sequence in collate_fn=; crop or resize before",
    ),
    (
        Stage.COLLATE,
        "NoneType",
        "leave out samples that are None: .filter() of a stream, or an error and on_error=",
    ),
    (
        Stage.COLLATE,
        "contain(?!.*NoneType)",
        "make tensors of it in transform=; collate_fn=list keeps it as it is",
    ),
)


def _set_message(error: BaseException, words: str) -> bool:
    """Make `words` the message of `error`, as torch's loader does; the other attributes stay.

    False where a class composes its message of several arguments or in its `__str__`: then the
    error is as it was.
    """
    if isinstance(error, HeadraceError) and not isinstance(error, RemoteError):
        return False  # their own messages have the location and the remedy
    before = error.args
    try:
        if isinstance(error, ImportError):
            error.msg = words
        elif len(before) > 1 and isinstance(type(error).__init__, types.FunctionType):
            return False
        # `str` of a KeyError is the `repr` of its argument, which would be one line of backslashes.
        error.args = (KeyErrorMessage(words) if isinstance(error, KeyError) else words,)
        if str(error) == words:
            return True
    except Exception:  # user code: `__setattr__`, `__str__`
        pass
    with suppress(Exception):
        error.args = before
    return False


def describe_samples(indices: Sequence[object], sample_key: Callable[[object], str | None]) -> str:
    """The first of a batch's indices and their keys, in words."""
    words = f"indices {shorten_list(indices, len(indices))}"
    keys = [key for index in indices[:LIST_ITEMS] if (key := sample_key(index)) is not None]
    return f"{words}, keys {shorten_list(keys, len(indices))}" if keys else words


def key_in(sample: object) -> str | None:
    """The key and the shard that a sample of a tar stream has; None of another."""
    with suppress(Exception):  # user code: the class of a sample, or of its key
        if isinstance(sample, dict) and "__key__" in sample:
            return f"{sample['__key__']} in {sample.get('__url__')}"
    return None


def as_exception(error: BaseException) -> Exception:
    """An exception that can be raised to a consumer without ending its loop, its task or its process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    stopped = ControlFlowError(error=error)
    stopped.__cause__ = error
    return stopped
