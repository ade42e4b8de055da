"""Objects to bytes and back: pickle protocol 5 with every large buffer out of band.

A message is a pickle and the buffers it refers to (tensors, arrays, memoryviews), laid out one after the other in a
*region*, each aligned to 64 bytes. Unpickling makes views into the region; nothing is copied.

Classes and functions are pickled by cloudpickle's rules, so that a batch class of a script or a notebook is the same
class after the way to a worker and back.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import cloudpickle
import numpy as np
import torch

from headrace._core.descriptors import Descriptor, received, received_descriptor
from headrace._core.text import set_cause
from headrace._core.transport.exceptions import reduce_exception, without_unpicklable_parts
from headrace._core.transport.slabs import SMALL, Arena, aligned
from headrace.errors import RemoteError

if TYPE_CHECKING:
    import obstore

E = TypeVar("E", bound=BaseException)


class Message(NamedTuple):
    """A pickled object, its buffers not yet copied to their region.

    Attributes:
        pickled: the pickle, without the buffers.
        buffers: flat byte views, in the order in which the pickle refers to them.
        offsets: where each buffer starts in the region, in bytes.
        placed: for each buffer, whether it is in its place already, in the arena's slab.
        size: the region's size in bytes.
        descriptors: the file descriptors that the pickle refers to.
    """

    pickled: bytes
    buffers: list[memoryview]
    offsets: list[int]
    placed: list[bool]
    size: int
    descriptors: Sequence[Descriptor] = ()


def dump_message(obj: object, arena: Arena | None = None, *, plain: bool = False) -> Message:
    """Pickle `obj`; its large buffers are referred to, not copied.

    Args:
        obj: anything that can be pickled.
        arena: memory in which some of the buffers may be already; they keep their places, the others follow.
        plain: whether no tensors and no classes of `__main__` are looked for in it, which takes ten times as long.

    Raises:
        Exception: the error of pickling `obj`.
    """
    found: list[pickle.PickleBuffer] = []
    descriptors: list[Descriptor] = []
    if plain:
        pickled = pickle.dumps(obj, protocol=5, buffer_callback=found.append)
    else:
        pickled = dump_parts(obj, found.append, descriptors)
    buffers = [buffer.raw() for buffer in found]
    offsets, placed, end = [], [], arena.used if arena is not None else 0
    for buffer in buffers:
        place = arena.offset_of(buffer) if arena is not None else None
        placed.append(place is not None)
        offsets.append(end if place is None else place)
        if place is None:
            end += aligned(buffer.nbytes)
    return Message(pickled, buffers, offsets, placed, end, descriptors)


def out_of_band(view: memoryview) -> pickle.PickleBuffer:
    """A `PickleBuffer` of the memory of `view`.

    Not `PickleBuffer(view)`: CPython 3.11 crashes if the collector clears a memoryview under a PickleBuffer of it. An
    array of the same memory in between hides it from the collector.
    """
    dense = view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()
    array: Any = np.frombuffer(dense, dtype=np.uint8) if len(dense) else b""
    return pickle.PickleBuffer(array)


def dump_plain(obj: object) -> Message:
    """Pickle an object of our own classes and plain values: tensors and classes of `__main__` are not looked for."""
    return Message(pickle.dumps(obj, protocol=5), [], [], [], 0)


def load_message(
    pickled: bytes | memoryview, buffers: Sequence[memoryview], descriptors: Sequence[Descriptor] = ()
) -> object:
    """The object, its tensors and arrays views of `buffers`."""
    if not descriptors:
        return pickle.loads(pickled, buffers=buffers)
    with received(descriptors):
        return pickle.loads(pickled, buffers=buffers)


def format_error(error: BaseException) -> str:
    """`error` with its traceback, as Python prints an uncaught one."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # user code: an exception whose notes or class cannot be printed
        return f"{type(error).__name__}: {_message(error)}\n"


def picklable_error(error: E) -> E | RemoteError:
    """An exception that can be pickled and unpickled: `error`, or a copy without some attributes, or a `RemoteError`.

    Both directions are tried here, in the worker, which can still report a failure.
    """
    for cause in dict.fromkeys((error.__cause__, None)):
        set_cause(error, cause)
        if _survives(error):
            return error
    try:
        reduced = without_unpicklable_parts(error, _survives)
    except BaseException:  # user code: __str__, __setstate__
        return _substitute(error)
    return reduced if type(reduced) is type(error) and _survives(reduced) else _substitute(error)


def _survives(obj: object) -> bool:
    try:
        found: list[pickle.PickleBuffer] = []
        pickle.loads(dump_parts(obj, found.append, []), buffers=found)
    except BaseException:  # user code: __reduce__, __init__, __setstate__ of a user's exception, or of its cause
        return False
    return True


def _substitute(error: BaseException) -> RemoteError:
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return RemoteError(type_name=name, message=_message(error))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<str() of it raised {type(broken).__name__}>"


