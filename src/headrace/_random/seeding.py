"""Seeds of random generators for transforms and collation.

Each batch has a seed. The caller's generators are restored.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import os
import random
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

_SEED_INPUT = struct.Struct("<QQQ")


def batch_seed(base: int, epoch: int, number: int) -> int:
    """Return the 64-bit seed of a batch.

    The seed is a BLAKE2b hash, so neighbouring batches get unrelated seeds.
    """
    digest = hashlib.blake2b(
        _SEED_INPUT.pack(base, epoch, number), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little")


def random_key(base: int, epoch: int) -> int:
    """Return the 128-bit key of an epoch's `randomized` functions."""
    digest = hashlib.blake2b(
        _SEED_INPUT.pack(base, epoch, 0), digest_size=16, person=b"randomized"
    ).digest()
    return int.from_bytes(digest, "little")


def seed_everything(seed: int) -> None:
    """Seed this process's `random`, NumPy and torch CPU generators.

    `seed` has 64 bits.
    """
    random.seed(seed)
    np.random.seed(np.array([seed & 0xFFFF_FFFF, seed >> 32], dtype=np.uint32))
    # Only the CPU generator: torch.manual_seed would also queue a call for a CUDA context, and the
    # context never exists here.
    torch.default_generator.manual_seed(seed)


class _Isolation(threading.local):
    """Isolation of random draws between threads.

    Attributes:
        lock: held during the exchange of states, never during user code.
        threads: number of threads inside `isolated_generators`.
        outside: states of the program, exchanged by the first thread inside.
        inside: whether this thread is in `isolated_generators`.
    """

    lock = threading.Lock()
    threads = 0
    outside: tuple[Any, ...] = ()
    inside = False


_isolation = _Isolation()


# A function, not a constant: NumPy imports generators at the first use (7 ms), and most torch
# datasets need no generator.
@functools.cache
def _spare_bit_generator() -> Any:
    return np.random.MT19937(0)


@contextlib.contextmanager
def isolated_generators() -> Iterator[None]:
    """Restore the process's random generators after the block.

    The generators are `random`, NumPy's, and torch's CPU generator. The exchange takes 26 µs.
    NumPy's bit generator is exchanged, because a copy would take 180 µs. With several threads
    inside, the first thread saves the program's states, and the last thread restores the program's
    states. A nested block restores the states of the outer block.
    """
    shared, nested = _Isolation, _isolation.inside
    with shared.lock:
        saved = _exchanged() if nested or not shared.threads else ()
        if not nested:
            shared.outside = saved or shared.outside
            shared.threads += 1
            _isolation.inside = True
    try:
        yield
    finally:
        with shared.lock:
            if not nested:
                _isolation.inside = False
                shared.threads -= 1
                saved = () if shared.threads else shared.outside
            if saved:
                _restore(*saved)


def _exchanged() -> tuple[Any, ...]:
    """Return the states of the process's generators.

    A spare bit generator replaces NumPy's bit generator.
    """
    numpy: Any = np.random  # NumPy's stubs lack the functions for the bit generator
    states = (
        random.getstate(),
        torch.default_generator.get_state(),
        numpy.get_bit_generator(),
    )
    spare = _spare_bit_generator()
    numpy.set_bit_generator(np.random.MT19937(0) if states[2] is spare else spare)
    return states


def _restore(python: Any, torchs: torch.Tensor, numpys: Any) -> None:
    np.random.set_bit_generator(numpys)  # type: ignore[attr-defined]
    random.setstate(python)
    torch.default_generator.set_state(torchs)


def _after_fork() -> None:
    """Reset the lock and the number of threads in a forked child.

    Another thread of the parent may have held the lock. Only this thread exists in the child.
    """
    _Isolation.lock._at_fork_reinit()  # type: ignore[attr-defined]
    _Isolation.threads = int(_isolation.inside)


os.register_at_fork(after_in_child=_after_fork)


