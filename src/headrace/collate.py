"""From samples to a batch: torch's rules, and ours for what a store gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_convert
from torch.utils.data._utils.collate import collate, default_collate_fn_map

__all__ = ["default_collate", "default_convert"]


def default_collate(batch: Sequence[Any]) -> Any:
    """Put samples together to a batch: `torch.utils.data.default_collate`, which stacks tensors, arrays and numbers.

    Beyond torch it takes what an object store's samples hold before they are decoded: `memoryview` stays a list, as
    `bytes` does in torch, and a field that is None in every sample (a label that nobody gave) stays None.

    Args:
        batch: the samples; all of the same structure.

    Returns:
        The same structure, each leaf with a leading dimension of ``len(batch)``.

    Raises:
        TypeError: a leaf is of a type that cannot be put together.
        RuntimeError: tensors of unequal shape.

    Example:
        >>> default_collate([(1.0, b"a"), (2.0, b"b")])
        [tensor([1., 2.], dtype=torch.float64), (b'a', b'b')]
    """
    return collate(batch, collate_fn_map=_COLLATE_FN_MAP)


def _keep(batch: Sequence[Any], *, collate_fn_map: Any = None) -> list[Any]:
    return list(batch)


def _keep_none(batch: Sequence[Any], *, collate_fn_map: Any = None) -> None:
    if any(sample is not None for sample in batch):
        raise TypeError("default_collate: a field is None in some samples of the batch and not in others")


_COLLATE_FN_MAP: dict[type | tuple[type, ...], Callable[..., Any]] = {
    **default_collate_fn_map,
    memoryview: _keep,
    type(None): _keep_none,
}