def _reduce_specially(obj: object, descriptors: list[Descriptor], packer: TensorPacker | None) -> object:
    if type(obj) is torch.Tensor:
        return (packer and packer.add(obj)) or _reduce_tensor(obj)
    if type(obj) is memoryview:
        return _reduce_memoryview(obj)
    if type(obj) is np.ndarray and not obj.flags.writeable:
        return _reduce_read_only(obj)
    # obstore is not imported here: 4 ms, for which a program without a store need not wait.
    if type(obj) is getattr(sys.modules.get("obstore"), "Bytes", None):
        return _restore_store_bytes, (out_of_band(memoryview(cast("obstore.Bytes", obj))),)
    if isinstance(obj, BaseException):
        return reduce_exception(obj)
    if type(obj) is Descriptor:
        descriptors.append(obj)
        return received_descriptor, (len(descriptors) - 1,)
    return NotImplemented


_CLOUDPICKLES = cloudpickle.Pickler._dispatch_table
_has_receivers_main = False


def prefer_references() -> None:
    """Refer to what the main module defines from now on: in workers that `multiprocessing` started, which have it."""
    global _has_receivers_main
    _has_receivers_main = True


def _is_known(obj: type | types.FunctionType) -> bool:
    """Whether the receiver has `obj` for certain: it is pickled by reference, without cloudpickle's search."""
    module: object = obj.__module__
    if not isinstance(module, str):
        return False
    if module.startswith("headrace."):
        return "<" not in obj.__qualname__
    return _has_receivers_main and _found(sys.modules.get(module), obj.__qualname__) is obj


def _found(found: object, path: str) -> object:
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensors and byte buffers out of band, and with the causes of exceptions."""

    descriptors: list[Descriptor]
    packer: TensorPacker | None

    @property
    def dispatch_table(self) -> dict[type, Any]:
        """Read once for each pickle. cloudpickle's own is a `ChainMap`: 1.5 µs for each object of a user's class."""
        return copyreg.dispatch_table | _CLOUDPICKLES  # type: ignore[no-any-return]

    def reducer_override(self, obj: object) -> object:
        reduced = _reduce_specially(obj, self.descriptors, self.packer)
        if reduced is NotImplemented and isinstance(obj, type | types.FunctionType) and not _is_known(obj):
            reduced = super().reducer_override(obj)
        return reduced


def dump_parts(
    obj: object,
    buffer_callback: Callable[[pickle.PickleBuffer], object],
    descriptors: list[Descriptor],
    packer: TensorPacker | None = None,
    pickler: type[Pickler] = Pickler,
) -> bytes:
    """The pickle of `obj`; its buffers are given to `buffer_callback`, its descriptors appended to `descriptors`."""
    stream = io.BytesIO()
    pickling = pickler(stream, protocol=5, buffer_callback=buffer_callback)
    pickling.descriptors = descriptors
    pickling.packer = packer
    pickling.dump(obj)
    return stream.getvalue()


def _reduce_read_only(array: np.ndarray[Any, Any]) -> object:
    """A read-only array, such as one of a file's bytes, becomes writable, as any copy of it is."""
    if array.dtype.kind not in "biufcSUmM":
        return NotImplemented
    if not array.size:
        return np.empty, (array.shape, array.dtype)
    if not array.flags.c_contiguous:
        return array.copy().__reduce_ex__(5)
    interface: dict[str, Any] = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
    # The same memory, not written to here; the owner is kept alive until it has been copied.
    view = np.asarray(types.SimpleNamespace(__array_interface__=interface, owner=array))
    return view.__reduce_ex__(5)


def _reduce_tensor(tensor: torch.Tensor) -> object:
    odd = tensor.is_quantized or tensor.is_nested
    if odd or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return NotImplemented  # torch's own pickling is used
    if 0 in tensor.stride() and tensor.numel() > 1 and not tensor.requires_grad:
        sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        if math.prod(sizes) < tensor.numel():  # made by `expand`: its own elements are sent once
            return torch.Tensor.expand, (tensor.as_strided(sizes, tensor.stride()), tensor.shape)
    dense = tensor.detach().resolve_conj().resolve_neg()
    strides = None
    if not dense.is_contiguous():
        # Channels last, transposed: dense bytes in another order, which is kept. Any other layout becomes contiguous.
        if dense.stride() == torch.empty_like(dense, device="meta").stride():
            strides = dense.stride()
        else:
            dense = dense.contiguous()
    flat: Any = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy() if dense.numel() else b""
    return _restore_tensor, (
        pickle.PickleBuffer(flat),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.requires_grad,
        strides,
    )


