"""Collate functions: torch's default extended for objects of stores, and padding of sequences."""

from __future__ import annotations

import contextlib
import functools
import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate as torch_default_collate
from torch.utils.data import default_convert as default_convert

from headrace._core.batches import Rows
from headrace._core.text import add_note
from headrace._core.torchcompat.private import (
    collate,
    collate_int_fn,
    collate_numpy_array_fn,
    collate_tensor_fn,
    default_collate_fn_map,
    keystr,
    np_str_obj_array_pattern,
    tree_flatten_with_path,
)


def default_collate(batch: Sequence[object]) -> Any:
    """Put samples together to a batch: `torch.utils.data.default_collate`, which stacks tensors, arrays and numbers.

    Beyond torch it takes the fields of undecoded objects: `memoryview` stays a list, as `bytes` does in torch, and a
    field that is None in every sample (no labels) stays None.

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
    return collate(batch, collate_fn_map={**default_collate_fn_map, **_OURS})


def is_default(collate_fn: Callable[[Any], object]) -> bool:
    """Whether it is a default collate of torch or of this module, or one of `destined`; by identity."""
    return any(collate_fn is default for pair in _DESTINED for default in pair)


def stacks_tensors() -> bool:
    """Whether the default collates put tensors together as torch does, and not by a function of the user's."""
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn


def _keep(batch: Sequence[object], *, collate_fn_map: object = None) -> list[object]:
    return list(batch)


def _keep_none(batch: Sequence[object], *, collate_fn_map: object = None) -> None:
    if any(sample is not None for sample in batch):
        raise TypeError("default_collate: a field is None in some samples of the batch and not in others")


_Array = npt.NDArray[np.generic]
_FunctionsByType = dict[type | tuple[type, ...], Callable[..., Any]]
_OURS: _FunctionsByType = {memoryview: _keep, type(None): _keep_none}


def pad_sequences(
    batch: Sequence[Any],
    *,
    padding_value: float = 0.0,
    padding_side: Literal["right", "left"] = "right",
    sequence: Any = 0,
) -> Any:
    """Put sequences of unequal length together to a batch, padded to the longest (`torch.nn.utils.rnn.pad_sequence`).

    A `collate_fn`; give it its options with `functools.partial`. The lengths are those for
    `torch.nn.utils.rnn.pack_padded_sequence`. For samples with two sequences, as in translation, call it once
    for each: ``lambda batch: (pad_sequences([a for a, _ in batch]), pad_sequences([b for _, b in batch]))``.

    Args:
        batch: the samples. Each is a sequence (a tensor or array of shape ``[length, ...]``, or a list of numbers) or
            has one among its items: a tuple such as ``(sequence, label)``, or a mapping.
        padding_value: the value after the end of a shorter sequence.
        padding_side: ``"left"`` to pad before the beginning instead.
        sequence: which item is the sequence: a position in a tuple, a key of a mapping.

    Returns:
        For sequences, ``(padded, lengths)``: a tensor of shape ``[len(batch), longest, ...]`` and an int64 tensor of
        shape ``[len(batch)]``. For tuples the same with the other items after it, ``(padded, lengths, *others)``, each
        put together by `default_collate`. For mappings a dict in which `padded` takes the place of the sequences, and
        ``"lengths"`` is new.

    Raises:
        TypeError: samples are mappings and `sequence` does not name a key, or a sequence has no length.
        ValueError: sequences differ in more than their length, or a mapping has an item ``"lengths"`` already.

    Example:
        >>> tokens, lengths, labels = pad_sequences([([5, 6, 7], 1), ([8], 0)])
        >>> tokens.tolist(), lengths.tolist(), labels.tolist()
        ([[5, 6, 7], [8, 0, 0]], [3, 1], [1, 0])
    """
    first = batch[0]
    if isinstance(first, Mapping):
        if sequence not in first:
            raise TypeError(
                f"pad_sequences: samples are mappings with the keys {list(first)}; name the sequence's: "
                f"functools.partial(pad_sequences, sequence=...)"
            )
        if "lengths" in first:
            raise ValueError('pad_sequences: samples have an item "lengths" already, which it would replace')
        padded, lengths = _padded([sample[sequence] for sample in batch], padding_value, padding_side)
        collated = {key: padded if key == sequence else default_collate([s[key] for s in batch]) for key in first}
        return {**collated, "lengths": lengths}
    if isinstance(first, tuple):
        padded, lengths = _padded([sample[sequence] for sample in batch], padding_value, padding_side)
        others = (position for position in range(len(first)) if position != range(len(first))[sequence])
        return padded, lengths, *(default_collate([sample[position] for sample in batch]) for position in others)
    return _padded(batch, padding_value, padding_side)


def _padded(sequences: Sequence[object], value: float, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [each if isinstance(each, torch.Tensor) else torch.as_tensor(each, device="cpu") for each in sequences]
    for tensor in tensors:
        if tensor.ndim == 0:
            raise TypeError(f"pad_sequences: {tensor.item()!r} is a number, not a sequence")
    # An empty list has no dtype and no shape of items.
    typed = [
        tensor for tensor, sequence in zip(tensors, sequences, strict=True) if len(tensor) or torch.is_tensor(sequence)
    ]
    items = {tuple(tensor.shape[1:]) for tensor in typed}
    if len(items) > 1:
        # Left to itself pad_sequence would stretch items of size 1 to the others' size.
        raise ValueError(f"pad_sequences: items of these sequences differ in shape: {sorted(items)}; only lengths may")
    if typed:
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in typed])
        shape = typed[0].shape[1:]
        tensors = [
            tensor.to(dtype) if len(tensor) else tensor.new_empty((0, *shape), dtype=dtype) for tensor in tensors
        ]
    lengths = torch.tensor([len(tensor) for tensor in tensors], device="cpu")
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side), lengths


