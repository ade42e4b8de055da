"""Collate functions: torch's default, extended for bytes of stores."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate as torch_default_collate
from torch.utils.data import default_convert as default_convert

from headrace._base.text import add_note
from headrace._records.batches import Rows, is_table
from headrace._torchcompat.private import (
    collate,
    collate_tensor_fn,
    default_collate_fn_map,
    keystr,
    tree_flatten_with_path,
)

CollateFn = Callable[[Any], object]


def default_collate(batch: Sequence[object]) -> Any:
    """Combine samples into a batch, as torch does.

    As `torch.utils.data.default_collate`, the function stacks tensors, arrays and numbers. In
    addition, the function accepts undecoded objects: `memoryview` fields become a list, as `bytes`
    fields do in torch. A field with None in every sample (no labels) stays None.

    Args:
        batch: the samples, all of the same structure.

    Returns:
        The same structure, each leaf with a leading dimension of ``len(batch)``.

    Raises:
        TypeError: the type of a leaf cannot be collated.
        RuntimeError: tensors have unequal shapes.

    Example:
        >>> default_collate([(1.0, b"a"), (2.0, b"b")])
        [tensor([1., 2.], dtype=torch.float64), (b'a', b'b')]
    """
    return collate(batch, collate_fn_map={**default_collate_fn_map, **_OURS})


def collate_table(table: Any) -> dict[str, Any]:
    """Make tensors of the columns of a table.

    For the ``collate_fn`` of a loader, with ``format="arrow"`` of `ParquetDataset` and
    `ArrowDataset`. No value becomes a Python object, except values that tensors cannot hold.

    Args:
        table: a `pyarrow.Table`.

    Returns:
        A dict of the columns. Numbers and booleans are a tensor. A column of lists is a dict of two
        tensors: ``"values"``, of all lists, and ``"lengths"``. The values of lists of lists are
        again such a dict. Other types, for example strings, are a list of Python objects.

    Raises:
        ValueError: a column has nulls, or a list of the column has nulls.

    Example:
        >>> import pyarrow
        >>> collate_table(pyarrow.table({"x": [0.5, 1.5], "tokens": [[1, 2, 3], [4]]}))["tokens"]
        {'values': tensor([1, 2, 3, 4]), 'lengths': tensor([3, 1])}
    """
    return {
        name: _of_array(name, table[name].combine_chunks()) for name in table.column_names
    }


def _of_array(name: str, array: Any) -> Any:
    from pyarrow.compute import list_value_length

    if array.null_count:
        raise ValueError(
            f"column {name!r} has nulls, and tensors have none: fill or filter them"
        )
    if hasattr(array.type, "value_field"):
        lengths = torch.tensor(list_value_length(array).to_numpy(), dtype=torch.int64)
        return {"values": _of_array(name, array.flatten()), "lengths": lengths}
    values = array.to_numpy(zero_copy_only=False)
    return torch.tensor(values) if values.dtype.kind in "biuf" else array.to_pylist()


def is_default(collate_fn: CollateFn) -> bool:
    """Whether `collate_fn` is a default collate function.

    The default functions are torch's function, the function of this module, and the variants of
    both from `destined`. Functions are compared by identity.
    """
    return any(collate_fn is default for pair in _DESTINED for default in pair)


def stacks_tensors() -> bool:
    """Whether the default collate functions stack tensors with torch's function.

    False if a user has registered another function for tensors.
    """
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn


def _keep(batch: Sequence[object], **options: Any) -> list[object]:
    return list(batch)


def _keep_none(batch: Sequence[object], **options: Any) -> None:
    if any(sample is not None for sample in batch):
        raise TypeError(
            "default_collate: a field is None in some samples of the batch and not in others"
        )


_FunctionsByType = dict[type | tuple[type, ...], Callable[..., Any]]
_OURS: _FunctionsByType = {memoryview: _keep, type(None): _keep_none}


def collated(
    collate_fn: CollateFn, samples: Sequence[object], *, of_tables: bool
) -> object:
    """Return the batch made by `collate_fn` from samples.

    A default collate function gets the rows of a tensor without a copy. With `of_tables`, Arrow
    tables are concatenated before `collate_fn` runs, unless `collate_fn` is ``list`` or ``tuple``.
    """
    if (
        of_tables
        and collate_fn not in (list, tuple)
        and (table := _as_table(samples)) is not None
    ):
        return table if is_default(collate_fn) else collate_fn(table)
    if type(samples) is not Rows:
        return collate_fn(samples)
    if is_default(collate_fn) and stacks_tensors():
        return samples.whole
    return collate_fn(list(samples))


def _as_table(samples: Sequence[object]) -> Any:
    """Concatenate samples into a `pyarrow.Table`.

    The result is None if any sample is not a table.
    """
    if type(samples) is Rows:
        return samples.whole if samples.is_table else None
    if not samples or not is_table(samples[0]) or not all(map(is_table, samples)):
        return None
    import pyarrow

    return pyarrow.concat_tables(samples).combine_chunks()


def note_culprit(
    error: BaseException, samples: Sequence[Any], indices: Sequence[object]
) -> None:
    """Add a note with the odd sample to a collate error.

    The note names the sample that differs from the first sample, and the field.
    """
    with contextlib.suppress(Exception):  # classes of samples are user code
        kinds = [
            {
                keystr(path): _kind(leaf)
                for path, leaf in tree_flatten_with_path(sample)[0]
            }
            for sample in samples
        ]
        first = kinds[0]
        if any(map(inspect.isawaitable, samples)):
            add_note(
                error, "headrace: a sample is a coroutine: an await is missing in aget"
            )
        odd = [
            f"sample{path} is {here} at index {index!r}, and {there} at index {indices[0]!r}"
            for index, kind in zip(indices, kinds, strict=True)
            for path in {**first, **kind}
            if (here := kind.get(path, "missing"))
            != (there := first.get(path, "missing"))
        ]
        odd += [
            f"it is sample{path}"
            for path, kind in first.items()
            if path and f"{kind}'>" in str(error)
        ]
        if odd:
            add_note(error, f"headrace: {odd[0]}")


def _kind(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return str(list(shape))
    return "a number" if isinstance(leaf, int | float) else type(leaf).__name__


_destination: Callable[[int], memoryview | None] | None = None
"""Allocates bytes for batches in place of the heap. Returns None without enough room."""


def collate_into(destination: Callable[[int], memoryview | None]) -> None:
    """Set the destination of `destined` collate functions.

    The destination is global to the process. A worker process makes a single batch at a time.
    """
    global _destination
    _destination = destination


def destined(collate_fn: CollateFn) -> CollateFn:
    """Return a variant of `collate_fn` that stacks into the destination.

    Only default collate functions have a variant. Any other function is returned unchanged: a
    user's function may call a default collate function and keep the batch.
    """
    return next(
        (stacking for default, stacking in _DESTINED if collate_fn is default), collate_fn
    )


_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
]
NUMPY_DTYPES = {getattr(torch, name): np.dtype(name) for name in _DTYPES}


def tensor_of(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor in the memory of a non-empty `buffer`."""
    if dtype in NUMPY_DTYPES:  # takes a third of the time, and does not release the GIL
        return torch.from_numpy(np.ndarray(shape, NUMPY_DTYPES[dtype], buffer))
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _stack(batch: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
    first = batch[0]
    size = len(batch) * first.nbytes if is_plain(first) else 0
    # Torch stacks small batches in the loader's process.
    if (
        size >= (HUGE if _destination is None else 1)
        and set(map(type, batch)) == {torch.Tensor}
        and set(map(_DTYPE, batch)) == {first.dtype}
    ):
        # Unequal shapes, a gradient, or another irregular tensor.
        with contextlib.suppress(RuntimeError):
            contiguous = size < HUGE or all(map(torch.Tensor.is_contiguous, batch))
            return torch.stack(
                list(batch), 0, out=output(first, len(batch), contiguous=contiguous)
            )
    # Torch stacks irregular tensors, or raises the error.
    return collate_tensor_fn(batch, **options)  # type: ignore[no-any-return]


def output(row: torch.Tensor, rows: int, *, contiguous: bool) -> torch.Tensor | None:
    """Allocate the output for `rows` stacked tensors like `row`.

    None lets torch allocate. In a worker the output is always contiguous, as in torch's workers. In
    the loader's process the output is contiguous only if the tensors are `contiguous`, as with
    torch.
    """
    size = rows * row.nbytes
    memory = None if _destination is None else _destination(size)
    if memory is None and size >= HUGE and (contiguous or _destination is not None):
        room = np.empty(size + 64, np.uint8)
        start = -room.ctypes.data % 64  # align to a cache line, as torch does
        memory = room[start : start + size].data
    if memory is not None:
        return tensor_of(memory, row.dtype, (rows, *row.shape))
    return None if _destination is None else row.new_empty((rows, *row.shape))


HUGE = 1 << 22
"""Bytes from which NumPy asks for huge pages: stacking 38 MB takes half the time."""
_DTYPE = operator.attrgetter("dtype")


def is_plain(tensor: object) -> bool:
    """Whether a tensor is a dense tensor on the CPU without a gradient."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def _collate_into_destination(batch: object, ours: _FunctionsByType = _OURS) -> object:
    """Collate with tensors stacked into the destination.

    A function registered by a user stays in place.
    """
    functions = {**default_collate_fn_map, **ours}
    if stacks_tensors():
        functions[torch.Tensor] = _stack
    return collate(batch, collate_fn_map=functions)


# Default collate functions, each with the variant that stacks into the destination.
_DESTINED: tuple[tuple[CollateFn, CollateFn], ...] = (
    (torch_default_collate, partial(_collate_into_destination, ours={})),
    (default_collate, _collate_into_destination),
)


def draws_nothing(function: CollateFn) -> bool:
    """Whether a collate function certainly uses no random numbers.

    True for the default functions of torch and of this module.
    """
    return is_default(function) or function is default_convert
