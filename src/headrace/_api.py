"""The public names of `headrace` and the modules that they come from; each is imported on first use."""

from torch.utils.data import get_worker_info

from headrace._core.batches import BatchPlan, RequestCounts
from headrace._core.error_policy import SkipErrors
from headrace._core.eventloop.per_loop import per_loop
from headrace._core.failure import Failure, Stage
from headrace._core.interface.iterable_style import AsyncIterableDataset
from headrace._core.interface.map_style import AsyncDataset
from headrace._core.interface.ranged import RangedDataset
from headrace._core.pool.settings import worker_setup
from headrace._core.randomized import Randomized, randomized
from headrace._core.rankinfo import RankInfo, get_rank_info
from headrace._core.ray_placement import RayPlacement
from headrace._core.retry_policy import RetryPolicy
from headrace._core.store.ranges import Ranges
from headrace._core.store.request_stats import report_throttled
from headrace._core.store.store import Store
from headrace._version import __version__
from headrace.collate import default_collate, default_convert, pad_sequences
from headrace.datasets.batching import batch_by_tokens
from headrace.datasets.cached import CachedDataset
from headrace.datasets.combine import concat, from_async_iterable, mix, pipe, shuffle, split, take
from headrace.datasets.files import FileDataset, FileSample
from headrace.datasets.lines import LinesDataset
from headrace.datasets.objects import ObjectDataset, ObjectSample
from headrace.datasets.parquet import ParquetDataset, RowGroupDataset
from headrace.datasets.tar import IndexedTarDataset, TarDataset
from headrace.datasets.tokens import TokenDataset
from headrace.errors import (
    CacheFolderError,
    ChecksumError,
    ControlFlowError,
    CoordinationError,
    CudaGraphError,
    DatasetTypeError,
    DeadlockError,
    DeviceUnavailableError,
    EmptyListingError,
    EngineDiedError,
    EngineStartError,
    ForkedError,
    HeadraceError,
    LoaderClosedError,
    LoaderTimeoutError,
    LostBatchError,
    ManifestError,
    MissingExtraError,
    NotPicklableError,
    ObjectChangedError,
    ObjectNotFoundError,
    RemoteError,
    ShardError,
    ShortStreamError,
    StateError,
    StoreError,
    StoreUnreachableError,
    TooManySkippedError,
    TruncatedShardError,
    UnknownRankError,
    UnsafeMemberError,
    WorkerDiedError,
)
from headrace.loader import DataLoader
from headrace.samplers import BlockShuffleSampler, ElasticSampler, Permutation, permutation
from headrace.state import gather_state, merge_states
from headrace.telemetry.counters import LoaderStats, SkipRecord
from headrace.telemetry.headspace import Headspace, headspace
from headrace.telemetry.progress import Progress, progress
from headrace.telemetry.report import Report
from headrace.telemetry.trace import trace

__all__ = [
    "AsyncDataset",
    "AsyncIterableDataset",
    "BatchPlan",
    "BlockShuffleSampler",
    "CacheFolderError",
    "CachedDataset",
    "ChecksumError",
    "ControlFlowError",
    "CoordinationError",
    "CudaGraphError",
    "DataLoader",
    "DatasetTypeError",
    "DeadlockError",
    "DeviceUnavailableError",
    "ElasticSampler",
    "EmptyListingError",
    "EngineDiedError",
    "EngineStartError",
    "Failure",
    "FileDataset",
    "FileSample",
    "ForkedError",
    "HeadraceError",
    "Headspace",
    "IndexedTarDataset",
    "LinesDataset",
    "LoaderClosedError",
    "LoaderStats",
    "LoaderTimeoutError",
    "LostBatchError",
    "ManifestError",
    "MissingExtraError",
    "NotPicklableError",
    "ObjectChangedError",
    "ObjectDataset",
    "ObjectNotFoundError",
    "ObjectSample",
    "ParquetDataset",
    "Permutation",
    "Progress",
    "Randomized",
    "RangedDataset",
    "Ranges",
    "RankInfo",
    "RayPlacement",
    "RemoteError",
    "Report",
    "RequestCounts",
    "RetryPolicy",
    "RowGroupDataset",
    "ShardError",
    "ShortStreamError",
    "SkipErrors",
    "SkipRecord",
    "Stage",
    "StateError",
    "Store",
    "StoreError",
    "StoreUnreachableError",
    "TarDataset",
    "TokenDataset",
    "TooManySkippedError",
    "TruncatedShardError",
    "UnknownRankError",
    "UnsafeMemberError",
    "WorkerDiedError",
    "__version__",
    "batch_by_tokens",
    "concat",
    "default_collate",
    "default_convert",
    "from_async_iterable",
    "gather_state",
    "get_rank_info",
    "get_worker_info",
    "headspace",
    "merge_states",
    "mix",
    "pad_sequences",
    "per_loop",
    "permutation",
    "pipe",
    "progress",
    "randomized",
    "report_throttled",
    "shuffle",
    "split",
    "take",
    "trace",
    "worker_setup",
]
