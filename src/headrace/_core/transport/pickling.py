"""Objects to bytes and back: pickle protocol 5 with every large buffer out of band.

A message is a pickle and the buffers it refers to (tensors, arrays, memoryviews), laid out one
after the other in a *region*, each aligned to 64 bytes. Unpickling makes views into the region;
nothing is copied.

Classes and functions are pickled by cloudpickle's rules, so that a batch class of a script or a
notebook is the same class after the way to a worker and back.
"""

from __future__ import annotations

import copyreg
import enum
import io
import math
import pickle
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import torch

from headrace._core.batches import is_table
from headrace._core.descriptors import Descriptor, received, received_descriptor
from headrace._core.text import add_note, error_message, set_cause
from headrace._core.transport.exceptions import reduce_exception, without_unpicklable_parts
from headrace._core.transport.slabs import SMALL, SMALL_PART
from headrace.collate import tensor_of
from headrace.errors import RemoteError

E = TypeVar("E", bound=BaseException)


class Message(NamedTuple):
    """A pickled object; its buffers are referred to, not copied."""

    pickled: bytes
    buffers: list[memoryview]  # flat byte views, in the order in which the pickle refers to them
    descriptors: Sequence[Descriptor] = ()


def dump_message(obj: object, *, plain: bool = False) -> Message:
    """Pickle `obj`; with `plain`, without a look for tensors and classes of `__main__` in it: ten times as fast."""
    found: list[pickle.PickleBuffer] = []
    descriptors: list[Descriptor] = []
    if plain:
        pickled = pickle.dumps(obj, protocol=5, buffer_callback=found.append)
    else:
        pickled = dump_parts(obj, found.append, descriptors)
    return Message(pickled, [buffer.raw() for buffer in found], descriptors)


def out_of_band(view: memoryview) -> pickle.PickleBuffer:
    """A `PickleBuffer` of the memory of `view`.

    Not `PickleBuffer(view)`: CPython 3.11 crashes if the collector clears a memoryview under a
    PickleBuffer of it. An array of the same memory in between hides it from the collector.
    """
    dense = view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()
    array: Any = np.frombuffer(dense, dtype=np.uint8) if len(dense) else b""
    return pickle.PickleBuffer(array)


def copy_of(buffer: Any) -> memoryview:
    """A copy of a buffer's bytes. NumPy asks for huge pages: 64 MB take a fifth of the time of `bytearray`."""
    return np.array(memoryview(buffer), dtype=np.uint8).data


def load_message(
    pickled: bytes | memoryview,
    buffers: Sequence[memoryview],
    descriptors: Sequence[Descriptor] = (),
) -> object:
    """The object, its tensors and arrays views of `buffers`."""
    if not descriptors:
        return pickle.loads(pickled, buffers=buffers)
    with received(descriptors):
        return pickle.loads(pickled, buffers=buffers)


def format_error(error: BaseException) -> str:
    """`error` with its traceback, as Python prints an uncaught one; without headrace's notes, which travel with it."""
    try:
        return "".join(
            part for part in traceback.format_exception(error) if not part.startswith("headrace: ")
        )
    except BaseException:  # user code: an exception whose notes or class cannot be printed
        return f"{type(error).__name__}: {error_message(error)}\n"


def picklable_error(error: E) -> E | RemoteError:
    """An exception whose copy has the same text: `error`, or one without some attributes, or a `RemoteError`.

    Both directions are tried here, in the worker, which can still report a failure.
    """
    text = _text_of(error)
    for cause in dict.fromkeys((error.__cause__, None)):
        set_cause(error, cause)
        if _text_of(_copied(error)) == text:
            return error
    with suppress(BaseException):  # user code: __str__, __setstate__
        reduced = without_unpicklable_parts(error, lambda part: _copied(part) is not _LOST)
        if type(reduced) is type(error) and _text_of(_copied(reduced)) == text:
            return reduced
    return RemoteError(
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        message=error_message(error),
    )


def _text_of(error: BaseException) -> str:
    """The message of an error without addresses of objects, which are others in a copy."""
    return re.sub(" at 0x[0-9a-f]+", "", error_message(error))


