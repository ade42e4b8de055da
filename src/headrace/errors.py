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

import signal
from typing import ClassVar

from headrace._core.text import shorten_list


def _restore(cls: type[HeadraceError], args: tuple[object, ...], state: dict[str, object]) -> HeadraceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class HeadraceError(Exception):
    """The base class: `except headrace.HeadraceError` catches every error that headrace itself raises.

    Each class can also be constructed from a message alone, as torch does to raise an error of a worker process again.
    Its attributes are None then.

    Attributes:
        lost_samples: samples of the rest of a shard that a stream cannot read on, estimated if they were not counted, 0
            if there is no estimate; None of other errors.
    """

    lost_samples: int | None = None
    _text: ClassVar[str] = ""  # the message, with the names of its fields

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*(args or (self._text.format(**fields),)))
        self.__dict__.update({name: value for name, value in fields.items() if hasattr(type(self), name)})

    def __reduce__(self) -> tuple[object, ...]:
        # Constructors compose messages from keyword fields; a copy keeps the composed message.
        return _restore, (type(self), self.args, self.__dict__)


class DatasetTypeError(HeadraceError, TypeError):
    """The dataset has none of the methods that a loader fetches with."""

    _text = (
        "{dataset.__class__.__name__!r} object is not a dataset: it has neither `aget` (async, by index), "
        "`__getitem__` (by index), `__aiter__` (async stream) nor `__iter__` (stream). Define one of them; map-style "
        "datasets also need `__len__` unless a sampler is given."
    )


class NotPicklableError(HeadraceError, TypeError):
    """A function for the workers, or a value that a worker returned, cannot be pickled.

    Attributes:
        what: the argument or value, e.g. ``"transform=<function decode>"``.
        reason: the pickling error's message.
    """

    what: str | None = None
    reason: str | None = None

    _text = "{what} cannot be pickled: {reason}. {remedy}"


class DeviceUnavailableError(HeadraceError, RuntimeError):
    """The device that batches should be copied to does not exist or cannot be used."""

    _text = (
        "device={device!r} cannot be used: {reason}. Batches stay in host memory with device=None; "
        'device="auto" takes the accelerator that is there, and none where there is none.'
    )


class CudaGraphError(HeadraceError, RuntimeError):
    """A batch was requested while the current stream was being captured into a CUDA graph."""

    _text = (
        "next() of a loader with device= was called while a CUDA graph is being captured: the graph would replay "
        "this one batch's copy for ever. Fetch the batch before the capture, and copy it into a static tensor."
    )


class ControlFlowError(HeadraceError, RuntimeError):
    """User code raised an exception that Python treats as control flow and that would have ended the epoch silently.

    The original is its `__cause__`.
    """

    _text = (
        "user code raised {error!r}, which Python takes as a signal to stop; it is reported as an error so that no "
        "batch goes missing. Catch it where it is raised, or raise an ordinary exception."
    )


class RemoteError(HeadraceError, RuntimeError):
    """An exception of a worker process that could not be pickled; its type and traceback are text.

    Attributes:
        type_name: the qualified name of the exception's class in the worker.
    """

    type_name: str | None = None

    _text = "{type_name}: {message} (this exception could not be pickled, only its text was)"


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

    @classmethod
    def of(
        cls,
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
    ) -> WorkerDiedError:
        """The error for a worker that `how` says has ended, or cannot be started because of an `obstacle`."""
        if doing is not None:
            remedy = "Call the function that map or filter was given in this process to see the crash"
        elif batch is None:
            doing = "while starting"
            remedy = "Call worker_init_fn, and import what the transform needs, in this process to see the crash"
        else:
            doing = f"on batch {batch}, indices {shorten_list(indices, len(indices))}"
            remedy = "Run the transform and collate_fn over these indices with num_workers=0 to see the crash"
        torchs = f"DataLoader worker (pid(s) {pid}) exited unexpectedly"  # which people and tools look for
        if exit_code is not None and exit_code < 0:
            torchs = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-exit_code)}"
        message = (
            f"worker {worker} (pid {pid}) {how} {doing}, attempt {attempts}. {remedy}; if it was killed, look for the "
            f"out-of-memory killer in the kernel's log. In torch's words: {torchs}."
        )
        if obstacle is not None:
            ended = "" if pid is None else f" (pid {pid}) {how}, and"
            reason = getattr(obstacle, "strerror", None) or f"{type(obstacle).__name__}: {obstacle}"
            message = f"worker {worker}{ended} cannot be started: {reason}"
        return cls(message, worker=worker, exit_code=exit_code, batch=batch, indices=indices)


class EngineDiedError(HeadraceError, RuntimeError):
    """The event loop that fetches ended while a consumer waited. The `__cause__` is the reason, where known."""

    _text = "the loader's event loop has ended: {why}. Start a new iteration to go on."


