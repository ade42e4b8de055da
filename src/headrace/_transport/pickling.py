"""Objects to bytes and back, with large buffers out of band.

A message is a pickle (protocol 5), and the buffers of tensors, arrays and memoryviews. The buffers
lie in a *region*, each aligned to 64 bytes. Unpickling makes views into the region without a copy.

Classes and functions are pickled by the rules of cloudpickle. So a batch class from a script or a
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

from headrace._base.descriptors import Descriptor, received, received_descriptor
from headrace._base.text import add_note, error_message
from headrace._records.batches import is_table
from headrace._transport.exceptions import reduce_exception, without_unpicklable_parts
from headrace._transport.slabs import SMALL, SMALL_PART
from headrace.collate import tensor_of
from headrace.errors import NotPicklableError, RemoteError

E = TypeVar("E", bound=BaseException)


class Message(NamedTuple):
    """A pickled object, with references to the object's buffers."""

    pickled: bytes
    buffers: list[memoryview]  # flat views of bytes, in the order of the pickle
    descriptors: Sequence[Descriptor] = ()


def dump_message(
    obj: object,
    *,
    plain: bool = False,
    smallest: int = 0,
    pickler: type[cloudpickle.Pickler] | None = None,
) -> Message:
    """Pickle `obj`.

    Args:
        obj: The object.
        plain: Whether to use the pickler of Python, which does not look for tensors or for classes
            of `__main__`: ten times as fast.
        smallest: Size in bytes; smaller buffers are copied into the pickle.
        pickler: The class of another pickler. Default: `Pickler`.
    """
    buffers: list[memoryview] = []

    def keep_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < smallest:
            return True
        buffers.append(view)
        return False

    if plain:
        return Message(pickle.dumps(obj, protocol=5, buffer_callback=keep_small), buffers)
    stream = io.BytesIO()
    pickling: Any = (pickler or Pickler)(stream, protocol=5, buffer_callback=keep_small)
    pickling.descriptors = []
    pickling.dump(obj)
    return Message(stream.getvalue(), buffers, pickling.descriptors)


def out_of_band(view: memoryview) -> pickle.PickleBuffer:
    """Return a `PickleBuffer` for the memory of `view`.

    CPython 3.11 crashes if the garbage collector clears a memoryview under a `PickleBuffer`. An
    array for the same memory hides the memoryview from the garbage collector.
    """
    dense = view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()
    array: Any = np.frombuffer(dense, dtype=np.uint8) if len(dense) else b""
    return pickle.PickleBuffer(array)


def copy_of(buffer: Any) -> memoryview:
    """Return a copy of a buffer's bytes.

    NumPy asks the kernel for huge pages: 64 MB take a fifth of the time of `bytearray`.
    """
    return np.array(memoryview(buffer), dtype=np.uint8).data


def load_message(
    pickled: bytes | memoryview,
    buffers: Sequence[memoryview],
    descriptors: Sequence[Descriptor] = (),
) -> object:
    """Return the object, with tensors and arrays as views of `buffers`."""
    if not descriptors:
        return pickle.loads(pickled, buffers=buffers)
    with received(descriptors):
        return pickle.loads(pickled, buffers=buffers)


def format_error(error: BaseException) -> str:
    """Return `error` with the traceback, as Python prints an uncaught error.

    Notes of headrace are left out, because the notes travel with the error.
    """
    try:
        return "".join(
            part
            for part in traceback.format_exception(error)
            if not part.startswith("headrace: ")
        )
    except BaseException:  # user code: notes or a class without a printable form
        return f"{type(error).__name__}: {error_message(error)}\n"


def picklable_error(error: E) -> E | RemoteError:
    """Return an exception whose copy has the same text as `error`.

    The result is `error`, a copy without some attributes, or a `RemoteError`. The function tries
    both pickling and unpickling in the worker, where a failure can still be reported.
    """
    text = _text_of(error)
    if _text_of(_copied(error)) == text:
        return error
    with suppress(BaseException):  # user code: __str__, __setstate__
        reduced = without_unpicklable_parts(
            error, lambda part: _copied(part) is not _LOST
        )
        if type(reduced) is type(error) and _text_of(_copied(reduced)) == text:
            return reduced
    return RemoteError(
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        message=error_message(error),
    )


def not_picklable(what: str, reason: BaseException, remedy: str) -> NotPicklableError:
    """Return the error for an unpicklable value.

    The cause is `reason`, the pickling error.
    """
    error = NotPicklableError(
        what=what, reason=f"{type(reason).__name__}: {reason}", remedy=remedy
    )
    error.__cause__ = reason
    return error


def _text_of(error: BaseException) -> str:
    """Return an error's message without addresses of objects.

    The addresses differ in a copy.
    """
    return re.sub(" at 0x[0-9a-f]+", "", error_message(error))


def noted_error(error: E, where: str) -> E | RemoteError:
    """Return an error for another process, with the traceback in a note."""
    traceback = format_error(error).rstrip()
    portable = picklable_error(error)
    add_note(portable, f"{where}:\n{traceback}")
    return portable


_LOST: Any = object()


def _copied(obj: object) -> Any:
    """Return the object as another process unpickles it, or `_LOST`."""
    try:
        return load_message(*dump_message(obj))
    except BaseException:
        # user code: __reduce__, __init__, __setstate__ of a user's exception, or of its cause
        return _LOST


_CLOUDPICKLES = cloudpickle.Pickler._dispatch_table
_has_receivers_main = False


