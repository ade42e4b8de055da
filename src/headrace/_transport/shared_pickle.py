"""Functions and datasets, pickled once for several processes.

The large parts of a `SharedPickle` are in sealed shared memory (a `memfd`). Sending a
`SharedPickle` to a process sends descriptors. The process maps the memory privately: unchanged
pages are shared, and changed pages become the process's own, as after a fork.

Shared objects stay shared: `multiprocessing` primitives (`Value`, `Array`, `Lock`, `Queue`,
`Event`, `Pipe`), proxies of a manager, and tensors in shared memory. The pickle holds names or file
descriptors, as for a child of `multiprocessing`. In samples and batches (see `pickling`), shared
objects are copied.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import mmap
import os
import pickle
import tempfile
import types
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from multiprocessing import context, resource_tracker
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch.multiprocessing import get_sharing_strategy

from headrace._base.descriptors import Descriptor
from headrace._base.text import add_note
from headrace._transport.pickling import (
    Message,
    Pickler,
    dump_message,
    load_message,
    out_of_band,
)
from headrace._transport.preload import modules_named_in
from headrace._transport.slabs import aligned
from headrace.errors import NotPicklableError

LARGE = 64 * 1024  # bytes; smaller buffers are copied into the pickle


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedPickle:
    """A pickled object for several processes.

    In each process, the large buffers are views of the same memory.
    """

    number: int  # unique in all processes
    # The pickle without large buffers. If the pickle is large, `pickled` is empty, and the last
    # buffer in `memory` is the pickle.
    pickled: bytes
    memory: Descriptor | None  # the large buffers; None if there are none
    # Offset and size of each buffer in `memory`, in bytes.
    extents: tuple[tuple[int, int], ...]
    # Other descriptors in the pickle: shared tensors, pipes.
    descriptors: tuple[Descriptor, ...]
    # The descriptor of the resource tracker, if any. The tracker unlinks named shared memory at
    # exit.
    tracker: Descriptor | None
    modules: tuple[str, ...]  # modules in the pickle, for an early import; see `preload`
    # Whether the receivers are on other machines: the memory is copied, and shared objects too.
    portable: bool = False

    @classmethod
    def dumps(
        cls, obj: object, previous: SharedPickle | None = None, *, portable: bool = False
    ) -> SharedPickle:
        """Pickle `obj`, or return `previous` if nothing has changed.

        The comparison takes a second for 0.7 GB.
        """
        dump = dump_message if portable else dump_shared
        message = dump(obj, smallest=LARGE)
        modules = modules_named_in(message.pickled)
        if len(message.pickled) >= LARGE:
            message.buffers.append(memoryview(message.pickled))
            message = message._replace(pickled=b"")
        if previous is not None and previous._is(message):
            return previous
        memory, extents = _in_new_memory(message.buffers)
        number = getattr(resource_tracker._resource_tracker, "_fd", None)
        tracker = None if number is None or portable else Descriptor.duplicate(number)
        return cls(
            uuid.uuid4().int,
            message.pickled,
            memory,
            extents,
            tuple(message.descriptors),
            tracker,
            modules,
            portable,
        )

    def __reduce__(self) -> tuple[object, ...]:
        if self.portable:
            parts = (
                self.number,
                self.pickled,
                self.modules,
                *map(out_of_band, self._mapped()),
            )
            return _from_other_machine, parts
        return SharedPickle, tuple(getattr(self, field.name) for field in fields(self))

    def loads(self) -> Any:
        mine = resource_tracker._resource_tracker
        # Use the tracker of the sending process. Otherwise a new tracker would unlink the shared
        # memory of the sending process when this process ends.
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
                f"headrace: if no other process can import it, call {remedy} "
                "before the first iter()",
            )
            raise

    def _mapped(self) -> list[memoryview]:
        if self.memory is None:
            return []
        mapped = memoryview(mmap.mmap(self.memory.number, 0, flags=mmap.MAP_PRIVATE))
        return [mapped[offset : offset + size] for offset, size in self.extents]

    def _is(self, message: Message) -> bool:
        return (
            message.pickled == self.pickled
            and len(message.descriptors) == len(self.descriptors)
            and all(map(Descriptor.same_file_as, message.descriptors, self.descriptors))
            and message.buffers == self._mapped()
        )


def _in_new_memory(
    views: Sequence[memoryview],
) -> tuple[Descriptor | None, tuple[tuple[int, int], ...]]:
    """Copy buffers into new shared memory, and seal the memory.

    Sealed memory cannot be written. The second result is the offset and size of each buffer.
    """
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


def _from_other_machine(
    number: int, pickled: bytes, modules: tuple[str, ...], *buffers: memoryview
) -> SharedPickle:
    """Return a pickle from another machine, for the processes of this machine."""
    memory, extents = _in_new_memory([memoryview(buffer) for buffer in buffers])
    return SharedPickle(number, pickled, memory, extents, (), None, modules)


class SharingPickler(Pickler):
    """A pickler with the reducers of `multiprocessing` and torch."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, torch.Tensor | torch.UntypedStorage) and _in_shared_memory(
            obj
        ):
            # The other reducer of torch expects exactly one load of each pickle. Here several
            # processes load the pickle, or no process.
            if get_sharing_strategy() == "file_system":  # type: ignore[no-untyped-call]
                raise pickle.PicklingError(
                    "a tensor in shared memory needs torch.multiprocessing.set_sharing_strategy("
                    "'file_descriptor')"
                )
        elif isinstance(obj, _LEFT_TO_CLOUDPICKLE):
            return super().reducer_override(obj)
        reduce = ForkingPickler._extra_reducers.get(type(obj))  # type: ignore[attr-defined]
        return super().reducer_override(obj) if reduce is None else reduce(obj)