class EngineStartError(HeadraceError, RuntimeError):
    """Too few engines of a cluster have started in time."""

    _text = (
        "{running} of {engines} engines run {seconds:g} seconds after they were asked for, and an epoch begins with "
        "{least}: {shortage}. Ask for fewer or smaller engines, begin with fewer (min_engines), wait longer "
        "(start_timeout), or make room."
    )


class LoaderClosedError(HeadraceError, RuntimeError):
    """A batch was requested from an iterator that was closed, or whose loader was closed."""

    _text = "this iterator is closed: its loader was closed while it was in use. Call iter() again."


class LoaderTimeoutError(HeadraceError, RuntimeError):
    """No batch was ready within the loader's `timeout`; the next call of `next()` waits for the same batch again.

    Attributes:
        batch: number of the awaited batch; with `in_order=False`, of the first in progress.
    """

    batch: int | None = None

    _text = "DataLoader timed out after {seconds} seconds ({waiting_for})"


class DeadlockError(HeadraceError, RuntimeError):
    """A blocking call on the thread that has to serve it."""

    _text = (
        "{what} was called on the event-loop thread that has to do the work; it would wait for itself for ever. "
        "Use the async method there (`await dataset.aget(i)`, `async for`)."
    )


class ForkedError(HeadraceError, RuntimeError):
    """A loop, store or loader made before `os.fork` was used in the child, where its threads do not exist."""

    _text = (
        "{what} was first used in process {made_in} and is now used in {used_in}, a fork of it, where its threads do "
        "not exist: it would hang. Start worker processes with multiprocessing_context='spawn' or 'forkserver', or "
        "use headrace.DataLoader, which fetches in one process."
    )


class UnknownRankError(HeadraceError, RuntimeError):
    """There are several ranks, and this process's rank is unknown: every rank would read the part of rank 0."""

    _text = "the rank of this process is not known: {why}. {remedy}"

    def __init__(
        self,
        *args: object,
        why: str = "",
        remedy: str = "Set RANK and WORLD_SIZE, as torchrun does, or call torch.distributed.init_process_group() "
        "before the loader is iterated over",
    ) -> None:
        super().__init__(*args, why=why, remedy=remedy)


class CoordinationError(HeadraceError, RuntimeError):
    """The ranks of a loader with `coordinated=True` cannot agree on the number of steps; the epoch is over.

    Attributes:
        ranks: the data-parallel ranks that failed or did not answer; None if not known.
    """

    ranks: tuple[int, ...] | None = None


class LostBatchError(HeadraceError, RuntimeError):
    """The epoch ended while planned batches were neither delivered nor reported."""

    _text = (
        "{planned} batches were planned but {accounted} were delivered or reported: this is a bug in headrace, please "
        "report it with a script that shows it"
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

    def __init__(
        self,
        reason: str,
        *,
        skipped: int | None = None,
        delivered: int | None = None,
        examples: tuple[str, ...] | None = None,
    ) -> None:
        if examples is not None:
            reason = (
                f"{reason}; {skipped:,} samples of this epoch were skipped and {delivered:,} delivered. "
                f"Last failures: {'; '.join(examples)}. More are in loader.stats().skipped; "
                f'on_error="raise" raises the first one.'
            )
        super().__init__(reason, skipped=skipped, delivered=delivered, examples=examples)


class MissingExtraError(HeadraceError, ImportError):
    """An optional package that is needed is not installed."""

    _text = "{what} needs {package}, which is not installed: pip install 'headrace[{extra}]'"


class CacheFolderError(HeadraceError, PermissionError):
    """The folder of a disk cache could contain files that another user has put there."""

    _text = (
        "{folder} cannot hold a cache: {reason}, so that its files could be anything. Name a folder that does not "
        "exist yet, or one of your own that only you can write to (chmod 700)."
    )


class ShortStreamError(HeadraceError, ValueError):
    """A stream ended before the declared number of samples, so that other ranks wait for more."""

    _text = (
        "the stream gave {given} samples in this process and {declared} were declared, so that this rank has fewer "
        "batches than the others. {remedy}"
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

    def __init__(
        self, what: str, *, shard: str | None = None, member: str | None = None, offset: int | None = None
    ) -> None:
        where = [] if shard is None else [f"shard {shard}"]
        if member is not None:
            where.append(f"member {member!r}")
        if offset is not None:
            where.append(f"offset {offset}")
        message = f"{what} ({', '.join(where)})" if where else what
        super().__init__(message, shard=shard, member=member, offset=offset)


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
        url: str | None = None,
        key: str | None = None,
        index: object = None,
        attempts: int | None = None,
        elapsed: float | None = None,
        status: int | None = None,
    ) -> None:
        if url is not None:
            attempts = attempts or 1
            tried = "" if attempts == 1 and elapsed is None else f"; {_counted(attempts, elapsed)}"
            message = f"{message}{tried} ({url})"
        super().__init__(message, url=url, key=key, index=index, attempts=attempts, elapsed=elapsed, status=status)


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


__all__ = sorted(name for name, each in globals().items() if isinstance(each, type) and issubclass(each, HeadraceError))
