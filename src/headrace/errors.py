"""Every exception that headrace raises.

::

    HeadraceError
    ├── DatasetTypeError (TypeError)            the dataset has no method to fetch with
    ├── NotPicklableError (TypeError)           a function or a batch cannot be sent to another process
    ├── ControlFlowError (RuntimeError)         user code raised StopIteration, SystemExit, CancelledError, …
    ├── RemoteError (RuntimeError)              the text of a worker's exception that could not be pickled
    ├── WorkerDiedError (RuntimeError)          a worker process ended while it had work
    ├── EngineDiedError (RuntimeError)          the event loop that fetches ended while a consumer waited
    ├── EngineStartError (RuntimeError)         too few engines of a cluster have started in time
    ├── DeviceUnavailableError (RuntimeError)   `device` names an accelerator that does not exist
    ├── CudaGraphError (RuntimeError)           a batch was requested while a CUDA graph was being captured
    ├── LoaderClosedError (RuntimeError)        an iterator was used after `close()`
    ├── LoaderTimeoutError (RuntimeError)       no batch within `timeout` seconds
    ├── DeadlockError (RuntimeError)            a blocking call on the thread that has to serve it
    ├── ForkedError (RuntimeError)              a handle that does not survive `os.fork` was used in a child
    ├── TooManySkippedError (RuntimeError)      more samples failed than `on_error` allows
    ├── CoordinationError (RuntimeError)        another rank has failed or did not answer, with `coordinated=True`
    ├── UnknownRankError (RuntimeError)         there are several ranks, and the rank of this process is unknown
    ├── LostBatchError (RuntimeError)           fewer batches delivered and reported than planned: a bug in headrace
    ├── MissingExtraError (ImportError)         an optional package is not installed
    ├── CacheFolderError (PermissionError)      other users can write to the cache's folder
    ├── ShortStreamError (ValueError)           a stream gave fewer samples than declared
    ├── StateError (ValueError)                 a saved state is damaged, or of another loader, dataset or sampler
    ├── ShardError (ValueError)                 a shard is damaged or malformed
    │   ├── TruncatedShardError (EOFError)      it ends too early
    │   └── UnsafeMemberError                   a tar member with an unsafe path or type
    └── StoreError (OSError)                    a request to an object store failed; its URL has no secrets
        ├── ObjectNotFoundError (FileNotFoundError)
        ├── EmptyListingError (FileNotFoundError)
        ├── StoreUnreachableError (ConnectionError)
        ├── ObjectChangedError                  the object was overwritten after it was listed
        └── ChecksumError                       the bytes do not match their checksum or length

Each class also subclasses the builtin a user would catch. Errors of user code are *not* wrapped in any of these: they
keep their type, and have a note with the stage, batch, index, key and worker (`headrace.types.Failure`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from headrace._core.text import shorten_list

__all__ = [
    "CacheFolderError",
    "ChecksumError",
    "ControlFlowError",
    "CoordinationError",
    "CudaGraphError",
    "DatasetTypeError",
    "DeadlockError",
    "DeviceUnavailableError",
    "EmptyListingError",
    "EngineDiedError",
    "EngineStartError",
    "ForkedError",
    "HeadraceError",
    "LoaderClosedError",
    "LoaderTimeoutError",
    "LostBatchError",
    "MissingExtraError",
    "NotPicklableError",
    "ObjectChangedError",
    "ObjectNotFoundError",
    "RemoteError",
    "ShardError",
    "ShortStreamError",
    "StateError",
    "StoreError",
    "StoreUnreachableError",
    "TooManySkippedError",
    "TruncatedShardError",
    "UnknownRankError",
    "UnsafeMemberError",
    "WorkerDiedError",
]


def _restore(cls: type[HeadraceError], args: tuple[object, ...], state: dict[str, object]) -> HeadraceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _or_from_message(compose: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(compose)

    @functools.wraps(compose)
    def init(self: HeadraceError, *args: object, **fields: object) -> None:
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

    Each class can also be constructed from a message alone, as torch does to raise an error of a worker process again.
    Its attributes are None then.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = _or_from_message(cls.__dict__["__init__"])  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[object, ...]:
        # Constructors compose messages from keyword fields; a copy keeps the composed message.
        return _restore, (type(self), self.args, self.__dict__)


class DatasetTypeError(HeadraceError, TypeError):
    """The dataset has none of the methods that a loader fetches with."""

    def __init__(self, *, dataset: object) -> None:
        kind = type(dataset).__name__
        super().__init__(
            f"{kind!r} object is not a dataset: it has neither `aget` (async, by index), `__getitem__` (by index), "
            f"`__aiter__` (async stream) nor `__iter__` (stream). Define one of them; map-style datasets also need "
            f"`__len__` unless a sampler is given."
        )


class NotPicklableError(HeadraceError, TypeError):
    """A function for the workers, or a value that a worker returned, cannot be pickled.

    Attributes:
        what: the argument or value, e.g. ``"transform=<function decode>"``.
        reason: the pickling error's message.
    """

    what: str | None = None
    reason: str | None = None

    def __init__(self, *, what: str, reason: str, remedy: str) -> None:
        super().__init__(f"{what} cannot be pickled: {reason}. {remedy}")
        self.what = what
        self.reason = reason


class DeviceUnavailableError(HeadraceError, RuntimeError):
    """The device that batches should be copied to does not exist or cannot be used."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(
            f"device={device!r} cannot be used: {reason}. Batches stay in host memory with device=None; "
            f'device="auto" takes the accelerator that is there, and none where there is none.'
        )


