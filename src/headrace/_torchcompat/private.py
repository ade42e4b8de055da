"""Every private name of torch used by headrace, except attributes of `DataLoader`.

tests/unit/torchcompat/test_private_names.py checks the names, and lists the checked versions of
torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._utils import KeyErrorMessage as KeyErrorMessage

# `_is_profiler_enabled`: 1 µs with cold caches.
from torch.autograd import profiler as profiler
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils.data import Dataset
from torch.utils.data._utils import worker as _worker
from torch.utils.data._utils.collate import collate as collate
from torch.utils.data._utils.collate import collate_tensor_fn as collate_tensor_fn
from torch.utils.data._utils.collate import (
    default_collate_fn_map as default_collate_fn_map,
)
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory


def become_worker(
    number: int, workers: int, *, seed: int, dataset: Dataset[object]
) -> None:
    """Set `torch.utils.data.get_worker_info()` as in a worker of torch."""
    _worker._worker_info = _worker.WorkerInfo(
        id=number, num_workers=workers, seed=seed, dataset=dataset
    )


def numpy_seed(base_seed: int, worker: int) -> list[int]:
    """Return torch's NumPy seed for a worker."""
    seed: list[int] = _worker._generate_state(base_seed, worker)  # type: ignore[no-untyped-call]
    return seed


@contextlib.contextmanager
def outside_workers() -> Iterator[None]:
    """Make `torch.utils.data.get_worker_info()` return None inside the block."""
    info, _worker._worker_info = _worker._worker_info, None
    try:
        yield
    finally:
        _worker._worker_info = info


def set_deterministic_algorithms(mode: bool, *, warn_only: bool) -> None:
    """Set deterministic algorithms without importing the compiler.

    `torch.use_deterministic_algorithms` imports the compiler, and the import takes seconds.
    """
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
