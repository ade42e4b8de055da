"""Random order of `range(n)`, computed on demand in constant memory."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

LARGEST = 2**60
"""Largest number of values. The sum of two halves still fits into 32 bits."""

BLOCK = 16_384
"""Number of positions computed together, in 0.5 MB.

Blocks of half the size take 1.2 times as long, blocks of twice the size 0.9 times.
"""

# Odd constants of a 32-bit hash with little bias: https://github.com/skeeto/hash-prospector,
# "lowbias32".
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_FIFTEEN, _WORD = np.uint32(15), np.uint64(32)
_KEY_INPUT = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True, repr=False)
class Permutation:
    """A random order of ``range(n)``, computed on demand.

    Loaders with ``shuffle=True`` and a seed, and `ElasticSampler`, use this order. The order takes
    no memory, and is equal on every machine. A permutation is a sequence. An index is an int, a
    slice or an array of integers. For a slice or an array, the result is a NumPy array of int64.
    Each value of a slice costs 27 ns, 1.8 times the cost of a value of `torch.randperm`
    (benchmarks/permutation.py).

    The algorithm is a Feistel network (Luby and Rackoff, "How to Construct Pseudorandom
    Permutations from Pseudorandom Functions", 1988) over a rectangle of about √n × √n values.
    Halves are added modulo the sides of the rectangle. Values beyond the end are permuted again
    until within range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002:
    generalized Feistel, and cycle walking). The round keys are BLAKE2b of the seed and the epoch.
    The statistics match `torch.randperm` (tests/unit/test_permutation.py). The permutation is not a
    cipher.

    Args:
        n: number of values, 0 to 2**60.
        seed: seed of the order, 0 to 2**64 - 1.
        epoch: number of the epoch, 0 to 2**64 - 1. Each epoch has another order.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> order = Permutation(10, seed=0)
        >>> order[:]
        array([4, 5, 9, 8, 1, 3, 2, 7, 0, 6])
        >>> order[2], order[-1], order[[2, 9]].tolist()
        (9, 6, [9, 6])
        >>> Permutation(10**9, seed=0)[500_000_000:500_000_003]
        array([526686746, 878451399, 335532236])
    """

    n: int
    seed: int
    epoch: int = 0
    _rows: int = field(init=False, compare=False)
    _columns: int = field(init=False, compare=False)
    _keys: NDArray[np.uint32] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        n = self.n
        if not 0 <= n <= LARGEST:
            raise ValueError(f"n={n} must be between 0 and 2**60")
        for name, number in (("seed", self.seed), ("epoch", self.epoch)):
            if not 0 <= number < 2**64:
                raise ValueError(f"{name}={number} must be between 0 and 2**64 - 1")
        key = _KEY_INPUT.pack(self.seed, self.epoch)
        digest = hashlib.blake2b(key, digest_size=64, person=b"headrace order").digest()
        # Every two rounds divide the bias by the side of the rectangle. So few values need more
        # rounds.
        rounds = 8 if n >= 1 << 16 else 16
        # Choose about √n rows, with the fewest values of the rectangle beyond `n`.
        root = math.isqrt(max(n, 1) - 1) + 1
        rows = min(
            range(root, root + min(root // 16, 64) + 1), key=lambda rows: -n % rows
        )
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_columns", -(-n // rows))
        object.__setattr__(
            self, "_keys", np.frombuffer(digest, dtype="<u4")[:rounds].astype(np.uint32)
        )

    def __reduce__(self) -> tuple[type[Permutation], tuple[int, int, int]]:
        return Permutation, (self.n, self.seed, self.epoch)

    def __repr__(self) -> str:
        return f"Permutation({self.n}, seed={self.seed}, epoch={self.epoch})"

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, positions: int | np.integer) -> int: ...
    @overload
    def __getitem__(
        self, positions: slice | Sequence[int] | NDArray[np.integer]
    ) -> NDArray[np.int64]: ...
    def __getitem__(
        self, positions: int | np.integer | slice | Sequence[int] | NDArray[np.integer]
    ) -> int | NDArray[np.int64]:
        """Return the value at a position, or an array of values.

        Args:
            positions: a position, or a slice or an array of positions.

        Raises:
            IndexError: a position is out of range, or is no integer.
        """
        if isinstance(positions, slice):
            positions = np.arange(*positions.indices(self.n))
        array = np.asarray(positions)
        if not array.size:
            return np.empty(array.shape, dtype=np.int64)
        if array.dtype.kind not in "iu":
            raise IndexError(f"positions must be integers, not {array.dtype}")
        wrong = array[(array < -self.n) | (array >= self.n)]
        if wrong.size:
            raise IndexError(f"position {wrong[0]} is out of range for {self.n} values")
        flat = array.reshape(-1).astype(np.int64)
        flat[flat < 0] += self.n
        for first in range(0, len(flat), BLOCK):
            block = flat[first : first + BLOCK]
            block[:] = self._at(block.view(np.uint64))
        return int(flat[0]) if array.ndim == 0 else flat.reshape(array.shape)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(map(np.ndarray.tolist, self.blocks()))

    def blocks(
        self, start: int = 0, stop: int | None = None, step: int = 1
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the values at ``range(start, stop, step)`` in blocks.

        Args:
            start: first position.
            stop: end of the positions; by default the length.
            step: distance of positions.

        Yields:
            Arrays of up to 16,384 values, int64.

        Example:
            >>> [block.tolist() for block in Permutation(10, seed=0, epoch=0).blocks(1, step=3)]
            [[5, 1, 7]]
        """
        wanted = range(self.n)[start:stop:step]
        for first in range(0, len(wanted), BLOCK):
            part = wanted[first : first + BLOCK]
            yield self[np.arange(part.start, part.stop, part.step)]

    def _at(self, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the values at positions within range.

        The argument is overwritten.
        """
        values = self._permuted(positions)
        outside = np.flatnonzero(values >= np.uint64(self.n))
        while outside.size:
            again = self._permuted(values[outside])
            values[outside] = again
            outside = outside[again >= np.uint64(self.n)]
        return values.view(np.int64)

    def _permuted(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Pass values of the rectangle through the network once.

        The argument is used as a buffer. Halves and hashes have 32 bits: 64 bits take
        1.5 times as long.
        """
        columns = np.uint64(self._columns)
        row, column = np.divmod(values, columns)
        halves = [row.astype(np.uint32), column.astype(np.uint32)]
        for number, key in enumerate(self._keys):
            side = self._columns if number % 2 else self._rows
            hashed = halves[1 - number % 2] + key
            hashed *= _FIRST
            hashed ^= hashed >> _FIFTEEN
            hashed *= _SECOND
            # Map 32 random bits to range(side): take the high word of the product with `side`.
            np.multiply(hashed, np.uint64(side), out=values, dtype=np.uint64)
            values >>= _WORD
            changed = values.astype(np.uint32)
            changed += halves[number % 2]
            # Reduce the sum modulo `side`. If the sum is less than `side`, the difference wraps
            # around and is greater than the sum.
            halves[number % 2] = np.minimum(changed, changed - np.uint32(side))
        np.multiply(halves[0], columns, out=values, dtype=np.uint64)
        values += halves[1]
        return values
