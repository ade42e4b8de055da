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

from headrace.errors.base import HeadraceError
from headrace.errors.data import (
    ChecksumError,
    EmptyListingError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShardError,
    StoreError,
    StoreUnreachableError,
    TruncatedShardError,
    UnsafeMemberError,
)
from headrace.errors.loading import (
    CacheFolderError,
    ControlFlowError,
    CoordinationError,
    CudaGraphError,
    DatasetTypeError,
    DeadlockError,
    DeviceUnavailableError,
    EngineDiedError,
    EngineStartError,
    ForkedError,
    LoaderClosedError,
    LoaderTimeoutError,
    LostBatchError,
    MissingExtraError,
    NotPicklableError,
    RemoteError,
    ShortStreamError,
    StateError,
    TooManySkippedError,
    UnknownRankError,
    WorkerDiedError,
)

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

for _name in __all__:
    globals()[_name].__module__ = __name__  # in tracebacks and pickles
