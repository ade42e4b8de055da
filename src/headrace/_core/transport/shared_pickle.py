"""Functions and datasets pickled once for several processes, with large buffers in shared memory.

A `SharedPickle` is a pickle whose large parts are in sealed shared memory (a `memfd`). Sending one
to a process sends descriptors. The process maps the memory privately: pages that it does not write
to are shared, and those that it writes to become its own, as after a fork.

Shared objects stay shared: `multiprocessing` primitives (`Value`, `Array`, `Lock`, `Queue`,
`Event`, `Pipe`), proxies of a manager and tensors in shared memory are pickled as for a child of
`multiprocessing`, by name or as file descriptors. In samples and batches (see `pickling`) they are
copied.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import mmap
import os
import tempfile
import types
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import context, resource_tracker
from multiprocessing.reduction import ForkingPickler
from pickle import PickleBuffer
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy

from headrace._core.descriptors import Descriptor
from headrace._core.text import add_note
from headrace._core.torchcompat.private import open_shared_file, share_by_file, untyped
from headrace._core.transport.pickling import Pickler, dump_parts, load_message
from headrace._core.transport.preload import modules_named_in
from headrace._core.transport.slabs import aligned

LARGE = 64 * 1024  # bytes; smaller buffers stay in the pickle, and are copied with it


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedPickle:
    """A pickled object that several processes can load; in each the large buffers are views of the same memory."""

    number: int  # unique in all processes
    pickled: bytes  # without large buffers; empty if it is large itself, and the last of them
    memory: Descriptor | None  # holds the large buffers; None if there are none
    extents: tuple[tuple[int, int], ...]  # offset and size of each in `memory`, in bytes
    descriptors: tuple[
        Descriptor, ...
    ]  # further ones that the pickle refers to: shared tensors, pipes
    # of the resource tracker, which unlinks named shared memory at exit; if there is one
    tracker: Descriptor | None
    modules: tuple[
        str, ...
    ]  # those that the pickle names and that should be imported beforehand, see `preload`

    @classmethod
    def dumps(cls, obj: object, previous: SharedPickle | None = None) -> SharedPickle:
        """Pickle `obj`; `previous` is returned if nothing has changed since. 0.7 GB are compared in a second."""
        large: list[memoryview] = []
        descriptors: list[Descriptor] = []

        def keep_large(buffer: PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes >= LARGE:
                large.append(view)
            return view.nbytes < LARGE

        whole = pickled = dump_shared(obj, keep_large, descriptors)
        if len(whole) >= LARGE:
            large.append(memoryview(whole))
            pickled = b""
        if previous is not None and previous._is(pickled, large, descriptors):
            return previous
        memory, extents = _in_new_memory(large)
        number = getattr(resource_tracker._resource_tracker, "_fd", None)
        tracker = None if number is None else Descriptor.duplicate(number)
        modules = modules_named_in(whole)
        return cls(uuid.uuid4().int, pickled, memory, extents, tuple(descriptors), tracker, modules)

    def loads(self) -> Any:
        mine = resource_tracker._resource_tracker
        # A tracker of this process's own would unlink shared memory of the other's when this
        # process ends.
        if self.tracker is not None and getattr(mine, "_fd", None) is None:
            mine._fd = os.dup(self.tracker.number)  # type: ignore[attr-defined]
        buffers = self._mapped()
        pickled = self.pickled or buffers.pop()
        try:
            return load_message(pickled, buffers, self.descriptors)
        except ModuleNotFoundError as error:
            remedy = f"cloudpickle.register_pickle_by_value(sys.modules[{error.name!r}])"
            add_note(
                error,
                f"headrace: if no other process can import it, call {remedy} before the first iter()",
            )
            raise

    def _mapped(self) -> list[memoryview]:
        if self.memory is None:
            return []
        mapped = memoryview(mmap.mmap(self.memory.number, 0, flags=mmap.MAP_PRIVATE))
        return [mapped[offset : offset + size] for offset, size in self.extents]

    def _is(
        self, pickled: bytes, large: list[memoryview], descriptors: Sequence[Descriptor]
    ) -> bool:
        return (
            pickled == self.pickled
            and len(descriptors) == len(self.descriptors)
            and all(map(Descriptor.same_file_as, descriptors, self.descriptors))
            and large == self._mapped()
        )


def _in_new_memory(
    views: Sequence[memoryview],
) -> tuple[Descriptor | None, tuple[tuple[int, int], ...]]:
    """Copy buffers into new shared memory, and seal it against writing; also returns where each lies."""
    if not views:
        return None, ()
    if hasattr(os, "memfd_create"):
        memory = Descriptor(
            os.memfd_create("headrace-functions", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        )
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            memory = Descriptor.duplicate(file.fileno())
    extents, end = [], 0
    with open(memory.number, "wb", closefd=False) as file:
        for view in views:
            extents.append((end, view.nbytes))
            file.seek(end)
            file.write(view)
            end += aligned(view.nbytes)
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(
            memory.number,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK,
        )
    return memory, tuple(extents)


class SharingPickler(Pickler):
    """A pickler with the reducers of `multiprocessing` and of `torch.multiprocessing`."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(
            obj, torch.Tensor | torch.UntypedStorage | torch.TypedStorage
        ) and _in_shared_memory(obj):
            if isinstance(obj, torch.UntypedStorage) and get_sharing_strategy() == "file_system":  # type: ignore[no-untyped-call]
                # Torch's own reducer counts on each pickle being loaded once; here several
                # processes load it, or none.
                return open_shared_file, share_by_file(obj)
        elif isinstance(obj, _LEFT_TO_CLOUDPICKLE):
            return super().reducer_override(obj)
        reduce = ForkingPickler._extra_reducers.get(type(obj))  # type: ignore[attr-defined]
        return super().reducer_override(obj) if reduce is None else reduce(obj)


# ForkingPickler's reducers for these serve old versions of Python, or share the memory.
_LEFT_TO_CLOUDPICKLE = (
    *(types.MethodType, functools.partial, type(list.append), type(int.__add__)),
    *(torch.Tensor, torch.UntypedStorage, torch.TypedStorage),
)


def _in_shared_memory(obj: torch.Tensor | torch.UntypedStorage | torch.TypedStorage) -> bool:
    if isinstance(obj, torch.Tensor):
        if obj.is_quantized or obj.is_nested or obj.layout is not torch.strided:
            return False
        storage = obj.untyped_storage()
    else:
        storage = obj if isinstance(obj, torch.UntypedStorage) else untyped(obj)
    return storage.device.type == "cpu" and len(storage) > 0 and storage.is_shared()


def dump_shared(
    obj: object, buffer_callback: Callable[[PickleBuffer], object], descriptors: list[Descriptor]
) -> bytes:
    """As `dump_parts`, for a process that shares what `multiprocessing` shares."""
    before = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning())  # type: ignore[arg-type]
    try:
        return dump_parts(obj, buffer_callback, descriptors, pickler=SharingPickler)
    finally:
        context.set_spawning_popen(before)


def why_not_picklable(obj: object) -> str | None:
    """The pickling error of `obj` as text, from Python 3.14 on with the path to the culprit; None if there is none."""
    try:
        dump_shared(obj, lambda buffer: None, [])
    except Exception as error:
        return ": ".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
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
    def DupFd(descriptor: Descriptor) -> Descriptor:  # multiprocessing's name
        return descriptor
