"""Every exception that headrace raises.

Each class also subclasses the builtin a user would catch. Errors of user code are *not* wrapped in
any of these: they keep their type, and have notes with the stage, batch, index, key and worker
(`headrace.types.Failure`).
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar

from headrace._core.text import add_note

HELP = "headrace: causes and what to do: python -m pydoc"
"""How the note begins that each error has of its entry in docs/reference/errors.md, which is made of the docstrings."""


class HeadraceError(Exception):
    """The base class: `except headrace.HeadraceError` catches every error that headrace itself raises.

    Each class can also be constructed from a message alone, as torch does to raise an error of a
    worker process again. Its attributes are None then.

    Attributes:
        lost_samples: samples of the rest of a shard that a stream cannot read on, estimated if they
            were not counted, 0 if there is no estimate; None of other errors.
    """

    lost_samples: int | None = None
    _text: ClassVar[str] = ""  # the message, with the names of its fields

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*(args or (self._text.format(**fields),)))
        self.__dict__.update(
            {name: value for name, value in fields.items() if hasattr(type(self), name)}
        )
        entry = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__)
        add_note(self, f"{HELP} {__name__}.{entry}")

    def __reduce__(self) -> tuple[object, ...]:
        # Constructors compose messages from keyword fields; a copy keeps the composed message.
        return copyreg.__newobj__, (type(self),), {**self.__dict__, "args": self.args}  # type: ignore[attr-defined]


class DatasetTypeError(HeadraceError, TypeError):
    """The dataset has none of the methods that a loader fetches with.

    Likely causes: a class in place of its instance (`Data` for `Data()`), a misspelt method, a
    function or a path. What to do: define one of the methods, or wrap an async generator with
    `headrace.from_async_iterable`; open clients by `headrace.per_loop` in place of `__aenter__`.
    """

    _text = (
        "{dataset.__class__.__name__!r} object is not a dataset: it has neither `aget` (async, by index), "
        "`__getitem__` (by index), `__aiter__` (async stream) nor `__iter__` (stream). Define one of them; map-style "
        "datasets also need `__len__` unless a sampler is given."
    )


class NotPicklableError(HeadraceError, TypeError):
    """A dataset, a function for the workers, or a value that a worker returned, cannot be pickled.

    Likely causes: it holds a lock, an open file, a client or a database connection; the text has
    the path to it. What to do: open it where it is used (`headrace.per_loop`, a first call), or use
    ``num_workers=0``.

    Attributes:
        what: the argument or value, e.g. ``"transform=<function decode>"``.
        reason: the pickling error's message.
    """

    what: str | None = None
    reason: str | None = None

    _text = "{what} cannot be pickled: {reason}. {remedy}"


class DeviceUnavailableError(HeadraceError, RuntimeError):
    """The device that batches should be copied to does not exist or cannot be used.

    Likely causes: a wrong number, CUDA_VISIBLE_DEVICES, a build of torch without CUDA, no memory
    left on the device. What to do: look at ``torch.cuda.device_count()``; ``device="auto"`` takes
    what is there.
    """

    _text = (
        "device={device!r} cannot be used: {reason}. Batches stay in host memory with device=None; "
        'device="auto" takes the accelerator that is there, and none where there is none.'
    )


class CudaGraphError(HeadraceError, RuntimeError):
    """A batch was requested while the current stream was being captured into a CUDA graph.

    Likely causes: `next()` within ``torch.cuda.graph(...)``.
    What to do: fetch the batch before the capture, and copy it into a tensor that the graph reads.
    """

    _text = (
        "next() of a loader with device= was called while a CUDA graph is being captured: the graph would replay "
        "this one batch's copy for ever. Fetch the batch before the capture, and copy it into a static tensor."
    )


class ControlFlowError(HeadraceError, RuntimeError):
    """User code raised an exception that Python treats as control flow and that would have ended the epoch silently.

    The original is its `__cause__`.
    Likely causes: `next()` of an iterator at its end (StopIteration), `sys.exit`, a task that was
    cancelled. What to do: catch it where it is raised, or raise an ordinary exception.
    """

    _text = (
        "user code raised {error!r}, which Python takes as a signal to stop; it is reported as an error so that no "
        "batch goes missing. Catch it where it is raised, or raise an ordinary exception."
    )


class RemoteError(HeadraceError, RuntimeError):
    """An exception of a worker process that could not be pickled; its type and traceback are text.

    Likely causes: its class, or what it holds, exists only in the worker.
    What to do: treat it as the exception that it names; to catch that by its type, define its class
    in a module.

    Attributes:
        type_name: the qualified name of the exception's class in the worker.
    """

    type_name: str | None = None

    _text = "{type_name}: {message} (this exception could not be pickled, only its text was)"


class WorkerDiedError(HeadraceError, RuntimeError):
    """A worker process ended without an answer, on the last attempt.

    Likely causes: no memory left (SIGKILL), a crash of a native library (SIGSEGV), `os._exit`, an
    import. What to do: run the named indices with ``num_workers=0``; look for the out-of-memory
    killer in `dmesg`.

    Attributes:
        worker: the worker's number.
        exit_code: its exit code; the negative number of a signal; None if unknown.
        batch: number of the batch it had; None if it died idle or while starting, or cannot be
            started.
        indices: the sampler's indices of that batch.
    """

    worker: int | None = None
    exit_code: int | None = None
    batch: int | None = None
    indices: tuple[object, ...] | None = None


class EngineDiedError(HeadraceError, RuntimeError):
    """The event loop that fetches ended while a consumer waited. The `__cause__` is the reason, where known.

    Likely causes: the loader's process was killed, mostly for want of memory, or crashed in a
    native library. What to do: limit `memory_budget`, and look for the out-of-memory killer in
    `dmesg`; a new `iter()` starts another.
    """

    _text = "the loader's event loop has ended: {why}. Start a new iteration to go on."


class EngineStartError(HeadraceError, RuntimeError):
    """Too few engines of a cluster have started in time.

    Likely causes: the cluster has fewer free CPUs or less memory than the engines ask for, or its
    nodes still start. What to do: see ``ray status``; ask for fewer or smaller engines, or raise
    `start_timeout` or lower `min_engines`.
    """

    _text = (
        "{running} of {engines} engines run {seconds:g} seconds after they were asked for, and an epoch begins with "
        "{least}: {shortage}. Ask for fewer or smaller engines, begin with fewer (min_engines), wait longer "
        "(start_timeout), or make room."
    )


class LoaderClosedError(HeadraceError, RuntimeError):
    """A batch was requested from an iterator that was closed, or whose loader was closed.

    Likely causes: `next()` after the loader's `with` block or its `close()`.
    What to do: call `iter()` again, or close the loader later.
    """

    _text = "this iterator is closed: its loader was closed while it was in use. Call iter() again."


class LoaderTimeoutError(HeadraceError, RuntimeError):
    """No batch was ready within the loader's `timeout`; the next call of `next()` waits for the same batch again.

    Likely causes: a store that hangs, or a transform that takes longer than `timeout`.
    What to do: print ``loader.report()``, which names what limits; raise `timeout`, or lower that
    of the store.

    Attributes:
        batch: number of the awaited batch; with `in_order=False`, of the first in progress.
    """

    batch: int | None = None

    _text = "DataLoader timed out after {seconds} seconds ({waiting_for})"


class DeadlockError(HeadraceError, RuntimeError):
    """A blocking call on the thread that has to serve it.

    Likely causes: ``dataset[i]``, or a `for` over a loader or a stream, in `aget` or another
    coroutine of the loader. What to do: use the async method there: ``await dataset.aget(i)``,
    `async for`.
    """

    _text = (
        "{what} was called on the event-loop thread that has to do the work; it would wait for itself for ever. "
        "Use the async method there (`await dataset.aget(i)`, `async for`)."
    )


class ForkedError(HeadraceError, RuntimeError):
    """A loop, store or loader made before `os.fork` was used in the child, where its threads do not exist.

    Likely causes: torch's loader with forked workers over a dataset that was used before; `os.fork`
    in a library. What to do: pass ``multiprocessing_context="spawn"``, use `headrace.DataLoader`,
    or make the dataset in the child.
    """

    _text = (
        "{what} was first used in process {made_in} and is now used in {used_in}, a fork of it, where its threads do "
        "not exist: it would hang. Start worker processes with multiprocessing_context='spawn' or 'forkserver', or "
        "use headrace.DataLoader, which fetches in one process."
    )


class UnknownRankError(HeadraceError, RuntimeError):
    """There are several ranks, and this process's rank is unknown: every rank would read the part of rank 0.

    Likely causes: WORLD_SIZE is set without RANK; the process group is made after the loader is
    iterated over. What to do: start it by `torchrun` or `srun`, call ``init_process_group()``
    before, or pass `data_parallel`.
    """

    _text = (
        "the rank of this process is not known: {why}. Set RANK and WORLD_SIZE, as torchrun does, or call "
        "torch.distributed.init_process_group() before the loader is iterated over"
    )


class CoordinationError(HeadraceError, RuntimeError):
    """The ranks of a loader with `coordinated=True` cannot agree on the number of steps; the epoch is over.

    Likely causes: another rank has failed, was killed, or hangs; or it has left the epoch before
    its end. What to do: read the error of that rank, which is the cause; restart from the last
    checkpoint.

    Attributes:
        ranks: the data-parallel ranks that failed or did not answer; None if not known.
    """

    ranks: tuple[int, ...] | None = None


class LostBatchError(HeadraceError, RuntimeError):
    """The epoch ended while planned batches were neither delivered nor reported.

    Likely causes: a bug in headrace.
    What to do: report it with a script that shows it; the state from before the epoch is good.
    """

    _text = (
        "{planned} batches were planned but {accounted} were delivered or reported: this is a bug in headrace, please "
        "report it with a script that shows it"
    )


class TooManySkippedError(HeadraceError, RuntimeError):
    """More samples failed than `on_error` allows, or so many that nothing could be delivered.

    The last error that was skipped is its `__cause__`.
    Likely causes: a fault of all samples (credentials, a transform), not of some.
    What to do: read the failures in the text; if so many may fail, raise `max_share` or
    `max_in_a_row` of `SkipErrors`.

    Attributes:
        skipped: samples of the epoch skipped so far.
        delivered: samples of the epoch delivered so far.
        examples: the last failures, as text.
    """

    skipped: int | None = None
    delivered: int | None = None
    examples: tuple[str, ...] | None = None

    _text = (
        "{reason}; {skipped:,} samples of this epoch were skipped and {delivered:,} delivered. Last failures: "
        '{failures}. More are in loader.stats().skipped; on_error="raise" raises the first one.'
    )


class MissingExtraError(HeadraceError, ImportError):
    """An optional package that is needed is not installed.

    What to do: run the command in the text, in the environment of this Python.
    """

    _text = "{what} needs {package}, which is not installed: pip install 'headrace[{extra}]'"


class CacheFolderError(HeadraceError, PermissionError):
    """The folder of a disk cache could contain files that another user has put there.

    Likely causes: a folder in `/tmp`, or one that is shared by a group or belongs to another user.
    What to do: name a new folder, or one that only you can write to.
    """

    _text = (
        "{folder} cannot hold a cache: {reason}, so that its files could be anything. Name a folder that does not "
        "exist yet, or one of your own that only you can write to (chmod 700)."
    )


class StateError(HeadraceError, ValueError):
    """A saved state is damaged, or was saved by another loader, dataset or sampler; nothing was restored.

    Likely causes: `batch_size`, `seed`, the data or the number of shards have changed, or the file
    is of another job. What to do: make the loader as it was when the state was saved; the text says
    what differs. Or begin the epoch anew.
    """


# Errors of stores and shards.


class ShardError(HeadraceError, ValueError):
    """A shard is damaged or malformed. Samples before the damage have been delivered.

    Likely causes: a file that is no shard or has another compression than its name says, or damage
    in storage. What to do: test the shard (``tar -tf``, ``zstd -t``) and upload it again;
    ``on_error="skip"`` leaves out its rest.

    Attributes:
        shard: the shard's URL, without secrets.
        member: name of the damaged file in a tar, or of the last file before the damage; None if
            there is none.
        offset: position in the shard, in bytes; of a compressed one, in its decompressed bytes;
            None if unknown.
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
        where = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        super().__init__(
            f"{what} ({where})" if where else what, shard=shard, member=member, offset=offset
        )