class CudaGraphError(HeadraceError, RuntimeError):
    """A batch was requested while the current stream was being captured into a CUDA graph."""

    def __init__(self) -> None:
        super().__init__(
            "next() of a loader with device= was called while a CUDA graph is being captured: the graph would replay "
            "this one batch's copy for ever. Fetch the batch before the capture, and copy it into a static tensor."
        )


class ControlFlowError(HeadraceError, RuntimeError):
    """User code raised an exception that Python treats as control flow and that would have ended the epoch silently.

    The original is its `__cause__`.
    """

    def __init__(self, *, error: BaseException) -> None:
        super().__init__(
            f"user code raised {error!r}, which Python takes as a signal to stop; "
            f"it is reported as an error so that no batch goes missing. Catch it where it is raised, "
            f"or raise an ordinary exception."
        )


class RemoteError(HeadraceError, RuntimeError):
    """An exception of a worker process that could not be pickled; its type and traceback are text.

    Attributes:
        type_name: the qualified name of the exception's class in the worker.
    """

    type_name: str | None = None

    def __init__(self, *, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message} (this exception could not be pickled, only its text was)")
        self.type_name = type_name


class WorkerDiedError(HeadraceError, RuntimeError):
    """A worker process ended without an answer, on the last attempt.

    Attributes:
        worker: the worker's number.
        exit_code: its exit code; the negative number of a signal; None if unknown.
        batch: number of the batch it had; None if it died idle or while starting, or cannot be started.
        indices: the sampler's indices of that batch.
    """

    worker: int | None = None
    exit_code: int | None = None
    batch: int | None = None
    indices: tuple[object, ...] | None = None

    def __init__(
        self,
        *,
        worker: int,
        pid: int | None,
        how: str,
        exit_code: int | None,
        batch: int | None,
        indices: tuple[object, ...],
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
    """The event loop that fetches ended while a consumer waited. The `__cause__` is the reason, where known."""

    def __init__(self, *, why: str) -> None:
        super().__init__(f"the loader's event loop has ended: {why}. Start a new iteration to go on.")


class EngineStartError(HeadraceError, RuntimeError):
    """Too few engines of a cluster have started in time."""

    def __init__(self, *, running: int, engines: int, least: int, seconds: float, shortage: str) -> None:
        super().__init__(
            f"{running} of {engines} engines run {seconds:g} seconds after they were asked for, and an epoch begins "
            f"with {least}: {shortage}. Ask for fewer or smaller engines, begin with fewer (min_engines), wait longer "
            f"(start_timeout), or make room."
        )


class LoaderClosedError(HeadraceError, RuntimeError):
    """A batch was requested from an iterator that was closed, or whose loader was closed."""

    def __init__(self) -> None:
        super().__init__("this iterator is closed: its loader was closed while it was in use. Call iter() again.")


class LoaderTimeoutError(HeadraceError, RuntimeError):
    """No batch was ready within the loader's `timeout`; the next call of `next()` waits for the same batch again.

    Attributes:
        batch: number of the awaited batch; with `in_order=False`, of the first in progress.
    """

    batch: int | None = None

    def __init__(self, seconds: float, waiting_for: str, *, batch: int | None = None) -> None:
        super().__init__(f"DataLoader timed out after {seconds} seconds ({waiting_for})")
        self.batch = batch


class DeadlockError(HeadraceError, RuntimeError):
    """A blocking call on the thread that has to serve it."""

    def __init__(self, *, what: str) -> None:
        super().__init__(
            f"{what} was called on the event-loop thread that has to do the work; it would wait for itself for ever. "
            f"Use the async method there (`await dataset.aget(i)`, `async for`)."
        )


class ForkedError(HeadraceError, RuntimeError):
    """A loop, store or loader made before `os.fork` was used in the child, where its threads do not exist."""

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
        remedy: what to do.
    """

    def __init__(
        self,
        *,
        why: str,
        remedy: str = "Set RANK and WORLD_SIZE, as torchrun does, or call torch.distributed.init_process_group() "
        "before the loader is iterated over",
    ) -> None:
        super().__init__(f"the rank of this process is not known: {why}. {remedy}")


class CoordinationError(HeadraceError, RuntimeError):
    """The ranks of a loader with `coordinated=True` cannot agree on the number of steps; the epoch is over.

    Attributes:
        ranks: the data-parallel ranks that failed or did not answer; None if not known.
    """

    ranks: tuple[int, ...] | None = None

    def __init__(self, message: str, *, ranks: tuple[int, ...] | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks


class LostBatchError(HeadraceError, RuntimeError):
    """The epoch ended while planned batches were neither delivered nor reported."""

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
    """An optional package that is needed is not installed."""

    def __init__(self, *, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'headrace[{extra}]'")


class CacheFolderError(HeadraceError, PermissionError):
    """The folder of a disk cache could contain files that another user has put there."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(
            f"{folder} cannot hold a cache: {reason}, so that its files could be anything. Name a folder that does not "
            f"exist yet, or one of your own that only you can write to (chmod 700)."
        )


