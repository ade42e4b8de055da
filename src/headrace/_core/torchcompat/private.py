"""Every private name of torch that headrace uses, outside of `DataLoader`'s own attributes.

tests/unit/torchcompat/test_private_names.py checks them and names the versions they were checked
with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._utils import KeyErrorMessage as KeyErrorMessage
from torch.autograd import (
    profiler as profiler,
)  # its `_is_profiler_enabled` takes 1 µs where the caches are cold
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils.data import Dataset
from torch.utils.data._utils import worker as _worker
from torch.utils.data._utils.collate import collate as collate
from torch.utils.data._utils.collate import collate_int_fn as collate_int_fn
from torch.utils.data._utils.collate import collate_tensor_fn as collate_tensor_fn
from torch.utils.data._utils.collate import default_collate_fn_map as default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory


def become_worker(number: int, workers: int, *, seed: int, dataset: Dataset[object]) -> None:
    """Set `torch.utils.data.get_worker_info()` of this process, as in a worker of torch's."""
    _worker._worker_info = _worker.WorkerInfo(
        id=number, num_workers=workers, seed=seed, dataset=dataset
    )


def numpy_seed(base_seed: int, worker: int) -> list[int]:
    """The seed that torch's loader gives NumPy in a worker."""
    seed: list[int] = _worker._generate_state(base_seed, worker)  # type: ignore[no-untyped-call]
    return seed


@contextlib.contextmanager
def outside_workers() -> Iterator[None]:
    """Have `torch.utils.data.get_worker_info()` return None inside the block."""
    info, _worker._worker_info = _worker._worker_info, None
    try:
        yield
    finally:
        _worker._worker_info = info


def set_deterministic_algorithms(mode: bool, *, warn_only: bool) -> None:
    """`torch.use_deterministic_algorithms` without importing the compiler, which takes seconds."""
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def untyped(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """The memory of a `torch.TypedStorage`, without its deprecation warning."""
    memory: torch.UntypedStorage = storage._untyped_storage
    return memory


def share_by_file(storage: torch.UntypedStorage) -> tuple[bytes, bytes, int]:
    """The arguments of `open_shared_file` for a storage that is shared by torch's ``"file_system"`` strategy."""
    manager, name, size = storage._share_filename_cpu_()
    return manager, name, size


def open_shared_file(manager: bytes, name: bytes, size: int) -> torch.UntypedStorage:
    """The storage that another process shares by a file."""
    return torch.UntypedStorage._new_shared_filename_cpu(manager, name, size)


def default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
