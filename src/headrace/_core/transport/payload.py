"""Pickled objects that cross several processes, and are unpickled in the last."""

from __future__ import annotations

import pickle

import numpy as np

from headrace._core.transport.packing import Layout, TensorPacker, unpacked
from headrace._core.transport.pickling import dump_parts, out_of_band


class PickledPayload:
    """A pickled object that other processes forward without running the classes in it.

    Args:
        pickled: the pickle.
        layout: of the packed tensors, which are in the last buffer; None if there are none.
        buffers: what the pickle refers to.
    """

    __slots__ = ("buffers", "layout", "pickled")

    def __init__(self, pickled: bytes, layout: Layout | None, *buffers: memoryview) -> None:
        self.pickled = pickled
        self.layout = layout
        self.buffers = buffers

    @classmethod
    def dumps(cls, obj: object, *, copied: bool = False) -> PickledPayload:
        """Pickle `obj`, its large buffers copied if `copied`, else referred to; errors of pickling are raised."""
        found: list[pickle.PickleBuffer] = []
        packer = TensorPacker()
        pickled = dump_parts(obj, found, [], packer)
        buffers, layout = packer.pack(found)
        return cls(pickled, layout, *(map(_copy, buffers) if copied else buffers))

    def loads(self) -> object:
        """The object, its tensors and arrays views of the buffers."""
        buffers = self.buffers if self.layout is None else unpacked(self.buffers, self.layout)
        return pickle.loads(self.pickled, buffers=buffers)  # any objects, to pickle

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_payload, (self.pickled, self.layout, *map(out_of_band, self.buffers))


def _copy(buffer: memoryview) -> memoryview:
    return np.frombuffer(buffer, dtype=np.uint8).copy().data if buffer.nbytes else buffer


def _restore_payload(pickled: bytes, layout: Layout | None, *buffers: bytes | memoryview) -> PickledPayload:
    return PickledPayload(pickled, layout, *(memoryview(buffer) for buffer in buffers))
