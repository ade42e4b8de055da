"""Copies of batches to a device, executed while the device computes, and pinned memory.

The consumer's thread enqueues the copies.
"""

from __future__ import annotations

import inspect
import os
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from copy import copy
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from headrace._device.streams import Streams
from headrace._records.failure import Failure, Stage
from headrace._torchcompat.private import pin_memory
from headrace._transport.slabs import ALIGNMENT, SMALL_PART, Slab, aligned, slab_at


class Registry:
    """The page-locked slabs of a process.

    A process has a single registry, because several loaders may use the same slab.
    """

    def __init__(self) -> None:
        self._registered: weakref.WeakSet[Slab] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.refused = False

    def register(self, slab: Slab, streams: Streams) -> bool:
        """Page-lock a slab if possible; return whether the slab is page-locked.

        After a refusal no other slab is tried: the limits of a process do not grow later.
        """
        with self._lock:
            if self.refused or not streams.registers or slab in self._registered:
                return slab in self._registered
            try:
                streams.register(slab.address, slab.size)
            except RuntimeError as error:
                self.refused = True
                reason = error
            else:
                # Runs before the Slab is unmapped. A view of a slab keeps the Slab alive, so the
                # memory is unused then.
                unlock = weakref.finalize(
                    slab, _release, streams, slab.address, os.getpid()
                )
                unlock.atexit = False
                self._registered.add(slab)
                return True
        warnings.warn(
            f"shared memory could not be page-locked ({reason}). Each batch is copied once more, "
            "into a pinned buffer, by the thread that calls next(). Raise the limit of locked "
            "memory (ulimit -l) to avoid it.",
            stacklevel=2,
        )
        return False