class TransformGenerators:
    """Random generators inside transforms and collate functions.

    The generators are seeded for each batch. Without seeding, copies of a generator in several
    workers would draw the same numbers. The search covers all objects reachable from the functions,
    and finds NumPy's `Generator` and `RandomState`, `random.Random`, `torch.Generator` on the CPU,
    and every object with a method ``set_random_seed(seed)``, such as albumentations' `Compose`.
    """

    def __init__(self, functions: Iterable[object]) -> None:
        self._setters = [
            setter
            for part in _reachable(functions)
            if (setter := _setter(part)) is not None
        ]

    def seed(self, seed: int) -> None:
        """Seed the process's generators and all found generators.

        The seed of a found generator follows from the batch's seed and the generator's number.
        """
        seed_everything(seed)
        for position, setter in enumerate(self._setters):
            setter(batch_seed(seed, 0, position))


# Types without generators inside.
_LEAVES: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, memoryview),
    *(np.ndarray, np.generic, torch.Tensor),
    *(type, types.CodeType, logging.Logger),  # a logger refers to all other loggers
)
# Packages with functions and classes that draw from arguments or from the process's generators.
_OPAQUE = frozenset(sys.stdlib_module_names) | {"headrace", "numpy", "torch"}
# Bounds for objects that a transform refers to by accident. Larger containers are data:
# vocabularies, lists of keys.
_LARGEST_CONTAINER, _MOST_OBJECTS = 4096, 100_000


def _setter(part: Any) -> Callable[[int], Any] | None:
    """Return a function to seed `part` with 64 bits.

    The result is None if `part` is no generator.
    """
    if isinstance(part, np.random.Generator):
        bits = part.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(part, np.random.RandomState):
        return lambda seed: part.seed(
            np.array([seed & 0xFFFF_FFFF, seed >> 32], dtype=np.uint32)
        )
    if isinstance(part, random.Random):
        return part.seed
    if isinstance(part, torch.Generator):
        return part.manual_seed if part.device.type == "cpu" else None
    if callable(getattr(type(part), "set_random_seed", None)):
        # Libraries take 32 bits.
        return lambda seed: part.set_random_seed(seed & 0xFFFF_FFFF)
    return None


def _reachable(functions: Iterable[object]) -> Iterator[object]:
    """Yield every object held by the functions once.

    The order is equal in every process. The generators of the process are left out, because
    `seed_everything` seeds the process.
    """
    pending = list(functions)[::-1]
    own: Any = random.random.__self__  # type: ignore[attr-defined]
    process: Any = (own, np.random.mtrand._rand, torch.default_generator)
    # The dict keeps objects alive, so no id is reused.
    visited: dict[int, object] = {id(each): each for each in process}
    while pending and len(visited) < _MOST_OBJECTS:
        part = pending.pop()
        if not isinstance(part, _LEAVES) and id(part) not in visited:
            visited[id(part)] = part
            yield part
            if _setter(part) is None:
                pending.extend(reversed(list(_held_by(part))))


def _held_by(part: Any) -> Iterable[object]:
    if isinstance(part, types.FunctionType):
        return () if _is_opaque(part.__module__) else _held_by_function(part)
    # The order of a set differs between processes.
    if isinstance(part, types.ModuleType | set | frozenset):
        return ()
    if isinstance(part, dict | list | tuple) and len(part) > _LARGEST_CONTAINER:
        return ()
    held = gc.get_referents(part)
    classes = [
        vars(cls).items() for cls in type(part).__mro__ if not _is_opaque(cls.__module__)
    ]
    # Methods use globals.
    methods = [value for items in classes for _, value in sorted(items)]
    # The attributes of an instance come first, in the order of `__dict__`. The order of the garbage
    # collector may differ between processes.
    return (
        *getattr(part, "__dict__", {}).values(),
        *(held if len(held) <= 2 * _LARGEST_CONTAINER else ()),
        *methods,
    )


def _held_by_function(function: types.FunctionType) -> Iterator[object]:
    yield from (function.__closure__, function.__defaults__, function.__kwdefaults__)
    codes, names = [function.__code__], set[str]()
    for code in codes:  # the loop appends code objects nested in `code`
        names.update(code.co_names)
        codes.extend(
            constant
            for constant in code.co_consts
            if isinstance(constant, types.CodeType)
        )
    for name in sorted(names):
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, types.ModuleType) and not _is_opaque(value.__name__):
            yield from (vars(value).get(attribute) for attribute in sorted(names))


def _is_opaque(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _OPAQUE
