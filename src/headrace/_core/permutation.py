"""A random order of `range(n)` that is computed position by position, in constant memory."""

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
"""The most values: with them, the sum of two halves still fits into 32 bits."""

BLOCK = 16_384
"""Positions that are computed together, in 0.5 MB. Half as many take 1.2 times as long, twice as many 0.9 times."""

# Odd constants of a 32-bit hash with little bias: https://github.com/skeeto/hash-prospector,
# "lowbias32".
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_FIFTEEN, _WORD = np.uint32(15), np.uint64(32)
_KEY_INPUT = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True, repr=False)
class Permutation:
    """A random order of ``range(n)`` that takes no memory: each position is computed when it is asked for.

    The order of loaders with ``shuffle=True`` and a seed, and of `ElasticSampler`; the same on
    every machine. A sequence: an int is its index, or a slice or an array of integers, for which it
    gives a NumPy array of int64. An index of a slice costs 27 ns, 1.8 times as much as one of
    `torch.randperm` (benchmarks/permutation.py).

    A Feistel network (Luby and Rackoff, "How to Construct Pseudorandom Permutations from
    Pseudorandom Functions", 1988) over a rectangle of about √n × √n values, in which halves are
    added modulo its sides; values beyond the end are permuted again until they are within (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: generalized Feistel, and cycle
    walking). The round keys are BLAKE2b of the seed and the epoch. Its statistics are those of
    `torch.randperm` (tests/unit/test_permutation.py); it is no cipher.

    Args:
        n: number of values.
        seed: of the order, with `epoch`; both between 0 and 2**64 - 1.
        epoch: number of the epoch.

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
        # Each two rounds divide the bias by the side of the rectangle: for few values more rounds
        # are needed.
        rounds = 8 if n >= 1 << 16 else 16
        # About √n rows, of which the rectangle has the fewest values beyond `n`.
        root = math.isqrt(max(n, 1) - 1) + 1
        rows = min(range(root, root + min(root // 16, 64) + 1), key=lambda rows: -n % rows)
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
        """The value at a position, or an array of those at a slice or an array of positions.

        Raises:
            IndexError: a position is out of range, or is no integer.
        """
        array = (
            np.arange(*positions.indices(self.n))
            if isinstance(positions, slice)
            else np.asarray(positions)
        )
        if not array.size:
            return np.empty(array.shape, dtype=np.int64)
        if array.dtype.kind not in "iu":
            raise IndexError(f"positions must be integers, not {array.dtype}")
        least, greatest = int(array.min()), int(array.max())
        if least < -self.n or greatest >= self.n:
            wrong = least if least < -self.n else greatest
            raise IndexError(f"position {wrong} is out of range for {self.n} values")
        flat = array.reshape(-1).astype(np.int64)
        if least < 0:
            flat[flat < 0] += self.n
        for first in range(0, len(flat), BLOCK):
            flat[first : first + BLOCK] = self._at(flat[first : first + BLOCK].view(np.uint64))
        return (
            int(flat[0]) if isinstance(positions, int | np.integer) else flat.reshape(array.shape)
        )

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(map(np.ndarray.tolist, self.blocks()))

    def blocks(
        self, start: int = 0, stop: int | None = None, step: int = 1
    ) -> Iterator[NDArray[np.int64]]:
        """The values at ``range(start, stop, step)``, as arrays of up to 16,384; `stop` is the length by default.

        Example:
            >>> [block.tolist() for block in Permutation(10, seed=0, epoch=0).blocks(1, step=3)]
            [[5, 1, 7]]
        """
        wanted = range(self.n)[start:stop:step]
        for first in range(0, len(wanted), BLOCK):
            part = wanted[first : first + BLOCK]
            yield self._at(
                np.arange(part.start, part.stop, part.step, dtype=np.int64).view(np.uint64)
            )

    def _at(self, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The values at positions within range; overwrites the argument."""
        values = self._permuted(positions)
        outside = np.flatnonzero(values >= np.uint64(self.n))
        while outside.size:
            again = self._permuted(values[outside])
            values[outside] = again
            outside = outside[again >= np.uint64(self.n)]
        return values.view(np.int64)

    def _permuted(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass through the network, over all values of the rectangle; the argument is used as a buffer.

        Halves and hashes are of 32 bits, and all steps are in place: 64 bits throughout take 1.5
        times as long.
        """
        columns, wide = np.uint64(self._columns), values
        quotients = wide // columns
        halves = [quotients.astype(np.uint32)]
        np.multiply(quotients, columns, out=quotients)
        np.subtract(wide, quotients, out=wide)
        halves.append(wide.astype(np.uint32))
        hashed, other = np.empty_like(halves[0]), np.empty_like(halves[0])
        for number, key in enumerate(self._keys):
            changed, read = halves[number % 2], halves[1 - number % 2]
            side = self._columns if number % 2 else self._rows
            np.add(read, key, out=hashed)
            np.multiply(hashed, _FIRST, out=hashed)
            np.right_shift(hashed, _FIFTEEN, out=other)
            np.bitwise_xor(hashed, other, out=hashed)
            np.multiply(hashed, _SECOND, out=hashed)
            # From 32 random bits to range(side): the high word of the product with it.
            np.multiply(hashed, np.uint64(side), out=wide, dtype=np.uint64)
            np.right_shift(wide, _WORD, out=wide)
            np.copyto(hashed, wide, casting="unsafe")
            np.add(changed, hashed, out=changed)
            # The sum modulo `side`: where it is less, the difference wraps around and is the
            # greater one.
            np.subtract(changed, np.uint32(side), out=other)
            np.minimum(changed, other, out=changed)
        np.multiply(halves[0], columns, out=wide, dtype=np.uint64)
        np.add(wide, halves[1], out=wide)
        return wide
