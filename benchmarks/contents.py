"""Contents of a benchmark's objects, and the comparison of every byte of every object received.

An object begins with its own number, eight bytes of it; the rest is a slice of one block of noise,
at another offset for each number. A slice is cheap to make and to compare (2.6 µs for 56 KB), and
an object that is truncated, swapped with another, or wrong in one bit is detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = [
    "LONGEST",
    "check_order",
    "check_set",
    "content_of",
    "contents",
    "key_of",
    "numbers_of",
]

WORD = 8  # bytes
# Where a stretch can begin, in words; more than the objects of any benchmark.
STARTS = 1 << 17
# between the stretches of two numbers in a row; odd, so that no two numbers below STARTS share one
STEP = 40_503
LONGEST = 1 << 20  # bytes of an object

NOISE = np.random.default_rng(0).integers(
    0, 1 << 63, STARTS + LONGEST // WORD, dtype=np.uint64
)


def key_of(number: int) -> str:
    """The key of an object; keys sort as the numbers do."""
    return f"{number:06d}.bin"


def content_of(number: int, size: int) -> bytes:
    """The object of that number, `size` bytes (a multiple of 8)."""
    content = _stretch(number, size // WORD).copy()
    content[0] = number
    return content.tobytes()


def contents(count: int, size: int) -> dict[str, bytes]:
    """The first `count` objects by key."""
    return {key_of(number): content_of(number, size) for number in range(count)}


def numbers_of(objects: Iterable[Any], size: int) -> list[int]:
    """Which objects these are, after every byte has been compared.

    Args:
        objects: anything with a buffer.
        size: bytes that each should have.

    Raises:
        RuntimeError: one is not as it was stored; the run does not count.
    """
    return [_number_of(data, size) for data in objects]


def check_order(batches: Iterable[Sequence[int]], count: int) -> None:
    """That these are the first `count` objects, in their order.

    Raises:
        RuntimeError: they are not; the run does not count.
    """
    numbers = [number for batch in batches for number in batch]
    if numbers != list(range(count)):
        raise RuntimeError(
            f"{len(numbers)} of {count} objects came, or not in order: this run does not count"
        )


def check_set(batches: Iterable[Sequence[int]], count: int) -> None:
    """That these are the first `count` objects, each once, in whatever order.

    Raises:
        RuntimeError: they are not; the run does not count.
    """
    check_order([sorted(number for batch in batches for number in batch)], count)


def _number_of(data: Any, size: int) -> int:
    words = np.frombuffer(data, np.uint64) if len(data) == size else None
    number = STARTS if words is None else int(words[0])
    if (
        words is not None
        and number < STARTS
        and (words[1:] == _stretch(number, len(words))[1:]).all()
    ):
        return number
    raise RuntimeError(
        f"an object of {len(data)} bytes is not one of those that were stored: this run does not count"
    )


def _stretch(number: int, words: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    start = number * STEP % STARTS
    return NOISE[start : start + words]
