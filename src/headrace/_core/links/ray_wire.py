"""What the consumer and the actor of an engine on a Ray cluster exchange, as Ray carries it."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np

from headrace._core.transport.pickling import Message, load_message

IN_BAND = 64 * 1024  # bytes of buffers up to which an object is one byte string; below 100 KB it comes with Ray's reply

Packed = bytes | tuple[bytes, list[np.ndarray[Any, Any]]]
"""An object as one byte string, or as a pickle with arrays of bytes that lie in Ray's object store without a copy."""


def pack(message: Message) -> Packed:
    if sum(buffer.nbytes for buffer in message.buffers) <= IN_BAND:
        return pickle.dumps((message.pickled, [bytes(buffer) for buffer in message.buffers]), protocol=5)
    empty: np.ndarray[Any, Any] = np.empty(0, dtype=np.uint8)
    return message.pickled, [np.frombuffer(each, np.uint8) if each.nbytes else empty for each in message.buffers]


def unpack(packed: Packed) -> Any:
    """The object, its tensors and arrays in memory of this process, which can be written to.

    What Ray gives is a view of its object store, read-only, and shared with other readers. This is the only copy on
    this side; the store's object can be released behind it.
    """
    pickled, found = pickle.loads(packed) if isinstance(packed, bytes) else packed
    return load_message(pickled, [memoryview(bytearray(buffer)) for buffer in found])


def unpack_views(packed: Packed) -> Any:
    """The object, its tensors and arrays read-only views of what Ray gave."""
    parts: tuple[bytes, list[Any]] = pickle.loads(packed) if isinstance(packed, bytes) else packed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given (buffer|NumPy array) is not writable", UserWarning)  # of torch
        return load_message(parts[0], [memoryview(buffer).cast("B") for buffer in parts[1]])
