"""Functions and datasets pickled once for several processes, with large buffers in shared memory.

A `SharedPickle` is a pickle whose large parts are in sealed shared memory (a `memfd`). Sending one to a process sends
descriptors. The process maps the memory privately: pages that it does not write to are shared, and those that it
writes to become its own, as after a fork.

Shared objects stay shared: `multiprocessing` primitives (`Value`, `Array`, `Lock`, `Queue`, `Event`, `Pipe`), proxies
of a manager and tensors in shared memory are pickled as for a child of `multiprocessing`, by name or as file
descriptors. In samples and batches (see `pickling`) they are copied.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import mmap
import os
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import context, resource_tracker
from multiprocessing.reduction import ForkingPickler
from pickle import PickleBuffer
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import get_sharing_strategy

from headrace._core.descriptors import Descriptor
from headrace._core.streams.blocking import reduce_unentered
from headrace._core.torchcompat.private import open_shared_file, share_by_file, untyped
from headrace._core.transport.pickling import Pickler, dump_parts, load_message
from headrace._core.transport.preload import modules_named_in
from headrace._core.transport.slabs import address_of, aligned

LARGE = 64 * 1024  # bytes; smaller buffers stay in the pickle, and are copied with it
_numbers = itertools.count(1)


class _Region(NamedTuple):
    """A part of a shared memory."""

    memory: Descriptor
    offset: int
    size: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedPickle:
    """A pickled object that several processes can load; in each the large buffers are views of the same memory.

    Attributes:
        number: unique among those made in one process.
        pickled: the pickle without large buffers, or its region if it is large itself.
        buffers: where the large buffers lie.
        descriptors: further descriptors that the pickle refers to: shared tensors, pipes.
        tracker: see `tracker`.
        modules: modules that the pickle names and that should be imported beforehand, see `preload`.
        addresses: of the large buffers, in the process that pickled them; there only.

    Example:
        >>> import numpy as np
        >>> shared = SharedPickle.dumps({"table": np.zeros(1_000_000), "scale": 2})
        >>> shared.loads()["table"].shape
        (1000000,)
    """

    number: int
    pickled: bytes | _Region
    buffers: tuple[_Region, ...]
    descriptors: tuple[Descriptor, ...]
    tracker: Descriptor | None
    modules: tuple[str, ...]
    addresses: tuple[int, ...] = field(default=())

    @classmethod
    def dumps(cls, obj: object, previous: SharedPickle | None = None) -> SharedPickle:
        """Pickle `obj`.

        Args:
            obj: anything that can be pickled by value.
            previous: the result of an earlier call. It is returned if the pickle is still the same; buffers that it
                holds, unchanged, are not copied again. Contents are compared, 6 GB a second.

        Raises:
            OSError: there is no memory, or no descriptor, for the large buffers.
            Exception: `obj` cannot be pickled.
        """
        found: list[memoryview] = []
        descriptors: list[Descriptor] = []

        def keep_large(buffer: PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes >= LARGE:
                found.append(view)
            return view.nbytes < LARGE

        pickled = dump_shared(obj, keep_large, descriptors)
        addresses = tuple(map(address_of, found))
        earlier = _Earlier(previous)
        regions = [earlier.find(address, view) for address, view in zip(addresses, found, strict=True)]
        if previous is not None and None not in regions and earlier.has(pickled) and previous._refers_to(descriptors):
            return previous
        new = [view for view, region in zip(found, regions, strict=True) if region is None]
        if len(pickled) >= LARGE:
            new.append(memoryview(pickled))
        placed = _in_new_memory(new)
        place = pickled if len(pickled) < LARGE else placed.pop()
        fresh = iter(placed)
        buffers = tuple(next(fresh) if region is None else region for region in regions)
        return cls(next(_numbers), place, buffers, tuple(descriptors), tracker(), modules_named_in(pickled), addresses)

    def loads(self) -> Any:
        """The unpickled object; errors of unpickling are raised."""
        if self.tracker is not None:
            adopt_tracker(self.tracker)
        memories = _Mapped(mmap.MAP_PRIVATE)
        pickled = self.pickled if isinstance(self.pickled, bytes) else memories.view(self.pickled)
        return load_message(pickled, [memories.view(region) for region in self.buffers], self.descriptors)

    def _refers_to(self, descriptors: Sequence[Descriptor]) -> bool:
        pairs = zip(self.descriptors, descriptors, strict=False)
        return len(self.descriptors) == len(descriptors) and all(mine.same_file_as(other) for mine, other in pairs)

    def __reduce__(self) -> tuple[object, ...]:
        pickled, buffers = self.pickled, self.buffers
        return SharedPickle, (self.number, pickled, buffers, self.descriptors, self.tracker, self.modules)


class _Mapped:
    """Shared memories, each mapped at its first use, with `flags` of `mmap.mmap`."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._maps: dict[Descriptor, mmap.mmap] = {}

    def view(self, region: _Region) -> memoryview:
        mapped = self._maps.get(region.memory)
        if mapped is None:
            mapped = self._maps[region.memory] = mmap.mmap(region.memory.number, 0, flags=self._flags)
        return memoryview(mapped)[region.offset : region.offset + region.size]