def _release(streams: Streams, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the object, but no registration
        streams.unregister(address)


REGISTRY = Registry()


def pin(batch: object, number: int) -> object:
    """Copy batch `number` to pinned memory in the consumer's thread.

    torch's loader does the same. The memory comes from torch's allocator. A slab could be
    page-locked in place, but a `non_blocking` copy may still read a batch after the user has
    dropped the batch. torch's allocator knows of the copy and keeps the memory until the end of the
    copy. A slab would be reused.
    """
    try:
        return pin_memory(batch)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise Failure.caught(error, Stage.PIN, number).exception() from error.__cause__


class DeviceBatch(NamedTuple):
    """A batch with an enqueued copy."""

    data: object  # the batch, with tensors on the device
    event: torch.Event  # recorded after the copies
    placed: list[Any]  # memory allocated on the side stream
    late: bool  # True if parts of `data` must still be moved, on the consumer's stream


class Copier:
    """Copies batches on a side stream, each as a single region if possible."""

    def __init__(self, streams: Streams, registry: Registry = REGISTRY) -> None:
        self.streams = streams
        self._side = streams.side()
        self._registry = registry
        # Batches and pinned memory that copies may still read.
        self._read: deque[tuple[torch.Event, object]] = deque()
        self._closed = False

    def begin(self, batch: object) -> DeviceBatch:
        """Enqueue the copies of `batch`.

        The batch is kept until the copies have ended.
        """
        self.reap()
        found: defaultdict[str, dict[int, Any]] = defaultdict(dict)

        def look(leaf: Any) -> object:
            found[self._way(leaf)][id(leaf)] = leaf
            return leaf

        _replaced(batch, look)
        moved: dict[int, Any] = {}
        placed: list[Any] = []
        kept = [batch]
        try:
            in_slab, loose = self._sorted(list(found["region"].values()))
            for slab, tensors in in_slab.items():
                starts = [tensor.data_ptr() - slab.address for tensor in tensors]
                ends = [
                    start + _size(tensor)
                    for start, tensor in zip(starts, tensors, strict=True)
                ]
                first = min(starts) // ALIGNMENT * ALIGNMENT
                count = max(ends) - first
                host = torch.frombuffer(
                    slab.memory, dtype=torch.uint8, count=count, offset=first
                )
                offsets = [start - first for start in starts]
                placed.append(self._copy(host, tensors, offsets, moved))
            for others in _by_size(loose):
                ends = [0, *accumulate(aligned(_size(tensor)) for tensor in others)]
                # torch's allocator keeps the memory for later batches.
                memory = self.streams.pinned(max(ends[-1], ALIGNMENT))
                kept.append(memory)
                with torch.no_grad():
                    for tensor, offset in zip(others, ends, strict=False):
                        _at(memory, offset, tensor).copy_(tensor)
                placed.append(self._copy(memory, others, ends, moved))
            for key, thing in found["side"].items():
                with self.streams.on(self._side):
                    moved[key] = thing.to(self.streams.device, non_blocking=True)
                placed.append(moved[key])
        finally:  # copies enqueued before an error read the batch too
            event = self._side.record_event()
            self._read.append((event, kept))
        data = _replaced(batch, lambda leaf: moved.get(id(leaf), leaf))
        return DeviceBatch(data, event, placed, bool(found["late"]))

    def _copy(
        self,
        host: torch.Tensor,
        tensors: list[torch.Tensor],
        offsets: list[int],
        moved: dict[int, Any],
    ) -> torch.Tensor:
        """Enqueue the copy of a region, and divide the copy into tensors.

        `offsets` are the places of the tensors in the region, in bytes.
        """
        region = self.streams.place(host, self._side)
        for tensor, offset in zip(tensors, offsets, strict=False):
            moved[id(tensor)] = _at(region, offset, tensor)
        return region

    def claim(self, batch: DeviceBatch) -> object:
        """Return the data of a batch for the consumer's current stream.

        The stream waits for the copies. The caller does not wait.
        """
        stream = self.streams.current()
        stream.wait_event(batch.event)
        for placed in batch.placed:
            self.streams.used_on(placed, stream)
        if not batch.late:
            return batch.data
        # Moved on the stream that uses the data: the allocator cannot be notified of the memory of
        # some objects, and no other stream is safe for such memory.
        with self.streams.on(stream):
            data = _replaced(batch.data, self._move_late)
        self._read.append((stream.record_event(), batch.data))
        return data

    def reap(self) -> None:
        """Release batches after the end of the copies, and so free slabs."""
        while self._read and self._read[0][0].query():
            self._read.popleft()

    def close(self) -> None:
        """Wait for the enqueued copies (milliseconds), then release the batches.

        Idempotent. The error of a failed device is not raised here, because the error would hide
        the cause. The next use of the device raises the error.
        """
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):  # a failed device, see above
            for event, _ in self._read:
                event.synchronize()
            self.streams.rest(self._side)
        self._read.clear()

    def _way(self, leaf: Any) -> str:
        """Return how a leaf moves.

        "region": within a region. "side": alone, on the side stream. "late": on the consumer's
        stream. "": not at all.
        """
        if isinstance(leaf, torch.Tensor):
            if _travels_in_a_region(leaf):
                return "region"
            return "" if leaf.device == self.streams.device or leaf.is_meta else "late"
        if not _moves(leaf):
            return ""
        return "side" if _names_its_memory(leaf) else "late"

    def _move_late(self, leaf: Any) -> object:
        late = self._way(leaf) == "late"
        return leaf.to(self.streams.device, non_blocking=True) if late else leaf

    def _sorted(
        self, tensors: list[torch.Tensor]
    ) -> tuple[dict[Slab, list[torch.Tensor]], list[torch.Tensor]]:
        """Return the tensors in page-locked slabs, by slab, and the others."""
        in_slab: dict[Slab, list[torch.Tensor]] = {}
        others: list[torch.Tensor] = []
        slab: Slab | None = None
        for tensor in tensors:
            address, size = tensor.data_ptr(), _size(tensor)
            # Most tensors are in the slab of the tensor before.
            if slab is None or not 0 <= address - slab.address <= slab.size - size:
                slab = slab_at(address, size)
            if (
                slab is not None
                # A tensor without the alignment of the dtype is copied to an aligned place.
                and (address - slab.address) % ALIGNMENT % tensor.itemsize == 0
                and _is_plain(tensor)
                and self._registry.register(slab, self.streams)
            ):
                in_slab.setdefault(slab, []).append(tensor)
            else:
                others.append(tensor)
        return in_slab, others


