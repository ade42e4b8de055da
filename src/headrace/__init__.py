"""headrace: an asyncio-native streaming data loader for PyTorch.

>>> import headrace as hr
>>> class Squares(hr.AsyncDataset):
...     def __len__(self): return 4
...     async def aget(self, index): return index * index
>>> [batch.tolist() for batch in hr.DataLoader(Squares(), batch_size=2)]
[[0, 1], [4, 9]]
"""

from torch.utils.data import get_worker_info

from headrace._version import __version__
from headrace.batches import BatchPlan, Failure, ResumePoint
from headrace.collate import default_collate, default_convert, pad_sequences
from headrace.datasets.base import AsyncDataset, AsyncIterableDataset
from headrace.datasets.files import FileDataset, FileSample
from headrace.datasets.objects import ObjectDataset, ObjectSample
from headrace.errors import (
    CaptureError,
    DatasetTypeError,
    DeviceUnavailableError,
    EmptyListingError,
    EngineDiedError,
    ForkedError,
    HeadraceError,
    LoaderClosedError,
    LoaderTimeoutError,
    LostBatchError,
    NotPicklableError,
    ObjectNotFoundError,
    ReentrantError,
    RemoteError,
    StoreError,
    StoreUnreachableError,
    UserStopError,
    WorkerDied,
)
from headrace.loader import DataLoader
from headrace.telemetry.counters import LoaderStats

__all__ = [
    "AsyncDataset",
    "AsyncIterableDataset",
    "BatchPlan",
    "CaptureError",
    "DataLoader",
    "DatasetTypeError",
    "DeviceUnavailableError",
    "EmptyListingError",
    "EngineDiedError",
    "Failure",
    "FileDataset",
    "FileSample",
    "ForkedError",
    "HeadraceError",
    "LoaderClosedError",
    "LoaderStats",
    "LoaderTimeoutError",
    "LostBatchError",
    "NotPicklableError",
    "ObjectDataset",
    "ObjectNotFoundError",
    "ObjectSample",
    "ReentrantError",
    "RemoteError",
    "ResumePoint",
    "StoreError",
    "StoreUnreachableError",
    "UserStopError",
    "WorkerDied",
    "__version__",
    "default_collate",
    "default_convert",
    "get_worker_info",
    "pad_sequences",
]
