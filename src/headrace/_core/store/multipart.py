"""Large ranges read in parallel parts: one connection rarely saturates a network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LARGE = 16 * 2**20  # bytes; S3's and GCS's guides recommend 8 to 16 MiB a request
PART = 8 * 2**20
AT_ONCE = 8  # parts of one object in flight; 64 MiB in flight cover 10 Gbit/s at 50 ms

ReadPart = Callable[[int, int], Awaitable[memoryview]]


async def read_parts(start: int, length: int, read: ReadPart, *, first: memoryview | None = None) -> memoryview:
    """Read a long range in parallel parts.

    Args:
        start: the first byte.
        length: how many bytes.
        read: reads a part, given its start and its length, and checks its version.
        first: the first of these bytes, if they have been read.

    Returns:
        A read-only view of all bytes.
    """
    whole = bytearray(length)
    view = memoryview(whole)
    have = 0 if first is None else len(first)
    if first is not None:
        view[:have] = first
    offsets = iter(range(have, length, PART))

    async def fill() -> None:
        for offset in offsets:
            size = min(PART, length - offset)
            view[offset : offset + size] = await read(start + offset, size)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, -(-(length - have) // PART))):
                group.create_task(fill())
    except BaseExceptionGroup as errors:
        failure = errors.exceptions[0]  # the others are of the same object, and the first ended them
    else:
        return view.toreadonly()
    raise failure
