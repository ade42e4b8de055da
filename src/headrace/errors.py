"""Every exception headrace raises, and how each composes its message.

::

    HeadraceError
    ├── DatasetTypeError (TypeError)        the dataset has no method we could fetch with
    ├── NotPicklableError (TypeError)       a function or a batch that cannot cross a process border
    ├── ControlFlowError (RuntimeError)        user code raised StopIteration, SystemExit, CancelledError, …
    ├── RemoteError (RuntimeError)          a worker's exception that could not travel; its text did
    ├── WorkerDiedError (RuntimeError)           a worker process ended while it had work
    ├── EngineDiedError (RuntimeError)      the loop that fetches has ended under a waiting consumer
    ├── DeviceUnavailableError (RuntimeError)  `device` names an accelerator that is not there
    ├── CudaGraphError (RuntimeError)         a batch was asked for while a CUDA graph was being captured
    ├── LoaderClosedError (RuntimeError)    an iterator was used after `close()`
    ├── LoaderTimeoutError (RuntimeError)   no batch within `timeout` seconds
    ├── DeadlockError (RuntimeError)       waiting here would wait for itself
    ├── ForkedError (RuntimeError)          a handle that does not survive `os.fork` was used in a child
    ├── TooManySkippedError (RuntimeError)  more samples failed than `on_error` allows
    ├── UnknownRankError (RuntimeError)     there are several ranks, and which one this is cannot be found out
    ├── LostBatchError (RuntimeError)       planned ≠ delivered + reported: a bug of ours, never silent
    ├── MissingExtraError (ImportError)     a package that is not installed by default is needed
    ├── CacheFolderError (PermissionError)  a folder for a cache that others could write to
    ├── ShortStreamError (ValueError)       a stream gave fewer samples than it was declared to have
    ├── ManifestError (ValueError)          a list of objects, or of their labels, is not what it should be
    ├── ShardError (ValueError)             a shard is damaged, or not what it should be
    │   ├── TruncatedShardError (EOFError)        it ends too early
    │   └── UnsafeMemberError               a member of a tar that could be turned against who unpacks it
    └── StoreError (OSError)                an object store said no; the URL in it has no secrets
        ├── ObjectNotFoundError (FileNotFoundError)
        ├── EmptyListingError (FileNotFoundError)
        ├── StoreUnreachableError (ConnectionError)
        ├── ObjectChangedError              it is not the object that was listed
        └── ChecksumError              its bytes are not what their checksum or length says

Each class also subclasses the builtin a user would catch. Errors of user code are *not* wrapped in any of these: they
keep their type, and carry a note that says where they happened (see `headrace._core.batches.Failure`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from headrace._core.text import shorten_list

__all__ = [
    "CacheFolderError",
    "ChecksumError",
    "ControlFlowError",
    "CudaGraphError",
    "DatasetTypeError",
    "DeadlockError",
    "DeviceUnavailableError",
    "EmptyListingError",
    "EngineDiedError",
    "ForkedError",
    "HeadraceError",
    "LoaderClosedError",
    "LoaderTimeoutError",
    "LostBatchError",
    "ManifestError",
    "MissingExtraError",
    "NotPicklableError",
    "ObjectChangedError",
    "ObjectNotFoundError",
    "RemoteError",
    "ShardError",
    "ShortStreamError",
    "StoreError",
    "StoreUnreachableError",
    "TooManySkippedError",
    "TruncatedShardError",
    "UnknownRankError",
    "UnsafeMemberError",
    "WorkerDiedError",
]


def _restore(cls: type[HeadraceError], args: tuple[Any, ...], state: dict[str, Any]) -> HeadraceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _or_from_message(compose: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(compose)

    @functools.wraps(compose)
    def init(self: HeadraceError, *args: Any, **fields: Any) -> None:
        try:
            signature.bind(self, *args, **fields)
        except TypeError:
            if fields or len(args) != 1 or not isinstance(args[0], str):
                raise
            super(HeadraceError, self).__init__(args[0])
        else:
            compose(self, *args, **fields)

    return init


class HeadraceError(Exception):
    """The base class: `except headrace.HeadraceError` catches every error that headrace itself raises.

    Each class can also be made from a message alone, as torch does when it raises an error of a worker process again;
    its attributes are None then.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = _or_from_message(cls.__dict__["__init__"])  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[Any, ...]:
        # Messages are composed from keyword fields; a copy is restored from what was composed, not composed again.
        return _restore, (type(self), self.args, self.__dict__)


