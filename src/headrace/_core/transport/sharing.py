"""Pickling of functions and datasets for processes of this machine, where shared objects stay shared.

`multiprocessing` primitives (`Value`, `Array`, `Lock`, `Queue`, `Event`, `Pipe`), proxies of a manager and tensors in
shared memory are pickled as for a child of `multiprocessing`: by name, or as file descriptors. In samples and batches
(see `pickling`) they are copied.
"""

from __future__ import annotations

import functools
import hashlib
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import context, resource_tracker
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import SemLock
from pickle import PickleBuffer

import torch
from torch.multiprocessing import get_sharing_strategy

from headrace._core.interface.async_contexts import reduce_unentered
from headrace._core.torchcompat.private import open_shared_file, share_by_file, untyped
from headrace._core.transport.descriptors import Descriptor
from headrace._core.transport.pickling import ByValue, dump_with


class ForkOnlyError(TypeError):
    """An object holds a semaphore without a name, which only forks of this process can use."""


class SharingPickler(ByValue):
    """A pickler with the reducers of `multiprocessing` and of `torch.multiprocessing`."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, SemLock) and getattr(obj, "_is_fork_ctx", False):
            raise ForkOnlyError(
                "it holds a lock of multiprocessing's 'fork' context, which only processes forked from this one share; "
                "one of multiprocessing.get_context('spawn') can be sent to others"
            )
        if (reduced := reduce_unentered(obj, 5)) is not NotImplemented:
            return reduced
        if isinstance(obj, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            if not _in_shared_memory(obj):
                if type(obj) is torch.nn.Parameter and not obj.__dict__:
                    return torch.nn.Parameter, (obj.data, obj.requires_grad)
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
        ForkOnlyError: `obj` holds an object that only forks of this process can use.
        Exception: `obj` cannot be pickled.
    """
    with _spawning(_Spawning()):
        return dump_with(SharingPickler, obj, buffer_callback, descriptors)


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