def collated(collate_fn: Callable[[object], object], samples: Sequence[object]) -> object:
    """The batch that `collate_fn` makes of samples; a default collate need not copy the rows of a tensor."""
    if type(samples) is not Rows:
        return collate_fn(samples)
    if is_default(collate_fn) and stacks_tensors():
        return samples.tensor
    return collate_fn(list(samples))


def note_culprit(error: BaseException, samples: Sequence[Any], indices: Sequence[object]) -> None:
    """Add a note to the error of a default collate: which sample differs from the first, and in which field."""
    with contextlib.suppress(Exception):  # user code: the classes of samples
        kinds = [{keystr(path): _kind(leaf) for path, leaf in tree_flatten_with_path(sample)[0]} for sample in samples]
        first = kinds[0]
        odd = [
            f"sample{path} is {here} at index {index!r}, and {there} at index {indices[0]!r}"
            for index, kind in zip(indices, kinds, strict=True)
            for path in {**first, **kind}
            if (here := kind.get(path, "missing")) != (there := first.get(path, "missing"))
        ]
        odd += [f"it is sample{path}" for path, kind in first.items() if path and f"{kind}'>" in str(error)]
        if odd:
            add_note(error, f"headrace: {odd[0]}")


def _kind(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    return ("a number" if isinstance(leaf, int | float) else type(leaf).__name__) if shape is None else str(list(shape))


class Destination(Protocol):
    """Memory that a batch may be made in, instead of the heap."""

    def empty(self, size: int) -> memoryview | None:
        """`size` bytes of it, uninitialised; None if there are not as many."""


_destination: Destination | None = None


def collate_into(destination: Destination) -> None:
    """Have `destined` collate functions stack into `destination`; for a worker, which makes one batch at a time."""
    global _destination
    _destination = destination


def destined(collate_fn: Callable[[Any], object]) -> Callable[[object], object]:
    """The default collates as functions that stack into the destination; any other function as it is.

    A function of the user's that calls a default collate itself is left alone: it may keep the batch.
    """
    return next((stacking for default, stacking in _DESTINED if collate_fn is default), collate_fn)


def _stack(batch: Sequence[torch.Tensor], *, collate_fn_map: _FunctionsByType | None = None) -> torch.Tensor:
    first = batch[0]
    if _is_plain(first) and set(map(type, batch)) == {torch.Tensor}:
        size = len(batch) * first.numel() * first.element_size()
        uniform = size > 0 and set(map(_DTYPE, batch)) == {first.dtype}
        memory = _destination.empty(size) if uniform and _destination is not None else None
        try:
            if memory is not None:
                out = torch.frombuffer(memory, dtype=first.dtype).view(len(batch), *first.shape)
            elif uniform and _destination is not None:  # contiguous, as in the destination and in torch's workers
                out = first.new_empty((len(batch), *first.shape))
            else:
                return torch.stack(list(batch), 0)
            return torch.stack(list(batch), 0, out=out)
        except RuntimeError:  # of unequal shape, with a gradient, or not all as plain as the first
            pass
    irregular: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # and its errors
    return irregular


_DTYPE = operator.attrgetter("dtype")


def _is_plain(tensor: object) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def _stack_arrays(batch: Sequence[_Array], *, collate_fn_map: _FunctionsByType | None = None) -> torch.Tensor:
    if np_str_obj_array_pattern.search(batch[0].dtype.str) is not None:
        collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)  # raises torch's error
    return _stack([torch.as_tensor(array) for array in batch])


def _stack_ints(batch: Sequence[int], *, collate_fn_map: _FunctionsByType | None = None) -> torch.Tensor:
    if set(map(type, batch)) == {int}:
        with contextlib.suppress(OverflowError):  # torch's error is raised below
            return torch.frombuffer(array("q", batch), dtype=torch.int64)  # a fifth of the time of `torch.tensor`
    return collate_int_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def _collate_as_torch_into_destination(batch: object) -> object:
    return collate(batch, collate_fn_map=_stacking(default_collate_fn_map))


def _collate_into_destination(batch: object) -> object:
    return collate(batch, collate_fn_map=_stacking({**default_collate_fn_map, **_OURS}))


def _stacking(functions: _FunctionsByType) -> _FunctionsByType:
    """Torch's functions, with ours in place of those that stack; types that the user has registered stay."""
    arrays, ints = (np.ndarray, collate_numpy_array_fn, _stack_arrays), (int, collate_int_fn, _stack_ints)
    ours = (torch.Tensor, collate_tensor_fn, _stack), arrays, ints
    return {**functions, **{kind: stack for kind, torchs, stack in ours if functions.get(kind) is torchs}}


# A default collate, and the function that stacks into the destination.
_DESTINED: tuple[tuple[Callable[[Any], object], Callable[[object], object]], ...] = (
    (torch_default_collate, _collate_as_torch_into_destination),
    (default_collate, _collate_into_destination),
)


def draws_nothing(function: Callable[[object], object]) -> bool:
    """Whether a collate function is one of torch's or of this module's, which use no random numbers."""
    called = function.func if isinstance(function, functools.partial) else function
    return is_default(called) or called is default_convert or called is pad_sequences
