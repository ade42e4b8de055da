"""Records of errors of user code."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from headrace._base.text import (
    LIST_ITEMS,
    add_note,
    error_message,
    short_repr,
    shorten,
    shorten_list,
)
from headrace._torchcompat.private import KeyErrorMessage
from headrace.errors import ControlFlowError, HeadraceError, RemoteError, WorkerDiedError

KEY_LIMIT = 500  # characters of a key in an error; URLs of objects have fewer
MESSAGE_LIMIT = 500  # characters of an exception's message in a kept record


class Stage(enum.StrEnum):
    """The step in which user code failed.

    The values are the words in errors and records.
    """

    SAMPLING = "sampling"
    FETCH = "fetch"
    TRANSFORM = "transform"
    COLLATE = "collate"
    ASSEMBLE = "assemble"  # in a worker, outside of transform and collate
    WORKER_START = "worker start"
    SAVE_STATE = "state_dict"  # saving the state of a stream after a batch
    RESTORE = "load_state_dict"
    CLAIM = "claim"  # unpickling in the consumer's thread
    PIN = "pin"
    COPY = "copy"  # copying to a device
    ON_ERROR = "on_error"


@dataclass(frozen=True, slots=True)
class Failure:
    """Record of an error of user code.

    Attributes:
        error: the exception. A `ControlFlowError` replaces exceptions for control flow.
        stage: step of the error. A `Stage` is a str: ``failure.stage == "fetch"``.
        batch: number of the batch.
        index: the sampler's index, or the position in a stream; None if the whole batch failed.
        key: name of the sample in the dataset (key of an object, path); None without a name.
        samples: text with the first indices and keys of a failed batch; None otherwise.
        worker: number of the worker; None outside a worker.
        attempt: number of the attempt, from 1.
        traceback: printed traceback of another process; None for an error of this process.
        unskippable: reason for raising the error under every `on_error`; None if the policy
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
    def caught(
        cls, error: BaseException, stage: Stage, batch: int, **where: Any
    ) -> Failure:
        """Record a caught exception."""
        return cls(error=as_exception(error), stage=stage, batch=batch, **where)

    def located(
        self, indices: Sequence[object], sample_key: Callable[[object], str | None]
    ) -> Failure:
        """Return this record with the key of the sample.

        If the whole batch failed, add the indices and keys of the batch.
        """
        if self.index is not None:
            return replace(self, key=self.key or sample_key(self.index))
        return replace(
            self,
            samples=self.samples
            or (describe_samples(indices, sample_key) if indices else None),
        )

    def as_text(self) -> Failure:
        """Return this record with short text in place of objects.

        The record can be kept without keeping user objects alive. The error becomes a `RemoteError`
        with the message and the type name of the exception. The traceback is dropped.
        """
        error = RemoteError(
            shorten(self.message, MESSAGE_LIMIT), type_name=self.type_name
        )
        index = self.index
        if index is not None and type(index) is not int:
            index = shorten(index) if type(index) is str else short_repr(index)
        key = None if self.key is None else shorten(self.key)
        return replace(self, error=error, index=index, key=key, traceback=None)

    @property
    def is_skippable(self) -> bool:
        """Whether an `on_error` policy may skip the failure.

        Failures of samples may be skipped, failures of the whole pipeline may not.
        """
        if isinstance(self.error, WorkerDiedError):
            return self.error.batch is not None or self.index is not None
        return self.unskippable is None and self.stage in (
            Stage.FETCH,
            Stage.TRANSFORM,
            Stage.COLLATE,
        )

    @property
    def lost(self) -> int | None:
        """Number of samples lost with the rest of a shard.

        0 if the number is unknown; None for an error without a lost rest.
        """
        return self.error.lost_samples if isinstance(self.error, HeadraceError) else None

    @property
    def type_name(self) -> str:
        """Name of the error's type.

        For a `RemoteError`, name of the type in the other process.
        """
        remote = self.error.type_name if isinstance(self.error, RemoteError) else None
        return remote or type(self.error).__name__

    @property
    def message(self) -> str:
        """Message of the error."""
        return error_message(self.error)

    @property
    def where(self) -> str:
        """Text with stage, batch, index, key, worker and attempt."""
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
        """Return the error with notes, for the consumer.

        A note has the location. For an error of another process, a further note has the traceback.
        With `as_torch`, torch's words for a worker error replace the message, if possible.
        """
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
            words = (
                f"Caught {name} in DataLoader worker process {self.worker}.\n"
                f"Original {self.traceback}"
            )
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
# Stage, pattern for messages of asyncio, aiohttp and torch, and remedy.
_REMEDIES = (
    (
        Stage.FETCH,
        "'await' expression|be awaited",
        "write `async def aget`, and await only what is async",
    ),
    (
        Stage.FETCH,
        "loop is closed|a different (event )?loop|used inside a task",
        _PER_LOOP,
    ),
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
    """Replace the message of an error, as torch's loader does.

    Other attributes stay. Some classes compose a message from several arguments or in `__str__`.
    An error of such a class stays unchanged.

    Returns:
        Whether the message was replaced.
    """
    if isinstance(error, HeadraceError) and not isinstance(error, RemoteError):
        return False  # messages of headrace have the location and the remedy
    before = error.args
    try:
        if isinstance(error, ImportError):
            error.msg = words
        elif len(before) > 1 and isinstance(type(error).__init__, types.FunctionType):
            return False
        # `str` of a KeyError is the `repr` of the argument: a line full of backslashes.
        error.args = (KeyErrorMessage(words) if isinstance(error, KeyError) else words,)
        if str(error) == words:
            return True
    except Exception:  # user code: `__setattr__`, `__str__`
        pass
    with suppress(Exception):
        error.args = before
    return False


def describe_samples(
    indices: Sequence[object], sample_key: Callable[[object], str | None]
) -> str:
    """Return text with the first indices and keys of a batch."""
    words = f"indices {shorten_list(indices, len(indices))}"
    keys = [
        key for index in indices[:LIST_ITEMS] if (key := sample_key(index)) is not None
    ]
    return f"{words}, keys {shorten_list(keys, len(indices))}" if keys else words


def key_in(sample: object) -> str | None:
    """Return key and shard of a sample of a tar stream.

    The result is None for other samples.
    """
    with suppress(Exception):  # the classes of the sample and the key are user code
        if isinstance(sample, dict) and "__key__" in sample:
            return f"{sample['__key__']} in {sample.get('__url__')}"
    return None


def interrupted(by: str) -> RuntimeError:
    """Return the error for an epoch that may lack batches, since Ctrl-C came at a bad moment."""
    return RuntimeError(
        f"{by} came at a moment at which batches can get lost. To go on, "
        f"call loader.load_state_dict(loader.state_dict()) and begin a new iteration"
    )


def as_exception(error: BaseException) -> Exception:
    """Return an exception that cannot end a loop, task or process.

    A `ControlFlowError` replaces an exception for control flow.
    """
    if isinstance(error, Exception) and not isinstance(
        error, StopIteration | StopAsyncIteration
    ):
        return error
    stopped = ControlFlowError(error=error)
    stopped.__cause__ = error
    return stopped
