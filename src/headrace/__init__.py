"""headrace: an asyncio-native streaming data loader for PyTorch.

>>> import headrace as hr
>>> class Squares(hr.AsyncDataset):
...     def __len__(self): return 4
...     async def aget(self, index): return index * index
>>> [batch.tolist() for batch in hr.DataLoader(Squares(), batch_size=2)]
[[0, 1], [4, 9]]

Exceptions are in `headrace.errors`. Types of results, for annotations and `isinstance`, are in
`headrace.types`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from headrace._version import __version__ as __version__

if TYPE_CHECKING:
    from torch.utils.data import get_worker_info as get_worker_info

    from headrace import decode as decode
    from headrace import errors as errors
    from headrace import types as types
    from headrace._consumer.delivery import verify as verify
    from headrace._eventloop.per_loop import per_loop as per_loop
    from headrace._links.ray_placement import RayPlacement as RayPlacement
    from headrace._random.randomized import randomized as randomized
    from headrace._ranks.rankinfo import get_rank_info as get_rank_info
    from headrace._records.error_policy import SkipErrors as SkipErrors
    from headrace._store.ranges import Ranges as Ranges
    from headrace._store.request_stats import report_throttled as report_throttled
    from headrace._store.retry_policy import RetryPolicy as RetryPolicy
    from headrace._store.store import Store as Store
    from headrace._streams.iterable_style import (
        AsyncIterableDataset as AsyncIterableDataset,
    )
    from headrace._streams.map_style import AsyncDataset as AsyncDataset
    from headrace._streams.map_style import RangedDataset as RangedDataset
    from headrace.collate import collate_table as collate_table
    from headrace.collate import default_collate as default_collate
    from headrace.collate import default_convert as default_convert
    from headrace.datasets.arrays import ArrayDataset as ArrayDataset
    from headrace.datasets.arrow import ArrowDataset as ArrowDataset
    from headrace.datasets.batching import batch_by_tokens as batch_by_tokens
    from headrace.datasets.cached import CachedDataset as CachedDataset
    from headrace.datasets.combine import concat as concat
    from headrace.datasets.combine import from_async_iterable as from_async_iterable
    from headrace.datasets.combine import mix as mix
    from headrace.datasets.files import FileDataset as FileDataset
    from headrace.datasets.hub import hub as hub
    from headrace.datasets.lerobot import LeRobotDataset as LeRobotDataset
    from headrace.datasets.lines import LinesDataset as LinesDataset
    from headrace.datasets.litdata import LitDataset as LitDataset
    from headrace.datasets.mds import MDSDataset as MDSDataset
    from headrace.datasets.objects import ObjectDataset as ObjectDataset
    from headrace.datasets.parquet import ParquetDataset as ParquetDataset
    from headrace.datasets.tar import TarDataset as TarDataset
    from headrace.datasets.tfrecord import TFRecordDataset as TFRecordDataset
    from headrace.datasets.tokens import TokenDataset as TokenDataset
    from headrace.datasets.video import VideoDataset as VideoDataset
    from headrace.datasets.zarr import ZarrDataset as ZarrDataset
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.errors import StateError as StateError
    from headrace.errors import StoreError as StoreError
    from headrace.loader import DataLoader as DataLoader
    from headrace.packing import pack as pack
    from headrace.packing import pack_results as pack_results
    from headrace.samplers import BalancedBatchSampler as BalancedBatchSampler
    from headrace.samplers import BlockShuffleSampler as BlockShuffleSampler
    from headrace.samplers import ElasticSampler as ElasticSampler
    from headrace.samplers import Permutation as Permutation
    from headrace.samplers import fit_cost as fit_cost
    from headrace.samplers import quadratic as quadratic
    from headrace.state import gather_state as gather_state
    from headrace.state import merge_states as merge_states
    from headrace.telemetry.trace import trace as trace

# Public names, by defining module. Importing torch takes seconds. Importing all of headrace takes
# longer than torch's loader takes to the first batch. So the first use of a name imports only the
# module of this name.
_NAMES = {
    "headrace._consumer.delivery": ("verify",),
    "headrace._records.error_policy": ("SkipErrors",),
    "headrace._eventloop.per_loop": ("per_loop",),
    "headrace._random.randomized": ("randomized",),
    "headrace._ranks.rankinfo": ("get_rank_info",),
    "headrace._links.ray_placement": ("RayPlacement",),
    "headrace._store.retry_policy": ("RetryPolicy",),
    "headrace._store.ranges": ("Ranges",),
    "headrace._store.request_stats": ("report_throttled",),
    "headrace._store.store": ("Store",),
    "headrace._streams.iterable_style": ("AsyncIterableDataset",),
    "headrace._streams.map_style": ("AsyncDataset", "RangedDataset"),
    "headrace.collate": ("collate_table", "default_collate", "default_convert"),
    "headrace.datasets.arrow": ("ArrowDataset",),
    "headrace.datasets.arrays": ("ArrayDataset",),
    "headrace.datasets.batching": ("batch_by_tokens",),
    "headrace.datasets.cached": ("CachedDataset",),
    "headrace.datasets.combine": ("concat", "from_async_iterable", "mix"),
    "headrace.datasets.files": ("FileDataset",),
    "headrace.datasets.hub": ("hub",),
    "headrace.datasets.lerobot": ("LeRobotDataset",),
    "headrace.datasets.lines": ("LinesDataset",),
    "headrace.datasets.litdata": ("LitDataset",),
    "headrace.datasets.mds": ("MDSDataset",),
    "headrace.datasets.objects": ("ObjectDataset",),
    "headrace.datasets.parquet": ("ParquetDataset",),
    "headrace.datasets.tar": ("TarDataset",),
    "headrace.datasets.tfrecord": ("TFRecordDataset",),
    "headrace.datasets.tokens": ("TokenDataset",),
    "headrace.datasets.video": ("VideoDataset",),
    "headrace.datasets.zarr": ("ZarrDataset",),
    "headrace.errors": ("HeadraceError", "StateError", "StoreError"),
    "headrace.loader": ("DataLoader",),
    "headrace.packing": ("pack", "pack_results"),
    "headrace.samplers": (
        "BalancedBatchSampler",
        "BlockShuffleSampler",
        "ElasticSampler",
        "Permutation",
        "fit_cost",
        "quadratic",
    ),
    "headrace.state": ("gather_state", "merge_states"),
    "headrace.telemetry.trace": ("trace",),
    "torch.utils.data": ("get_worker_info",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = (
    "datasets",
    "decode",
    "errors",
    "integrations",
    "samplers",
    "testing",
    "types",
)

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
    # The import system also binds internal modules here. `dir` shows public names only.
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__spec__"]