class _Earlier:
    """Finds unchanged buffers in an earlier pickle."""

    def __init__(self, pickled: SharedPickle | None) -> None:
        self._pickled = pickled
        self._memories = _Mapped(mmap.MAP_PRIVATE)
        known = () if pickled is None else zip(pickled.addresses, pickled.buffers, strict=True)
        self._known = {(address, region.size): region for address, region in known}

    def find(self, address: int, view: memoryview) -> _Region | None:
        region = self._known.get((address, view.nbytes))
        return region if region is not None and self._holds(region, view) else None

    def has(self, pickled: bytes) -> bool:
        assert self._pickled is not None
        earlier = self._pickled.pickled
        if isinstance(earlier, bytes):
            return earlier == pickled
        return earlier.size == len(pickled) and self._holds(earlier, memoryview(pickled))

    def _holds(self, region: _Region, view: memoryview) -> bool:
        return _memcmp(address_of(self._memories.view(region)), address_of(view), region.size) == 0  # type: ignore[no-any-return]


def _in_new_memory(views: Sequence[memoryview]) -> list[_Region]:
    """Copy buffers into new shared memory, and seal it against writing."""
    if not views:
        return []
    memory = _shared_memory()
    regions, end = [], 0
    for view in views:
        regions.append(_Region(memory, end, view.nbytes))
        _write_all(memory.number, view, end)
        end += aligned(view.nbytes)
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(memory.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return regions


def _shared_memory() -> Descriptor:
    if hasattr(os, "memfd_create"):
        return Descriptor(os.memfd_create("headrace-functions", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    with tempfile.TemporaryFile() as file:  # macOS
        return Descriptor.duplicate(file.fileno())


def _write_all(number: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(number, view, offset)
        view, offset = view[written:], offset + written


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class SharingPickler(Pickler):
    """A pickler with the reducers of `multiprocessing` and of `torch.multiprocessing`."""

    def reducer_override(self, obj: object) -> object:
        if (reduced := reduce_unentered(obj, 5)) is not NotImplemented:
            return reduced
        if isinstance(obj, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            if not _in_shared_memory(obj):
                return super().reducer_override(obj)
            if isinstance(obj, torch.UntypedStorage) and get_sharing_strategy() == "file_system":  # type: ignore[no-untyped-call]
                # Torch's own reducer counts on each pickle being loaded once; here several processes load it, or none.
                return open_shared_file, share_by_file(obj)
        elif type(obj) in _LEFT_TO_CLOUDPICKLE:
            return super().reducer_override(obj)
        reduce = ForkingPickler._extra_reducers.get(type(obj))  # type: ignore[attr-defined]
        return super().reducer_override(obj) if reduce is None else reduce(obj)


# ForkingPickler's reducers for these serve old versions of Python.
_LEFT_TO_CLOUDPICKLE = {types.MethodType, functools.partial, type(list.append), type(int.__add__)}


def _in_shared_memory(obj: torch.Tensor | torch.UntypedStorage | torch.TypedStorage) -> bool:
    if isinstance(obj, torch.Tensor):
        if obj.is_quantized or obj.is_nested or obj.layout is not torch.strided:
            return False
        storage = obj.untyped_storage()
    else:
        storage = obj if isinstance(obj, torch.UntypedStorage) else untyped(obj)
    return storage.device.type == "cpu" and len(storage) > 0 and storage.is_shared()


def dump_shared(obj: object, buffer_callback: Callable[[PickleBuffer], object], descriptors: list[Descriptor]) -> bytes:
    """The pickle of `obj`, its buffers given to `buffer_callback`, its descriptors appended to `descriptors`.

    Raises:
        Exception: `obj` cannot be pickled.
    """
    with _spawning(_Spawning()):
        return dump_parts(obj, buffer_callback, descriptors, pickler=SharingPickler)


def why_not_picklable(obj: object) -> str | None:
    """The pickling error of `obj` as text; None if it can be pickled."""
    try:
        dump_shared(obj, lambda buffer: None, [])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fingerprint(obj: object) -> bytes | None:
    """A digest of the pickle of `obj`; None if it cannot be pickled."""
    digest = hashlib.blake2b()
    try:
        digest.update(dump_shared(obj, lambda buffer: digest.update(buffer.raw()), []))
    except Exception:  # the error is raised where the pickle is needed
        return None
    return digest.digest()


class _Spawning:
    """A stand-in for the child that `multiprocessing` is starting; it collects the descriptors."""

    @staticmethod
    def duplicate_for_child(number: int) -> Descriptor:
        return Descriptor.duplicate(number)

    @staticmethod
    def DupFd(descriptor: Descriptor) -> _DuplicatedDescriptor:  # multiprocessing's name
        return _DuplicatedDescriptor(descriptor)


class _DuplicatedDescriptor:
    """The receiver's stand-in for the object that `multiprocessing` gets a descriptor from."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    def detach(self) -> int:
        return os.dup(self._descriptor.number)


@contextmanager
def _spawning(popen: _Spawning) -> Iterator[None]:
    before = context.get_spawning_popen()
    context.set_spawning_popen(popen)  # type: ignore[arg-type]
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def tracker() -> Descriptor | None:
    """The descriptor of the resource tracker, which unlinks named shared memory at exit; None if there is none yet."""
    number = getattr(resource_tracker._resource_tracker, "_fd", None)
    return None if number is None else Descriptor.duplicate(number)


def adopt_tracker(descriptor: Descriptor) -> None:
    """Use another process's tracker, as a child of `multiprocessing` does.

    A tracker of this process's own would unlink shared memory of the other's when this process ends.
    """
    mine = resource_tracker._resource_tracker
    if getattr(mine, "_fd", None) is None:
        mine._fd = os.dup(descriptor.number)  # type: ignore[attr-defined]