class DatasetTypeError(HeadraceError, TypeError):
    """The dataset has none of the methods a loader fetches with."""

    def __init__(self, *, dataset: object) -> None:
        kind = type(dataset).__name__
        super().__init__(
            f"{kind!r} object is not a dataset: it has neither `aget` (async, by index), `__getitem__` (by index), "
            f"`__aiter__` (async stream) nor `__iter__` (stream). Define one of them; map-style datasets also need "
            f"`__len__` unless a sampler is given."
        )


class NotPicklableError(HeadraceError, TypeError):
    """A function for the workers, or what a worker made, cannot be pickled.

    Attributes:
        what: which argument or value it was, e.g. ``"transform=<function decode>"``.
        reason: what the pickler said.
    """

    what: str | None = None
    reason: str | None = None

    def __init__(self, *, what: str, reason: str, remedy: str) -> None:
        super().__init__(f"{what} cannot be pickled: {reason}. {remedy}")
        self.what = what
        self.reason = reason


class DeviceUnavailableError(HeadraceError, RuntimeError):
    """The device that batches should be copied to is not there."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(
            f"device={device!r} cannot be used: {reason}. Batches stay in host memory with device=None; "
            f'device="auto" takes the accelerator that is there, and none where there is none.'
        )


class CudaGraphError(HeadraceError, RuntimeError):
    """A batch was asked for while the current stream was being captured into a CUDA graph."""

    def __init__(self) -> None:
        super().__init__(
            "next() of a loader with device= was called while a CUDA graph is being captured: the graph would replay "
            "this one batch's copy for ever. Fetch the batch before the capture, and copy it into a static tensor."
        )


class ControlFlowError(HeadraceError, RuntimeError):
    """User code raised what means "stop" to Python; it would have ended the epoch, or the process, silently.

    The original is its `__cause__`.
    """

    def __init__(self, *, error: BaseException) -> None:
        super().__init__(
            f"user code raised {error!r}, which Python takes as a signal to stop; "
            f"it is reported as an error so that no batch goes missing. Catch it where it is raised, "
            f"or raise an ordinary exception."
        )


class RemoteError(HeadraceError, RuntimeError):
    """An exception of a worker process that could not be pickled; type and traceback travelled as text.

    Attributes:
        type_name: the qualified name of the exception's class in the worker.
    """

    type_name: str | None = None

    def __init__(self, *, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message} (this exception could not be pickled, only its text travelled)")
        self.type_name = type_name


class WorkerDiedError(HeadraceError, RuntimeError):
    """A worker process ended without an answer, on the last attempt it had.

    Attributes:
        worker: the worker's number.
        exit_code: its exit code; negative is a signal's number; None if unknown.
        batch: the number of the batch it had, or None if it died idle or while starting, or cannot be started.
        indices: the sampler's indices of that batch.
    """

    worker: int | None = None
    exit_code: int | None = None
    batch: int | None = None
    indices: tuple[Any, ...] | None = None

    def __init__(
        self,
        *,
        worker: int,
        pid: int | None,
        how: str,
        exit_code: int | None,
        batch: int | None,
        indices: tuple[Any, ...],
        attempts: int,
        doing: str | None = None,
        obstacle: Exception | None = None,
    ) -> None:
        if doing is not None:
            remedy = "Call the function that map or filter was given in this process to see the crash"
        elif batch is None:
            doing = "while starting"
            remedy = "Call worker_init_fn, and import what the transform needs, in this process to see the crash"
        else:
            doing = f"on batch {batch}, indices {shorten_list(indices, len(indices))}"
            remedy = "Run the transform and collate_fn over these indices with num_workers=0 to see the crash"
        message = (
            f"worker {worker} (pid {pid}) {how} {doing}, attempt {attempts}. {remedy}; if it was killed, look for the "
            f"out-of-memory killer in the kernel's log."
        )
        if obstacle is not None:
            ended = "" if pid is None else f" (pid {pid}) {how}, and"
            reason = getattr(obstacle, "strerror", None) or f"{type(obstacle).__name__}: {obstacle}"
            message = f"worker {worker}{ended} cannot be started: {reason}"
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code
        self.batch = batch
        self.indices = indices


class EngineDiedError(HeadraceError, RuntimeError):
    """The event loop that fetches has ended while a consumer waited for it; its `__cause__` says why where known."""

    def __init__(self, *, why: str) -> None:
        super().__init__(f"the loader's event loop has ended: {why}. Start a new iteration to go on.")


class LoaderClosedError(HeadraceError, RuntimeError):
    """An iterator was asked for a batch after it, or its loader, was closed."""

    def __init__(self) -> None:
        super().__init__("this iterator is closed: its loader was closed while it was in use. Call iter() again.")


class LoaderTimeoutError(HeadraceError, RuntimeError):
    """No batch was ready within the loader's `timeout`; the next call of `next()` waits for the same batch again.

    Attributes:
        batch: the number of the batch that was waited for; with `in_order=False` the first that is in progress.
    """

    batch: int | None = None

    def __init__(self, seconds: float, waiting_for: str, *, batch: int | None = None) -> None:
        super().__init__(f"DataLoader timed out after {seconds} seconds ({waiting_for})")
        self.batch = batch


class DeadlockError(HeadraceError, RuntimeError):
    """Blocking here would wait for the very thread it runs on."""

    def __init__(self, *, what: str) -> None:
        super().__init__(
            f"{what} was called on the event-loop thread that has to do the work; it would wait for itself for ever. "
            f"Use the async method there (`await dataset.aget(i)`, `async for`)."
        )


class ForkedError(HeadraceError, RuntimeError):
    """A loop, a store or a loader made before `os.fork` was used in the child, where its threads do not exist."""

    def __init__(self, what: str, *, made_in: int, used_in: int) -> None:
        super().__init__(
            f"{what} was first used in process {made_in} and is now used in {used_in}, a fork of it, where its threads "
            f"do not exist: it would hang. Start worker processes with multiprocessing_context='spawn' or "
            f"'forkserver', or use headrace.DataLoader, which fetches in one process."
        )


class UnknownRankError(HeadraceError, RuntimeError):
    """There are several ranks, and this process's rank is unknown: every rank would read the part of rank 0.

    Args:
        why: the known and the missing variables.
    """

    def __init__(self, *, why: str) -> None:
        super().__init__(
            f"the rank of this process is not known: {why}. Set RANK and WORLD_SIZE, as torchrun does, or call "
            f"torch.distributed.init_process_group() before the loader is iterated over"
        )


class LostBatchError(HeadraceError, RuntimeError):
    """The epoch ended, and some planned batches were neither delivered nor reported."""

    def __init__(self, *, planned: int, accounted: int) -> None:
        super().__init__(
            f"{planned} batches were planned but {accounted} were delivered or reported: this is a bug in headrace, "
            f"please report it with a script that shows it"
        )


class TooManySkippedError(HeadraceError, RuntimeError):
    """More samples failed than `on_error` allows, or so many that nothing could be delivered.

    The last error that was skipped is its `__cause__`.

    Attributes:
        skipped: samples of the epoch skipped so far.
        delivered: samples of the epoch delivered so far.
        examples: the last failures, as text.
    """

    skipped: int | None = None
    delivered: int | None = None
    examples: tuple[str, ...] | None = None

    def __init__(self, reason: str, *, skipped: int, delivered: int, examples: tuple[str, ...]) -> None:
        super().__init__(
            f"{reason}; {skipped:,} samples of this epoch were skipped and {delivered:,} delivered. "
            f"Last failures: {'; '.join(examples)}. More are in loader.stats().skipped; "
            f'on_error="raise" raises the first one.'
        )
        self.skipped = skipped
        self.delivered = delivered
        self.examples = examples


class MissingExtraError(HeadraceError, ImportError):
    """A package that headrace does not install by default is needed for what was asked."""

    def __init__(self, *, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'headrace[{extra}]'")


class CacheFolderError(HeadraceError, PermissionError):
    """A folder that a disk cache was to use could hold what another user has put there."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(
            f"{folder} cannot hold a cache: {reason}, so that its files could be anything. Name a folder that does not "
            f"exist yet, or one of your own that only you can write to (chmod 700)."
        )