def prefer_references() -> None:
    """Pickle objects of the main module by reference from now on.

    For workers started by `multiprocessing`, where the receiver has the main module.
    """
    global _has_receivers_main
    _has_receivers_main = True


def _is_known(obj: type | types.FunctionType) -> bool:
    """Whether the receiver certainly has `obj`.

    `obj` is then pickled by reference, without a search by cloudpickle.
    """
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
    """Reduce code as cloudpickle does, with the file name.

    From 3.1.3 on, cloudpickle leaves out the file name. Tracebacks and warnings need the name to
    show source lines.
    """
    make, arguments = _CLOUDPICKLES[types.CodeType](code)
    return _code_in_file, ("".join(code.co_filename), make, arguments)


def _code_in_file(
    name: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]
) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)


_REDUCERS = {types.CodeType: _reduce_code}


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensors and byte buffers out of band.

    Exceptions are pickled together with causes.
    """

    descriptors: list[Descriptor]  # descriptors found so far

    @property
    def dispatch_table(self) -> dict[type, Any]:
        """The table of reducers, read once for each pickle.

        The table of cloudpickle is a `ChainMap`, and costs 1.5 µs for each object of a user's
        class.
        """
        return copyreg.dispatch_table | _CLOUDPICKLES | _REDUCERS  # type: ignore[no-any-return]

    def reducer_override(self, obj: object) -> object:
        if type(obj) is torch.Tensor:
            return _reduce_tensor(obj)
        # The next objects are in each batch.
        if isinstance(obj, np.dtype) or obj is np.dtype or obj is _restore_array:
            return NotImplemented
        if type(obj) is memoryview:
            return _restore_memoryview, (out_of_band(obj), obj.format, obj.shape)
        if type(obj) is np.ndarray and not obj.flags.writeable:
            # Arrives writable, like any copy of an array.
            return obj.copy().__reduce_ex__(5)
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
            # Add the parts that cloudpickle leaves out.
            if isinstance(obj, type) and not issubclass(obj, enum.Enum):
                slots = (
                    {"__slots__": slots} if (slots := vars(obj).get("__slots__")) else {}
                )
                arguments[3].update(slots, __qualname__=obj.__qualname__)
                # Added by pickling an object of the class.
                state[0].pop("__slotnames__", None)
            return reduced
        return NotImplemented


def _reduce_tensor(tensor: torch.Tensor) -> object:
    try:
        values: Any = tensor.numpy()  # faster than checking each property of the tensor
    except (TypeError, RuntimeError):
        pass
    else:
        if values.nbytes and values.flags.c_contiguous:
            # `bytearray(values)` would take an array with a single integer for a length.
            buffer = (
                bytearray(values.data)
                if values.nbytes <= SMALL
                else pickle.PickleBuffer(values)
            )
            return _restore_array, (buffer, values.dtype, values.shape)
    if (
        tensor.is_quantized
        or tensor.is_nested
        or tensor.layout is not torch.strided
        or not tensor.is_cpu
    ):
        return NotImplemented  # use torch's own pickling
    if 0 in tensor.stride() and tensor.numel() > 1 and not tensor.requires_grad:
        sizes = [
            1 if stride == 0 else size
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        # Made by `expand`: send each element once.
        if math.prod(sizes) < tensor.numel():
            return torch.Tensor.expand, (
                tensor.as_strided(sizes, tensor.stride()),
                tensor.shape,
            )
    dense = tensor.detach().resolve_conj().resolve_neg()
    strides = None
    if not dense.is_contiguous():
        # Keep dense bytes in another order (channels last, transposed). Any other layout becomes
        # contiguous.
        if dense.stride() == torch.empty_like(dense, device="meta").stride():
            strides = dense.stride()
        else:
            dense = dense.contiguous()
    flat: Any = (
        dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
        if dense.numel()
        else b""
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
    """Return a `pyarrow.Table` as an Arrow stream.

    If the table is a slice, pyarrow would pickle the whole underlying table.
    """
    import pyarrow

    stream = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def _restore_table(data: Any) -> Any:
    import pyarrow

    return pyarrow.ipc.open_stream(pyarrow.py_buffer(data)).read_all()


class PickledPayload:
    """A pickled object with buffers, for forwarding.

    Other processes forward the payload without unpickling, so no user class runs there.
    """

    __slots__ = ("buffers", "pickled")

    def __init__(self, pickled: bytes | memoryview, *buffers: bytes | memoryview) -> None:
        self.pickled = pickled
        self.buffers = tuple(memoryview(buffer) for buffer in buffers)

    @classmethod
    def dumps(cls, obj: object, *, copied: bool = False) -> PickledPayload:
        """Pickle `obj`, and raise pickling errors.

        Large buffers are copied if `copied`. Otherwise the payload refers to the buffers.
        """
        message = dump_message(obj, smallest=SMALL + 1)
        return cls(
            message.pickled, *map(copy_of, message.buffers) if copied else message.buffers
        )

    @property
    def nbytes(self) -> int:
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)

    def loads(self) -> object:
        """Return the object.

        Small buffers are copied. Large buffers become views of the region with all buffers.
        """
        small = SMALL_PART * sum(buffer.nbytes for buffer in self.buffers)
        buffers = [
            copy_of(buffer) if buffer.nbytes < small else buffer
            for buffer in self.buffers
        ]
        return pickle.loads(self.pickled, buffers=buffers)

    def __reduce__(self) -> tuple[object, ...]:
        pickled = (
            self.pickled
            if len(self.pickled) <= SMALL
            else out_of_band(memoryview(self.pickled))
        )
        return PickledPayload, (pickled, *map(out_of_band, self.buffers))