def noted_error(error: E, where: str) -> E | RemoteError:
    """An error that another process can unpickle, with its traceback in a note."""
    traceback = format_error(error).rstrip()
    portable = picklable_error(error)
    add_note(portable, f"{where}:\n{traceback}")
    return portable


_LOST: Any = object()


def _copied(obj: object) -> Any:
    """The object as another process would have it; `_LOST` if that is impossible."""
    try:
        found: list[pickle.PickleBuffer] = []
        return pickle.loads(dump_parts(obj, found.append, []), buffers=found)
    except BaseException:
        # user code: __reduce__, __init__, __setstate__ of a user's exception, or of its cause
        return _LOST


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
    found: object = sys.modules.get(module)
    for name in obj.__qualname__.split(".") if _has_receivers_main else ():
        found = getattr(found, name, None)
    return found is obj


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """As cloudpickle, which from 3.1.3 on leaves out the file, for which tracebacks and warnings look."""
    make, arguments, *rest = _CLOUDPICKLES[types.CodeType](code)
    if code.co_filename in arguments:
        return make, arguments, *rest
    return _code_in_file, ("".join(code.co_filename), make, arguments)


def _code_in_file(
    name: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]
) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)


_REDUCERS = {types.CodeType: _reduce_code}


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensors and byte buffers out of band, and with the causes of exceptions."""

    descriptors: list[Descriptor]  # those that were met

    @property
    def dispatch_table(self) -> dict[type, Any]:
        """Read once for each pickle. cloudpickle's own is a `ChainMap`: 1.5 µs for each object of a user's class."""
        return copyreg.dispatch_table | _CLOUDPICKLES | _REDUCERS  # type: ignore[no-any-return]

    def reducer_override(self, obj: object) -> object:
        if type(obj) is torch.Tensor:
            return _reduce_tensor(obj)
        if isinstance(obj, np.dtype) or obj is np.dtype or obj is _restore_array:  # in each batch
            return NotImplemented
        if type(obj) is memoryview:
            return _restore_memoryview, (out_of_band(obj), obj.format, obj.shape)
        if type(obj) is np.ndarray and not obj.flags.writeable:
            return obj.copy().__reduce_ex__(5)  # which arrives writable, as any copy of an array is
        if is_table(obj):
            return _restore_table, (pickle.PickleBuffer(_table_bytes(obj)),)
        if isinstance(obj, BaseException):
            return reduce_exception(obj)
        if type(obj) is Descriptor:
            self.descriptors.append(obj)
            return received_descriptor, (len(self.descriptors) - 1,)
        if isinstance(obj, type | types.FunctionType) and not _is_known(obj):
            if obj.__module__ == "__mp_main__" and "__mp_main__" in sys.modules:
                cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
            reduced = super().reducer_override(obj)
            if type(reduced) is not tuple or len(reduced) < 6:  # by reference
                return reduced
            _, arguments, state, *_ = reduced
            if isinstance(obj, type) and not issubclass(
                obj, enum.Enum
            ):  # what cloudpickle leaves out
                slots = {"__slots__": slots} if (slots := vars(obj).get("__slots__")) else {}
                arguments[3].update(slots, __qualname__=obj.__qualname__)
                state[0].pop("__slotnames__", None)  # which pickling an object of the class adds
            return reduced
        return NotImplemented


def dump_parts(
    obj: object,
    buffer_callback: Callable[[pickle.PickleBuffer], object],
    descriptors: list[Descriptor],
    pickler: type[pickle.Pickler] = Pickler,
) -> bytes:
    """The pickle of `obj`; its buffers are given to `buffer_callback`, its descriptors appended to `descriptors`."""
    stream = io.BytesIO()
    pickling: Any = pickler(stream, protocol=5, buffer_callback=buffer_callback)
    pickling.descriptors = descriptors
    pickling.dump(obj)
    return stream.getvalue()


def _reduce_tensor(tensor: torch.Tensor) -> object:
    try:
        values: Any = tensor.numpy()  # faster than a look at each property of the tensor
    except (TypeError, RuntimeError):
        pass
    else:
        if values.nbytes and values.flags.c_contiguous:
            # Not `bytearray(values)`, which takes an array of one integer for a length.
            buffer = (
                bytearray(values.data) if values.nbytes <= SMALL else pickle.PickleBuffer(values)
            )
            return _restore_array, (buffer, values.dtype, values.shape)
    if (
        tensor.is_quantized
        or tensor.is_nested
        or tensor.layout is not torch.strided
        or not tensor.is_cpu
    ):
        return NotImplemented  # torch's own pickling is used
    if 0 in tensor.stride() and tensor.numel() > 1 and not tensor.requires_grad:
        sizes = [
            1 if stride == 0 else size
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        if math.prod(sizes) < tensor.numel():  # made by `expand`: its own elements are sent once
            return torch.Tensor.expand, (tensor.as_strided(sizes, tensor.stride()), tensor.shape)
    dense = tensor.detach().resolve_conj().resolve_neg()
    strides = None
    if not dense.is_contiguous():
        # Channels last, transposed: dense bytes in another order, which is kept. Any other layout
        # becomes contiguous.
        if dense.stride() == torch.empty_like(dense, device="meta").stride():
            strides = dense.stride()
        else:
            dense = dense.contiguous()
    flat: Any = (
        dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy() if dense.numel() else b""
    )
    return _restore_tensor, (
        pickle.PickleBuffer(flat),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.requires_grad,
        strides,
    )


def _restore_array(
    buffer: bytearray | memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> torch.Tensor:
    return torch.from_numpy(np.ndarray(shape, dtype, buffer))


def _restore_tensor(
    buffer: object,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool = False,
    strides: tuple[int, ...] | None = None,
) -> torch.Tensor:
    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    elif strides is None:
        tensor = tensor_of(buffer, dtype, shape)
    else:
        tensor = torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def _restore_memoryview(
    buffer: bytes | memoryview, item_format: str, shape: tuple[int, ...]
) -> memoryview:
    if item_format == "B" and len(shape) == 1:
        return memoryview(buffer).toreadonly()
    values = (
        np.empty(shape, item_format)
        if 0 in shape
        else np.frombuffer(buffer, item_format).reshape(shape)
    )
    return values.data.toreadonly()


def _table_bytes(table: Any) -> Any:
    """A `pyarrow.Table` as an Arrow stream: pyarrow would pickle all of what the table is a slice of."""
    import pyarrow

    stream = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def _restore_table(data: Any) -> Any:
    import pyarrow

    return pyarrow.ipc.open_stream(pyarrow.py_buffer(data)).read_all()


class PickledPayload:
    """A pickled object, and the buffers it refers to; other processes forward it without running the classes in it."""

    __slots__ = ("buffers", "pickled")

    def __init__(self, pickled: bytes | memoryview, *buffers: bytes | memoryview) -> None:
        self.pickled = pickled
        self.buffers = tuple(memoryview(buffer) for buffer in buffers)

    @classmethod
    def dumps(cls, obj: object, *, copied: bool = False) -> PickledPayload:
        """Pickle `obj`, its large buffers copied if `copied`, else referred to; errors of pickling are raised."""
        buffers: list[memoryview] = []

        def keep_large(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes > SMALL:
                buffers.append(view)
            return view.nbytes <= SMALL

        pickled = dump_parts(obj, keep_large, [])
        if copied:
            buffers = [copy_of(buffer) for buffer in buffers]
        return cls(pickled, *buffers)

    @property
    def nbytes(self) -> int:
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)

    def loads(self) -> object:
        """The object: small buffers copied, others views of the region that holds all of them."""
        small = SMALL_PART * sum(buffer.nbytes for buffer in self.buffers)
        buffers = [copy_of(buffer) if buffer.nbytes < small else buffer for buffer in self.buffers]
        return pickle.loads(self.pickled, buffers=buffers)  # any objects, to pickle

    def __reduce__(self) -> tuple[object, ...]:
        pickled = (
            self.pickled if len(self.pickled) <= SMALL else out_of_band(memoryview(self.pickled))
        )
        return PickledPayload, (pickled, *map(out_of_band, self.buffers))