class ShortStreamError(HeadraceError, ValueError):
    """A stream ended before it had given as many samples as it was declared to have; other ranks wait for more."""

    def __init__(self, *, given: int, declared: int) -> None:
        super().__init__(
            f"the stream gave {given} samples in this process and {declared} were declared, so that this rank has "
            f"fewer batches than the others. Correct the number, or say remainder='pad' or remainder='repeat'."
        )


class ManifestError(HeadraceError, ValueError):
    """A file that lists objects, or their labels, is damaged or does not fit the dataset.

    Attributes:
        source: the file's path or URL, without secrets.
        line: the line of it, from 1; of Parquet the row, from 1; None where it is about the whole file.
        column: the column of it; None where it is about no single one.
    """

    source: str | None = None
    line: int | None = None
    column: str | int | None = None

    def __init__(self, what: str, *, source: str, line: int | None = None, column: str | int | None = None) -> None:
        where = source if line is None else f"{source}, line {line}"
        super().__init__(f"{where}: {what}" if column is None else f"{where}, column {column!r}: {what}")
        self.source = source
        self.line = line
        self.column = column


class ShardError(HeadraceError, ValueError):
    """A shard is damaged, or is not what it should be; what came before the damage has been delivered.

    Attributes:
        shard: the shard's URL, without secrets.
        member: the member of it, a file in a tar, that is damaged or came last before the damage; None where there
            are no members, or none yet.
        offset: where in the shard, in bytes from its beginning; of a compressed one, in the bytes it unpacks to;
            None where that is not known.
    """

    shard: str | None = None
    member: str | None = None
    offset: int | None = None

    def __init__(self, what: str, *, shard: str, member: str | None = None, offset: int | None = None) -> None:
        where = [f"shard {shard}"]
        if member is not None:
            where.append(f"member {member!r}")
        if offset is not None:
            where.append(f"offset {offset}")
        super().__init__(f"{what} ({', '.join(where)})")
        self.shard = shard
        self.member = member
        self.offset = offset