class ShortStreamError(HeadraceError, ValueError):
    """A stream ended before the declared number of samples, so that other ranks wait for more."""

    def __init__(self, *, given: int, declared: int, repeats: bool = False) -> None:
        remedy = "Correct the number, or set remainder='pad' or remainder='repeat'."
        if repeats:  # it was to repeat samples, and had none
            remedy = "It has no sample to repeat: use fewer ranks, write more shards, or set split='samples'."
        super().__init__(
            f"the stream gave {given} samples in this process and {declared} were declared, so that this rank has "
            f"fewer batches than the others. {remedy}"
        )


class StateError(HeadraceError, ValueError):
    """A saved state is damaged, or was saved by another loader, dataset or sampler; nothing was restored."""


# Errors of stores and shards.


class ShardError(HeadraceError, ValueError):
    """A shard is damaged or malformed. Samples before the damage have been delivered.

    Attributes:
        shard: the shard's URL, without secrets.
        member: name of the damaged file in a tar, or of the last file before the damage; None if there is none.
        offset: position in the shard, in bytes; of a compressed one, in its decompressed bytes; None if unknown.
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
    """A shard ends too early: an upload or a download was interrupted."""


class UnsafeMemberError(ShardError):
    """A tar has a member whose path leads out of it, or that is a link or a device."""


class StoreError(HeadraceError, OSError):
    """A request to an object store failed.

    Attributes:
        url: URL of the request, without user names, passwords and query strings.
        key: the object's key, relative to `url`; None if the request was not for one object.
        index: the sample's index; None if the request was not for a sample.
        attempts: number of attempts.
        elapsed: seconds from the start of the first attempt to the end of the last.
        status: HTTP status of the last attempt; None if there was no response.
    """

    url: str | None = None
    key: str | None = None
    index: object = None
    attempts: int | None = None
    elapsed: float | None = None
    status: int | None = None

    def __init__(
        self,
        message: str,
        *,
        url: str,
        key: str | None = None,
        index: object = None,
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
    """An object that was listed or requested by key does not exist."""


class EmptyListingError(StoreError, FileNotFoundError):
    """A listing has no matching object."""


class StoreUnreachableError(StoreError, ConnectionError):
    """No response from the store within the time-out."""


class ObjectChangedError(StoreError):
    """An object was overwritten after it was listed."""


class ChecksumError(StoreError):
    """The received bytes did not match the checksum or the length, on every attempt."""


def _counted(attempts: int, elapsed: float | None) -> str:
    times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return times if elapsed is None else f"{times} in {elapsed:.2f} s"


for _name in __all__:
    globals()[_name].__module__ = __name__  # in tracebacks and pickles
