"""Exceptions of headrace.

Each class also subclasses the matching builtin exception. Errors of user code are *not* wrapped:
an error of user code keeps its type, and has notes with the stage, batch, index, key and worker
(see `headrace.types.Failure`).
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar

from headrace._base.text import add_note

HELP = "headrace: causes and what to do: python -m pydoc"
"""Beginning of the note on each error.

The note names the command that prints the docstring of the error's class. docs/reference/errors.md
shows the same docstrings.
"""


class HeadraceError(Exception):
    """Base class of all exceptions of headrace.

    Each class also accepts a message alone, with all attributes None. Torch constructs exceptions
    in this way to raise an error of a worker process again.

    Attributes:
        lost_samples: number of samples in the rest of a shard, if a stream cannot continue to read
            the shard: exact, or estimated, or 0 without an estimate. None for other errors.
    """

    lost_samples: int | None = None
    _text: ClassVar[str] = ""  # template of the message

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*(args or (self._text.format(**fields),)))
        self.__dict__.update(
            {name: value for name, value in fields.items() if hasattr(type(self), name)}
        )
        entry = next(
            cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__
        )
        add_note(self, f"{HELP} {__name__}.{entry}")

    def __reduce__(self) -> tuple[object, ...]:
        # Constructors compose messages from keyword fields. A copy keeps the composed message.
        state = {**self.__dict__, "args": self.args}
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]


class DatasetTypeError(HeadraceError, TypeError):
    """The dataset has no method to fetch samples with.

    Likely causes: a class in place of an instance (`Data` for `Data()`), a misspelt method, a
    function or a path.

    What to do: define `aget`, `__getitem__`, `__aiter__` or `__iter__`, or wrap an async generator
    with `headrace.from_async_iterable`. Open clients with `headrace.per_loop` in place of
    `__aenter__`.
    """

    _text = (
        "{dataset.__class__.__name__!r} object is not a dataset: it has neither "
        "`aget` (async, by index), `__getitem__` (by index), `__aiter__` (async stream) nor "
        "`__iter__` (stream). Define one of them; map-style datasets also need `__len__` unless "
        "a sampler is given."
    )


class NotPicklableError(HeadraceError, TypeError):
    """A dataset, function or worker result cannot be pickled.

    Likely causes: the object holds a lock, an open file, a client or a database connection. The
    message has the attribute path to the resource.

    What to do: open the resource where it is used (with `headrace.per_loop`, or in the first call),
    or use ``num_workers=0``.

    Attributes:
        what: the argument or value, e.g. ``"transform=<function decode>"``.
        reason: message of the pickling error.
    """

    what: str | None = None
    reason: str | None = None

    _text = "{what} cannot be pickled: {reason}. {remedy}"


class DeviceUnavailableError(HeadraceError, RuntimeError):
    """The device for batches is missing or cannot be used.

    Likely causes: a wrong number, CUDA_VISIBLE_DEVICES, a build of torch without CUDA, no memory
    left on the device.

    What to do: look at ``torch.cuda.device_count()``. ``device="auto"`` uses the accelerator if
    present.
    """

    _text = (
        "device={device!r} cannot be used: {reason}. Batches stay in host memory with device=None; "
        'device="auto" takes the accelerator that is there, and none where there is none.'
    )


class CudaGraphError(HeadraceError, RuntimeError):
    """A batch was requested while capturing a CUDA graph.

    Likely causes: `next()` within ``torch.cuda.graph(...)``.

    What to do: fetch the batch before the capture. Copy the batch into a tensor for the graph to
    read.
    """

    _text = (
        "next() of a loader with device= was called while a CUDA graph is being captured: "
        "the graph would replay this one batch's copy for ever. Fetch the batch before the "
        "capture, and copy it into a static tensor."
    )


class ControlFlowError(HeadraceError, RuntimeError):
    """User code raised a control-flow exception, such as StopIteration.

    The exception would have ended the epoch silently. The `__cause__` is the exception of user
    code.

    Likely causes: `next()` of an exhausted iterator (StopIteration), `sys.exit`, a cancelled task.

    What to do: catch the exception in user code, or raise an ordinary exception.
    """

    _text = (
        "user code raised {error!r}, which Python takes as a signal to stop; it is reported as "
        "an error so that no batch goes missing. Catch it where it is raised, or raise an "
        "ordinary exception."
    )


class RemoteError(HeadraceError, RuntimeError):
    """An exception of a worker process cannot be pickled.

    The message has the type and the text of the exception.

    Likely causes: the exception's class, or an attribute's value, exists only in the worker.

    What to do: treat the error as the exception that the message names. To catch the exception by
    type, define the class in a module.

    Attributes:
        type_name: qualified name of the exception's class in the worker.
    """

    type_name: str | None = None

    _text = (
        "{type_name}: {message} (this exception could not be pickled, only its text was)"
    )


class WorkerDiedError(HeadraceError, RuntimeError):
    """A worker process died, on the last attempt.

    Likely causes: no memory left (SIGKILL), a crash of a native library (SIGSEGV), `os._exit`, an
    import.

    What to do: run the named indices with ``num_workers=0``. Look for the out-of-memory killer in
    `dmesg`.

    Attributes:
        worker: number of the worker.
        exit_code: exit code of the worker, or the negative number of a signal; None if unknown.
        batch: number of the worker's batch. None if the worker died idle or while starting, or
            cannot be started.
        indices: the sampler's indices of the batch.
    """

    worker: int | None = None
    exit_code: int | None = None
    batch: int | None = None
    indices: tuple[object, ...] | None = None


class EngineDiedError(HeadraceError, RuntimeError):
    """The fetching event loop ended while a consumer waited.

    The `__cause__` is the reason, if known.

    Likely causes: the kernel killed the loader's process, mostly for lack of memory, or the process
    crashed in a native library.

    What to do: lower `memory_budget`, and look for the out-of-memory killer in `dmesg`. A new
    `iter()` starts another event loop.
    """

    _text = "the loader's event loop has ended: {why}. Start a new iteration to go on."


class EngineStartError(HeadraceError, RuntimeError):
    """Too few engines on a cluster started in time.

    Likely causes: the cluster has fewer free CPUs or less memory than the engines need, or nodes
    are still starting.

    What to do: see ``ray status``. Ask for fewer or smaller engines, raise `start_timeout`, or
    lower `min_engines`.
    """

    _text = (
        "{running} of {engines} engines run {seconds:g} seconds after they were asked for, "
        "and an epoch begins with {least}: {shortage}. Ask for fewer or smaller engines, "
        "begin with fewer (min_engines), wait longer (start_timeout), or make room."
    )


class LoaderClosedError(HeadraceError, RuntimeError):
    """A batch was requested from a closed iterator.

    Closing the loader closes all iterators of the loader.

    Likely causes: `next()` after the loader's `with` block, or after `close()`.

    What to do: call `iter()` again, or close the loader later.
    """

    _text = "this iterator is closed: its loader was closed while it was in use. Call iter() again."


class LoaderTimeoutError(HeadraceError, RuntimeError):
    """No batch was ready within the loader's `timeout`.

    The following call of `next()` waits for the same batch again.

    Likely causes: a store does not answer, or a transform takes longer than `timeout`.

    What to do: print ``loader.report()``; the report names the limit of the loader. Raise
    `timeout`, or lower the time-out of the store.

    Attributes:
        batch: number of the awaited batch. With `in_order=False`, number of the first batch in
            progress.
    """

    batch: int | None = None

    _text = "DataLoader timed out after {seconds} seconds ({waiting_for})"


class DeadlockError(HeadraceError, RuntimeError):
    """A blocking call would wait for its own event-loop thread.

    Likely causes: ``dataset[i]``, or a `for` over a loader or a stream, in `aget` or another
    coroutine of the loader.

    What to do: use the async method in coroutines: ``await dataset.aget(i)``, `async for`.
    """

    _text = (
        "{what} was called on the event-loop thread that has to do the work; "
        "it would wait for itself for ever. "
        "Use the async method there (`await dataset.aget(i)`, `async for`)."
    )


class ForkedError(HeadraceError, RuntimeError):
    """A forked child used an object of the parent process.

    The object is a loop, store or loader. The threads of the object do not exist in the child.

    Likely causes: torch's loader forks workers after the dataset was used, or a library calls
    `os.fork`.

    What to do: pass ``multiprocessing_context="spawn"``, use `headrace.DataLoader`, or make the
    dataset in the child.
    """

    _text = (
        "{what} was first used in process {made_in} and is now used in {used_in}, a fork of it, "
        "where its threads do not exist: it would hang. Start worker processes with "
        "multiprocessing_context='spawn' or 'forkserver', or use headrace.DataLoader, which "
        "fetches in one process."
    )


class UnknownRankError(HeadraceError, RuntimeError):
    """The rank of this process is unknown.

    There are several ranks. Without the error, every rank would read the samples of rank 0.

    Likely causes: WORLD_SIZE is set without RANK, or the process group is created after the
    iteration over the loader begins.

    What to do: start the program with `torchrun` or `srun`, call ``init_process_group()`` earlier,
    or pass `data_parallel`.
    """

    _text = (
        "the rank of this process is not known: {why}. Set RANK and WORLD_SIZE, as torchrun does, "
        "or call torch.distributed.init_process_group() before the loader is iterated over"
    )


class CoordinationError(HeadraceError, RuntimeError):
    """The ranks cannot agree on the number of steps.

    The error occurs with `coordinated=True`, and ends the epoch.

    Likely causes: another rank failed, was killed, hangs, or left the loop before the end of the
    epoch.

    What to do: read the error of the other rank, and restart from the last checkpoint.

    Attributes:
        ranks: data-parallel ranks without an answer, or with an error; None if unknown.
    """

    ranks: tuple[int, ...] | None = None


class LostBatchError(HeadraceError, RuntimeError):
    """Planned batches were neither delivered nor reported.

    The loader counts batches at the end of an epoch.

    Likely causes: a bug in headrace.

    What to do: report the bug with a script to reproduce the error. The state from before the
    epoch is valid.
    """

    _text = (
        "{planned} batches were planned but {accounted} were delivered or reported: "
        "this is a bug in headrace, please report it with a script that shows it"
    )


class TooManySkippedError(HeadraceError, RuntimeError):
    """More samples failed than `on_error` allows.

    The error is also raised if so many samples failed that nothing could be delivered. The
    `__cause__` is the last skipped error.

    Likely causes: a fault of all samples (credentials, a transform), not of single samples.

    What to do: read the failures in the message. If so many failures are acceptable, raise
    `max_share` or `max_in_a_row` of `SkipErrors`.

    Attributes:
        skipped: number of samples of the epoch skipped so far.
        delivered: number of samples of the epoch delivered so far.
        examples: the last failures, as text.
    """

    skipped: int | None = None
    delivered: int | None = None
    examples: tuple[str, ...] | None = None

    _text = (
        "{reason}; {skipped:,} samples of this epoch were skipped and {delivered:,} delivered. "
        "Last failures: {failures}. More are in loader.stats().skipped; "
        'on_error="raise" raises the first one.'
    )


class MissingExtraError(HeadraceError, ImportError):
    """An optional package is not installed.

    What to do: run the command in the message, in the environment of this Python.
    """

    _text = (
        "{what} needs {package}, which is not installed: pip install 'headrace[{extra}]'"
    )


class CacheFolderError(HeadraceError, PermissionError):
    """The folder of a disk cache is open to others.

    The folder could contain files of another user.

    Likely causes: a folder in `/tmp`, a folder shared by a group, or a folder of another user.

    What to do: name a new folder, or a private folder (``chmod 700``).
    """

    _text = (
        "{folder} cannot hold a cache: {reason}, so that its files could be anything. "
        "Name a folder that does not exist yet, or one of your own that only you can write to "
        "(chmod 700)."
    )


class StateError(HeadraceError, ValueError):
    """A saved state is damaged, or is of another loader.

    Nothing was restored.

    Likely causes: `batch_size`, `seed`, the data or the number of shards changed, or the file
    belongs to another job.

    What to do: make the loader as before the state was saved (the message names the differences),
    or begin the epoch anew.
    """


# Errors of stores and shards.


class ShardError(HeadraceError, ValueError):
    """A shard is damaged or malformed.

    Samples before the damage have been delivered.

    Likely causes: the file is no shard, the compression differs from the file name, or storage
    damaged the file.

    What to do: test the shard (``tar -tf``, ``zstd -t``) and upload the shard again.
    ``on_error="skip"`` leaves out the rest of the shard.

    Attributes:
        shard: URL of the shard, without secrets.
        member: name of the damaged file in a tar, or of the last file before the damage; None
            without a file name.
        offset: position in the shard, in bytes. In a compressed shard, position in the decompressed
            bytes. None if unknown.
    """

    shard: str | None = None
    member: str | None = None
    offset: int | None = None

    def __init__(
        self,
        what: str,
        *,
        shard: str | None = None,
        member: str | None = None,
        offset: int | None = None,
    ) -> None:
        named = {
            "shard": shard,
            "member": None if member is None else repr(member),
            "offset": offset,
        }
        where = ", ".join(
            f"{name} {value}" for name, value in named.items() if value is not None
        )
        super().__init__(
            f"{what} ({where})" if where else what,
            shard=shard,
            member=member,
            offset=offset,
        )


class TruncatedShardError(ShardError, EOFError):
    """A shard ends too early.

    Likely causes: an upload or a download was interrupted, or the shard is still being written.

    What to do: compare the size of the shard with the size of the original, and upload the shard
    again.
    """


class UnsafeMemberError(ShardError):
    """A tar has an unsafe member.

    An unsafe member is a link, a device, or has a path out of the folder of the archive.

    Likely causes: an archive of a file system, or a malicious archive.

    What to do: write the shard again with plain files. Do not unpack the old shard.
    """


class StoreError(HeadraceError, OSError):
    """A request to an object store failed.

    Likely causes: credentials, endpoint or region, or a store that failed on every attempt. The
    message has the answer of the store.

    What to do: try the URL with the store's own tool on this machine. For a slow store, raise
    `retry` and `timeout`.

    Attributes:
        url: URL of the request, without user names, passwords and query strings.
        key: key of the object, relative to `url`; None if the request was not for a single object.
        index: index of the sample; None if the request was not for a sample.
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
        elapsed: float | None = None,
        **fields: Any,
    ) -> None:
        if url is not None:
            attempts = fields.setdefault("attempts", 1)
            tried = (
                ""
                if elapsed is None
                else f"; {attempts} attempt{'s'[: attempts > 1]} in {elapsed:.2f} s"
            )
            message = f"{message}{tried} ({url})"
        super().__init__(message, url=url, elapsed=elapsed, **fields)


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """An object or bucket does not exist.

    Likely causes: a misspelt bucket or key, another endpoint or account, or an object deleted since
    the listing.

    What to do: list the bucket with the store's own tool, and make the dataset again.
    ``on_error="skip"`` leaves out the sample.
    """


class EmptyListingError(StoreError, FileNotFoundError):
    """A listing has no matching object.

    Likely causes: the URL is not a directory, no object matches `suffix` or the glob, or the web
    server cannot list.

    What to do: name the directory above, or name the objects with ``keys=[...]``.
    """


class StoreUnreachableError(StoreError, ConnectionError):
    """No response from the store within the time-out.

    Likely causes: a wrong endpoint or region, no network or proxy, a firewall, or an overloaded
    store.

    What to do: request the URL in the message with `curl` on this machine. Raise `timeout`, or
    lower `concurrency`.
    """


class ObjectChangedError(StoreError):
    """An object was overwritten after the listing.

    Likely causes: another job writes to the data, or a cache in between gives old answers.

    What to do: make the dataset again. ``Store(url, if_match=False)`` reads any version.
    """


class ChecksumError(StoreError):
    """The received bytes do not match checksum or length.

    All attempts received wrong bytes.

    Likely causes: the object is damaged, the checksum in the table belongs to another version, or a
    proxy changes the object.

    What to do: compare the checksum of the object with the checksum in the table, and upload the
    object again.
    """


__all__ = sorted(
    name
    for name, each in globals().items()
    if isinstance(each, type) and issubclass(each, HeadraceError)
)
