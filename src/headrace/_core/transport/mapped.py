"""Shared memory that keeps no descriptor open, unlike `mmap.mmap` before Python 3.13."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, cast

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True) if hasattr(os, "memfd_create") else None
_FAILED = ctypes.c_void_p(-1).value
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def address_of(buffer: memoryview) -> int:
    """The first byte of a buffer in this process."""
    address: int = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    return address


class Mapped:
    """The memory of a descriptor, readable and writable, until this and the last view of it are collected.

    Attributes:
        array: all of it, as bytes.
        address: its first byte in this process.

    Args:
        descriptor: may be closed afterwards.
        size: in bytes.

    Raises:
        OSError: it cannot be mapped.
    """

    __slots__ = ("address", "array")

    def __init__(self, descriptor: int, size: int) -> None:
        assert _libc is not None
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
        memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(memory, _libc.munmap, address, size).atexit = False
        self.address: int = address
        self.array = np.frombuffer(cast(Any, memory), dtype=np.uint8)

    def discard(self) -> None:
        """Return the memory to the kernel (`MADV_REMOVE`); in every process it then reads as zeros."""
        assert _libc is not None
        if _libc.madvise(self.address, self.array.nbytes, mmap.MADV_REMOVE):
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