class TruncatedShardError(ShardError, EOFError):
    """A shard ends too early.

    Likely causes: an upload or a download was interrupted, or the shard is still being written.
    What to do: compare its size with the original's, and upload it again.
    """


class UnsafeMemberError(ShardError):
    """A tar has a member whose path leads out of it, or that is a link or a device.

    Likely causes: an archive of a file system, or one that is meant to do harm.
    What to do: write the shard again with plain files, and do not unpack this one.
    """


class StoreError(HeadraceError, OSError):
    """A request to an object store failed.

    Likely causes: credentials, endpoint or region; or a store that failed on every attempt. The
    text has its answer. What to do: try the URL with the store's own tool on this machine; for a
    slow store raise `retry` and `timeout`.

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
        self, message: str, *, url: str | None = None, elapsed: float | None = None, **fields: Any
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
    """An object that was listed or requested by key, or its bucket, does not exist.

    Likely causes: a misspelt bucket or key, another endpoint or account, or an object deleted since
    the listing. What to do: list the bucket with the store's own tool; make the dataset again.
    ``on_error="skip"`` leaves it out.
    """


class EmptyListingError(StoreError, FileNotFoundError):
    """A listing has no matching object.

    Likely causes: a URL that is not a directory, another `suffix` or glob, or a web server that
    cannot list. What to do: name the directory above; or name the objects with ``keys=[...]``.
    """


class StoreUnreachableError(StoreError, ConnectionError):
    """No response from the store within the time-out.

    Likely causes: a wrong endpoint or region, no network or proxy, a firewall, or a store that is
    overloaded. What to do: request the URL in the text with `curl` on this machine; raise
    `timeout`, or lower `concurrency`.
    """


class ObjectChangedError(StoreError):
    """An object was overwritten after it was listed.

    Likely causes: another job writes to the data, or a cache between gives old answers.
    What to do: make the dataset again. ``Store(url, if_match=False)`` reads whatever version there
    is.
    """


class ChecksumError(StoreError):
    """The received bytes did not match the checksum or the length, on every attempt.

    Likely causes: the object is damaged, its checksum in the table is of another version, or a
    proxy changes it. What to do: compare the checksum of the object with the table's, and upload it
    again.
    """


__all__ = sorted(
    name
    for name, each in globals().items()
    if isinstance(each, type) and issubclass(each, HeadraceError)
)
