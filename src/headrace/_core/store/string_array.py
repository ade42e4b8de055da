"""Compact storage for millions of strings: one buffer of UTF-8, and offsets."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pickle import PickleBuffer
from typing import Any, overload

# Keys of files may have bytes that are not UTF-8, which Python holds as surrogates.
_ERRORS = "surrogatepass"
_SMALL = 2**32  # bytes; up to here an offset takes 4 bytes and not 8


class StringArrayBuilder:
    """Builds a `StringArray` from strings one by one."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._offsets = array("Q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, string: str) -> None:
        self._text += string.encode("utf-8", _ERRORS)
        self._offsets.append(len(self._text))

    def extend(self, other: StringArrayBuilder) -> None:
        base = len(self._text)
        self._text += other._text
        self._offsets.extend(base + offset for offset in other._offsets[1:])

    def build(self) -> StringArray:
        """The strings, in the order in which they were appended."""
        offsets = array("I", self._offsets) if len(self._text) < _SMALL else self._offsets
        return StringArray._of(bytes(self._text), offsets)


class StringArray(Sequence[str]):
    """An immutable sequence of strings.

    A million strings are two objects: a process that reads them changes no reference count but those of the two, so
    that a fork shares their memory. In a pickle they are two buffers: other processes on this machine map them.

    Raises:
        TypeError: one of them is not a string.

    Example:
        >>> keys = StringArray(["a.jpg", "b.jpg"])
        >>> keys[-1], len(keys), keys == ("a.jpg", "b.jpg")
        ('b.jpg', 2, True)
    """

    __slots__ = ("_offsets", "_text")

    _text: bytes | memoryview[int]
    _offsets: array[int] | memoryview[int]

    def __init__(self, strings: Iterable[str]) -> None:
        builder = StringArrayBuilder()
        for string in strings:
            if not isinstance(string, str):
                raise TypeError(f"{string!r} is not a str")
            builder.append(string)
        built = builder.build()
        self._text, self._offsets = built._text, built._offsets

    @classmethod
    def _of(cls, text: bytes | memoryview[int], offsets: array[int] | memoryview[int]) -> StringArray:
        built = cls.__new__(cls)
        built._text, built._offsets = text, offsets
        return built

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        typecode = memoryview(self._offsets).format
        if protocol < 5:
            return _from_buffers, (bytes(self._text), self._offsets.tobytes(), typecode)
        return _from_buffers, (PickleBuffer(self._text), PickleBuffer(self._offsets), typecode)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        # Once for every sample: 140 ns, in a copy that is mapped 170, where a tuple takes 10.
        if index.__class__ is not int:
            if isinstance(index, slice):
                return tuple(self[position] for position in range(*index.indices(len(self))))
            index = operator.index(index)

        offsets = self._offsets
        if index < 0:
            index += len(offsets) - 1
            if index < 0:
                raise IndexError("index out of range")
        return str(self._text[offsets[index] : offsets[index + 1]], "utf-8", _ERRORS)

    def __iter__(self) -> Iterator[str]:
        text, start = self._text, 0
        offsets = iter(self._offsets)
        next(offsets)
        for stop in offsets:
            yield str(text[start:stop], "utf-8", _ERRORS)
            start = stop

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return self._text == other._text and list(self._offsets) == list(other._offsets)
        if isinstance(other, tuple):
            return len(self) == len(other) and all(map(operator.eq, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a tuple's it would have to make every string

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"{type(self).__name__}([{shown}{', …' if len(self) > 3 else ''}], {len(self)} in all)"

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return len(self._text) + len(self._offsets) * self._offsets.itemsize


def _from_buffers(text: bytes | memoryview[int], offsets: bytes | memoryview[int], typecode: str) -> StringArray:
    return StringArray._of(text, memoryview(offsets).cast("B").cast(typecode))  # type: ignore[call-overload]
