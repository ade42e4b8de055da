"""headrace: an asyncio-native streaming data loader for PyTorch.

>>> import headrace as hr
>>> class Squares(hr.AsyncDataset):
...     def __len__(self): return 4
...     async def aget(self, index): return index * index
>>> [batch.tolist() for batch in hr.DataLoader(Squares(), batch_size=2)]
[[0, 1], [4, 9]]

Exceptions are in `headrace.errors`, the types of what loaders and datasets give in `headrace.types`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from headrace._version import __version__ as __version__

if TYPE_CHECKING:
    from torch.utils.data import get_worker_info as get_worker_info

    from headrace import errors as errors
    from headrace import telemetry as telemetry
    from headrace import types as types
    from headrace._core.error_policy import SkipErrors as SkipErrors
    from headrace._core.eventloop.per_loop import per_loop as per_loop
    from headrace._core.pool.settings import worker_setup as worker_setup
    from headrace._core.randomized import randomized as randomized
    from headrace._core.ranks.rankinfo import get_rank_info as get_rank_info
    from headrace._core.ray_placement import RayPlacement as RayPlacement
    from headrace._core.retry_policy import RetryPolicy as RetryPolicy
    from headrace._core.store.ranges import Ranges as Ranges
    from headrace._core.store.request_stats import report_throttled as report_throttled
    from headrace._core.store.store import Store as Store
    from headrace._core.streams.iterable_style import AsyncIterableDataset as AsyncIterableDataset
    from headrace._core.streams.map_style import AsyncDataset as AsyncDataset
    from headrace._core.streams.map_style import RangedDataset as RangedDataset
    from headrace.collate import default_collate as default_collate
    from headrace.collate import default_convert as default_convert
    from headrace.collate import pad_sequences as pad_sequences
    from headrace.datasets.batching import batch_by_tokens as batch_by_tokens
    from headrace.datasets.cached import CachedDataset as CachedDataset
    from headrace.datasets.combine import concat as concat
    from headrace.datasets.combine import from_async_iterable as from_async_iterable
    from headrace.datasets.combine import mix as mix
    from headrace.datasets.files import FileDataset as FileDataset
    from headrace.datasets.lines import LinesDataset as LinesDataset
    from headrace.datasets.objects import ObjectDataset as ObjectDataset
    from headrace.datasets.parquet import ParquetDataset as ParquetDataset
    from headrace.datasets.tar import TarDataset as TarDataset
    from headrace.datasets.tokens import TokenDataset as TokenDataset
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.errors import StateError as StateError
    from headrace.errors import StoreError as StoreError
    from headrace.loader import DataLoader as DataLoader
    from headrace.samplers import BlockShuffleSampler as BlockShuffleSampler
    from headrace.samplers import ElasticSampler as ElasticSampler
    from headrace.samplers import permutation as permutation
    from headrace.state import gather_state as gather_state
    from headrace.state import merge_states as merge_states
    from headrace.telemetry.headspace import headspace as headspace
    from headrace.telemetry.progress import progress as progress
    from headrace.telemetry.trace import trace as trace

# Each public name and the module that defines it. Importing torch takes seconds, and all of headrace longer than
# torch's loader to its first batch: a name imports its own module, on first use, and no other.
_MODULES = {
    "AsyncDataset": "headrace._core.streams.map_style",
    "AsyncIterableDataset": "headrace._core.streams.iterable_style",
    "BlockShuffleSampler": "headrace.samplers",
    "CachedDataset": "headrace.datasets.cached",
    "DataLoader": "headrace.loader",
    "ElasticSampler": "headrace.samplers",
    "FileDataset": "headrace.datasets.files",
    "HeadraceError": "headrace.errors",
    "LinesDataset": "headrace.datasets.lines",
    "ObjectDataset": "headrace.datasets.objects",
    "ParquetDataset": "headrace.datasets.parquet",
    "RangedDataset": "headrace._core.streams.map_style",
    "Ranges": "headrace._core.store.ranges",
    "RayPlacement": "headrace._core.ray_placement",
    "RetryPolicy": "headrace._core.retry_policy",
    "SkipErrors": "headrace._core.error_policy",
    "StateError": "headrace.errors",
    "Store": "headrace._core.store.store",
    "StoreError": "headrace.errors",
    "TarDataset": "headrace.datasets.tar",
    "TokenDataset": "headrace.datasets.tokens",
    "batch_by_tokens": "headrace.datasets.batching",
    "concat": "headrace.datasets.combine",
    "default_collate": "headrace.collate",
    "default_convert": "headrace.collate",
    "from_async_iterable": "headrace.datasets.combine",
    "gather_state": "headrace.state",
    "get_rank_info": "headrace._core.ranks.rankinfo",
    "get_worker_info": "torch.utils.data",
    "headspace": "headrace.telemetry.headspace",
    "merge_states": "headrace.state",
    "mix": "headrace.datasets.combine",
    "pad_sequences": "headrace.collate",
    "per_loop": "headrace._core.eventloop.per_loop",
    "permutation": "headrace.samplers",
    "progress": "headrace.telemetry.progress",
    "randomized": "headrace._core.randomized",
    "report_throttled": "headrace._core.store.request_stats",
    "trace": "headrace.telemetry.trace",
    "worker_setup": "headrace._core.pool.settings",
}
_PACKAGES = ("datasets", "errors", "integrations", "samplers", "telemetry", "testing", "types")

__all__ = sorted(["__version__", *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"headrace.{name}")
    else:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Not the internal modules, which importing them binds here too.
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__spec__"]