def _travels_in_a_region(tensor: torch.Tensor) -> bool:
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
    ):
        return False
    return (
        tensor.device.type == "cpu" and not tensor.is_quantized and not tensor.is_nested
    )


def _by_size(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Separate small tensors from large tensors.

    A tensor is small beside the size of all tensors. If the user keeps a label, the memory of the
    images is not kept.
    """
    limit = SMALL_PART * sum(map(_size, tensors))
    small = [tensor for tensor in tensors if _size(tensor) < limit]
    large = [tensor for tensor in tensors if _size(tensor) >= limit]
    return [group for group in (small, large) if group]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are the values, without gaps."""
    changed = tensor.is_conj() or tensor.is_neg()
    return not changed and tensor.numel() > 0 and tensor.stride() == _strides(tensor)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of `tensor.to(device)`.

    A dense layout is kept. Any other layout becomes contiguous.
    """
    dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
    return dense.stride()


def _at(region: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor at byte `offset` of `region`.

    The dtype and the shape are as of `like`. The tensor is not a view: views share a version
    counter, so after a write to a tensor of a batch, autograd would refuse the other tensors.
    """
    start = region.storage_offset() + offset
    made = torch.empty(0, dtype=like.dtype, device=region.device)
    made.set_(
        region.untyped_storage(), start // like.itemsize, like.size(), _strides(like)
    )
    return made.requires_grad_(like.requires_grad)


# Types without parts to replace.
_VALUES = (torch.Tensor, str, bytes, bytearray, memoryview, range)


def _replaced(batch: object, leaf: Callable[[object], Any]) -> Any:
    """Apply `leaf` to everything in a batch except containers.

    Containers are copied, never modified. The batch sizes of a `PackedSequence` stay in host
    memory, as torch requires. A container with both `to` and `record_stream` (a `TensorDict`) is a
    leaf: a copy of the items would lose the other state of the container.
    """
    if isinstance(batch, PackedSequence):
        return PackedSequence(
            leaf(batch.data),
            batch.batch_sizes,
            leaf(batch.sorted_indices),
            leaf(batch.unsorted_indices),
        )
    if isinstance(batch, _VALUES) or (_moves(batch) and _names_its_memory(batch)):
        return leaf(batch)
    if isinstance(batch, Mapping):
        items = {key: _replaced(value, leaf) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return type(batch)(items)  # type: ignore[call-arg]
        clone = copy(batch)
        clone.update(items)
        return clone
    if isinstance(batch, Sequence):
        parts = [_replaced(value, leaf) for value in batch]
        if isinstance(batch, MutableSequence):
            copied = copy(batch)
            for number, part in enumerate(parts):
                copied[number] = part
            return copied
        kind: Any = type(batch)
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    return leaf(batch)


def _moves(leaf: object) -> bool:
    """Return whether `leaf` has ``to(device, non_blocking=True)``.

    A `to` with other arguments is not called.
    """
    to = getattr(leaf, "to", None)
    if not callable(to) or isinstance(leaf, type):
        return False
    code = getattr(to, "__code__", None)  # None if written in C
    return (
        code is None
        or "non_blocking" in code.co_varnames
        or bool(code.co_flags & inspect.CO_VARKEYWORDS)
    )


def _names_its_memory(leaf: object) -> bool:
    """Return whether `leaf` has `record_stream`.

    With `record_stream`, the allocator can be notified of a stream that uses the memory of `leaf`.
    """
    return callable(getattr(leaf, "record_stream", None))