def _restore_tensor(
    buffer: object, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, strides: tuple[int, ...] | None
) -> torch.Tensor:
    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype)
    elif strides is None and dtype in NUMPY_DTYPES:  # a third of the time, and it does not release the GIL
        tensor = torch.from_numpy(np.ndarray(shape, NUMPY_DTYPES[dtype], buffer))  # type: ignore[arg-type]
    else:
        flat = torch.frombuffer(buffer, dtype=dtype)
        tensor = flat.view(shape) if strides is None else flat.as_strided(shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_memoryview(view: memoryview) -> object:
    return _restore_memoryview, (out_of_band(view), view.format, view.shape)


def _restore_memoryview(buffer: bytes | memoryview, item_format: str, shape: tuple[int, ...]) -> memoryview:
    if item_format == "B" and len(shape) == 1:
        return memoryview(buffer).toreadonly()
    values = np.empty(shape, item_format) if 0 in shape else np.frombuffer(buffer, item_format).reshape(shape)
    return values.data.toreadonly()


def _restore_store_bytes(buffer: bytes | memoryview) -> obstore.Bytes:
    import obstore

    return obstore.Bytes(bytes(buffer))


NUMPY_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

Layout = tuple[list[int], list[tuple[str, tuple[int, ...], int, int]]]
"""For each buffer that the pickle takes its number among the groups, from 1, or 0 for a buffer that is not packed; and
of each group the dtype, the shape, the number of tensors and the offset of the first, in bytes."""


@dataclass(slots=True, eq=False)
class _Group:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    tensors: list[torch.Tensor] = field(default_factory=list)
    # Writable: in the place of a buffer that is not, an unpickler takes no tensor.
    mark: pickle.PickleBuffer = field(default_factory=lambda: pickle.PickleBuffer(bytearray()))


class TensorPacker:
    """Collects the small tensors that a pickler meets."""

    def __init__(self) -> None:
        self._groups: dict[tuple[torch.dtype, torch.Size], _Group | None] = {}

    def add(self, tensor: torch.Tensor) -> tuple[object, ...] | None:
        """The tensor as pickled: the next one of a group, for which a mark stands; None if it is not packed."""
        if (
            tensor.is_nested
            or tensor.layout is not torch.strided
            or not tensor.is_cpu
            or tensor.requires_grad
            or not tensor.is_contiguous()
        ):
            return None
        key = tensor.dtype, tensor.shape
        try:
            group = self._groups[key]
        except KeyError:
            dtype = NUMPY_DTYPES.get(tensor.dtype)
            fits = 0 < tensor.nbytes <= SMALL
            group = self._groups[key] = _Group(dtype, tuple(tensor.shape)) if dtype is not None and fits else None
        if group is None:
            return None
        group.tensors.append(tensor)
        return next, (group.mark,)

    def pack(self, found: list[pickle.PickleBuffer]) -> tuple[list[memoryview], Layout | None]:
        """The buffers of a pickle, that of the packed tensors last, and its layout; None if there are none.

        Args:
            found: the buffers and the marks, in the order of the pickle.
        """
        groups = [group for group in self._groups.values() if group is not None]
        if not groups:
            return [buffer.raw() for buffer in found], None
        numbers = {id(group.mark): number for number, group in enumerate(groups, 1)}
        slots = [numbers.get(id(buffer), 0) for buffer in found]
        buffers = [buffer.raw() for buffer, slot in zip(found, slots, strict=True) if not slot]
        places, end = [], 0
        for group in groups:
            places.append((group.dtype.str, group.shape, len(group.tensors), end))
            end = aligned(end + len(group.tensors) * group.tensors[0].nbytes)
        region = np.empty(end, np.uint8)
        for group, (_, shape, count, offset) in zip(groups, places, strict=True):
            rows: np.ndarray[Any, Any] = np.ndarray((count, *shape), group.dtype, region, offset)
            torch.stack(group.tensors, out=torch.from_numpy(rows))
        return [*buffers, region.data], (slots, places)


def unpacked(buffers: Sequence[memoryview], layout: Layout) -> Iterator[memoryview | Iterator[torch.Tensor]]:
    """What the pickle takes in place of each buffer: the buffer itself, or for a mark the tensors of its group."""
    slots, places = layout
    own, groups = iter(buffers[:-1]), [_tensors(buffers[-1], *place) for place in places]
    return (groups[slot - 1] if slot else next(own) for slot in slots)


def _tensors(region: memoryview, dtype: str, shape: tuple[int, ...], count: int, offset: int) -> Iterator[torch.Tensor]:
    rows: Any = np.ndarray((count, *shape), dtype, region, offset)
    tensor_of: Callable[[Any], torch.Tensor] = torch.from_numpy
    return map(tensor_of, rows if shape else (rows[number, ...] for number in range(count)))


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
        pickled = dump_parts(obj, found.append, [], packer)
        buffers, layout = packer.pack(found)
        if copied:
            buffers = [
                np.frombuffer(buffer, dtype=np.uint8).copy().data if buffer.nbytes else buffer for buffer in buffers
            ]
        return cls(pickled, layout, *buffers)

    def loads(self) -> object:
        """The object, its tensors and arrays views of the buffers."""
        buffers = self.buffers if self.layout is None else unpacked(self.buffers, self.layout)
        return pickle.loads(self.pickled, buffers=buffers)  # any objects, to pickle

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_payload, (self.pickled, self.layout, *map(out_of_band, self.buffers))


def _restore_payload(pickled: bytes, layout: Layout | None, *buffers: bytes | memoryview) -> PickledPayload:
    return PickledPayload(pickled, layout, *(memoryview(buffer) for buffer in buffers))