class TruncatedShardError(ShardError, EOFError):
    """A shard ends before it should: an upload or a download was cut short."""


class UnsafeMemberError(ShardError):
    """A tar has a member that no training data has: a path that leads out of it, a link, a device."""


class StoreError(HeadraceError, OSError):
    """An object store refused or failed.

    Attributes:
        url: what was asked for, with user names, passwords and query strings removed.
        key: the object's key, relative to `url`; None where it was not about one object.
        index: the sample's index; None where it was not about a sample.
        attempts: how many times it was tried.
        elapsed: seconds from the first attempt to the end of the last.
        status: the HTTP status of the last attempt; None where there was none.
    """

    url: str | None = None
    key: str | None = None
    index: Any = None
    attempts: int | None = None
    elapsed: float | None = None
    status: int | None = None

    def __init__(
        self,
        message: str,
        *,
        url: str,
        key: str | None = None,
        index: Any = None,
        attempts: int = 1,
        elapsed: float | None = None,
        status: int | None = None,
    ) -> None:
        tried = "" if attempts == 1 and elapsed is None else f"; {_counted(attempts, elapsed)}"
        super().__init__(f"{message}{tried} ({url})")
        self.url = url
        self.key = key
        self.index = index
        self.attempts = attempts
        self.elapsed = elapsed
        self.status = status


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """An object that was listed, or asked for by key, is not there."""


class EmptyListingError(StoreError, FileNotFoundError):
    """A listing gave no object that matches."""


class StoreUnreachableError(StoreError, ConnectionError):
    """No answer from the store within the time-out."""


class ObjectChangedError(StoreError):
    """An object is not the one that was listed: it was overwritten since."""


class ChecksumError(StoreError):
    """The bytes that came are not what the given checksum, or the length, says, on every attempt."""


def _counted(attempts: int, elapsed: float | None) -> str:
    times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return times if elapsed is None else f"{times} in {elapsed:.2f} s"