# Leave these types to cloudpickle: the reducers of ForkingPickler serve old versions of Python, or
# share the memory.
_LEFT_TO_CLOUDPICKLE = (
    *(types.MethodType, functools.partial, type(list.append), type(int.__add__)),
    *(torch.Tensor, torch.UntypedStorage),
)


def _in_shared_memory(obj: torch.Tensor | torch.UntypedStorage) -> bool:
    if isinstance(obj, torch.UntypedStorage):
        storage = obj
    elif obj.is_quantized or obj.is_nested or obj.layout is not torch.strided:
        return False
    else:
        storage = obj.untyped_storage()
    return storage.device.type == "cpu" and len(storage) > 0 and storage.is_shared()


def dump_shared(obj: object, smallest: int = 0) -> Message:
    """Pickle like `dump_message`, and keep shared objects shared.

    Shared objects are the same as for a child of `multiprocessing`.
    """
    before = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning())  # type: ignore[arg-type]
    try:
        return dump_message(obj, smallest=smallest, pickler=SharingPickler)
    finally:
        context.set_spawning_popen(before)


def why_not_picklable(obj: object) -> str | None:
    """Return the pickling error of `obj` as text, or None.

    From Python 3.14 on, the text has the path to the unpicklable part.
    """
    try:
        dump_shared(obj)
    except Exception as error:
        return ": ".join(
            [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
        )
    return None


def raise_unpicklable(
    parts: Iterable[tuple[str, object, str]], error: Exception
) -> NoReturn:
    """Raise an error about the first unpicklable part, or else `error`.

    For each part, `parts` has the name, the object and the remedy.
    """
    for what, part, remedy in parts:
        if (reason := why_not_picklable(part)) is not None:
            raise NotPicklableError(what=what, reason=reason, remedy=remedy) from error
    raise error


def fingerprint(obj: object) -> bytes | None:
    """Return a digest of the pickle of `obj`, or None if unpicklable."""
    try:
        message = dump_shared(obj)
    except Exception:  # code that needs the pickle raises the error
        return None
    digest = hashlib.blake2b(message.pickled)
    for buffer in message.buffers:
        digest.update(buffer)
    return digest.digest()


class _Spawning:
    """A stand-in for a child process of `multiprocessing`.

    The stand-in collects the descriptors.
    """

    @staticmethod
    def duplicate_for_child(number: int) -> Descriptor:
        return Descriptor.duplicate(number)

    @staticmethod
    def DupFd(descriptor: Descriptor) -> Descriptor:  # the name in multiprocessing
        return descriptor
