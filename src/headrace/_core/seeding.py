"""Random generators of the CPU work: one seed for each batch; the caller's own generators are restored."""

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
    """The 64-bit seed of one batch: a hash (BLAKE2b), so that neighbouring batches get unrelated seeds."""
    digest = hashlib.blake2b(_SEED_INPUT.pack(base, epoch, number), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def random_key(base: int, epoch: int) -> int:
    """The key of an epoch's `randomized` functions, a number of 128 bits."""
    digest = hashlib.blake2b(
        _SEED_INPUT.pack(base, epoch, 0), digest_size=16, person=b"randomized"
    ).digest()
    return int.from_bytes(digest, "little")


def seed_everything(seed: int) -> None:
    """Seed `random`, NumPy and torch's CPU generator of this process from one 64-bit seed."""
    random.seed(seed)
    np.random.seed(np.array([seed & 0xFFFF_FFFF, seed >> 32], dtype=np.uint32))
    # The CPU generator alone: torch.manual_seed would also queue a call for a CUDA context that
    # never comes here.
    torch.default_generator.manual_seed(seed)


class _Isolation(threading.local):
    """How the threads of the process isolate their draws: a lock for the exchange of states, never for user code.

    Attributes:
        inside: whether this thread is in `isolated_generators`.
    """

    lock = threading.Lock()
    threads = 0  # number of threads inside
    outside: tuple[Any, ...] = ()  # states of the program, exchanged by the first thread inside
    inside = False


_isolation = _Isolation()


# Functions, not constants: NumPy imports its generators when they are first used (7 ms); most torch
# datasets need none.
@functools.cache
def _spare_bit_generator() -> Any:
    return np.random.MT19937(0)


@contextlib.contextmanager
def isolated_generators() -> Iterator[None]:
    """Restore the process's random generators (`random`, NumPy, torch's CPU generator) on leaving.

    26 µs. NumPy's bit generator is exchanged and not copied, which would take 180 µs. If several
    threads are inside, the first saves the program's states, and the last restores these states. A
    nested call restores its caller's.
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
    """The states of the process's generators; NumPy's bit generator is replaced by a spare one."""
    numpy: Any = np.random  # whose stubs leave out that the bit generator can be exchanged
    states = random.getstate(), torch.default_generator.get_state(), numpy.get_bit_generator()
    spare = _spare_bit_generator()
    numpy.set_bit_generator(np.random.MT19937(0) if states[2] is spare else spare)
    return states


def _restore(python: Any, torchs: torch.Tensor, numpys: Any) -> None:
    np.random.set_bit_generator(numpys)  # type: ignore[attr-defined]
    random.setstate(python)
    torch.default_generator.set_state(torchs)


def _after_fork() -> None:
    """Free the lock, which another thread of the parent may have held; only this thread is left."""
    _Isolation.lock._at_fork_reinit()  # type: ignore[attr-defined]
    _Isolation.threads = int(_isolation.inside)


os.register_at_fork(after_in_child=_after_fork)


class TransformGenerators:
    """The random generators that transforms and a collate function hold, reseeded for each batch.

    A generator that travels to several workers would otherwise draw the same numbers in each of
    them. Found are, in all that the functions refer to: NumPy's `Generator` and `RandomState`,
    `random.Random`, `torch.Generator` on the CPU, and every object with a method
    ``set_random_seed(seed)``, as albumentations' `Compose` has it.
    """

    def __init__(self, functions: Iterable[object]) -> None:
        self._setters = [
            setter for part in _reachable(functions) if (setter := _setter(part)) is not None
        ]

    def seed(self, seed: int) -> None:
        """Seed the process's generators, and each of these from the batch's seed and its position among them."""
        seed_everything(seed)
        for position, setter in enumerate(self._setters):
            setter(batch_seed(seed, 0, position))


# Types that hold no generators.
_LEAVES: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, memoryview),
    *(np.ndarray, np.generic, torch.Tensor),
    *(type, types.CodeType, logging.Logger),  # a logger holds all others
)
# Functions and classes of these packages draw from generators that they are given, or from those of
# the process.
_OPAQUE = frozenset(sys.stdlib_module_names) | {"headrace", "numpy", "torch"}
# Bounds for what a transform may refer to by accident. Larger containers are data: vocabularies,
# lists of keys.
_LARGEST_CONTAINER, _MOST_OBJECTS = 4096, 100_000


def _setter(part: Any) -> Callable[[int], Any] | None:
    """The function that seeds `part` with a 64-bit seed; None where it is no generator."""
    if isinstance(part, np.random.Generator):
        bits = part.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(part, np.random.RandomState):
        return lambda seed: part.seed(np.array([seed & 0xFFFF_FFFF, seed >> 32], dtype=np.uint32))
    if isinstance(part, random.Random):
        return part.seed
    if isinstance(part, torch.Generator):
        return part.manual_seed if part.device.type == "cpu" else None
    if callable(getattr(type(part), "set_random_seed", None)):
        return lambda seed: part.set_random_seed(
            seed & 0xFFFF_FFFF
        )  # as libraries take it: 32 bits
    return None


def _reachable(functions: Iterable[object]) -> Iterator[object]:
    """Every object that the functions hold, each once, in an order that is the same in every process.

    Without the generators of the process, which `seed_everything` seeds.
    """
    pending = list(functions)[::-1]
    process: Any = (random.random.__self__, np.random.mtrand._rand, torch.default_generator)  # type: ignore[attr-defined]
    visited: dict[int, object] = {
        id(each): each for each in process
    }  # keeps them alive, so that no id is reused
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
    if isinstance(
        part, types.ModuleType | set | frozenset
    ):  # the order of a set differs between processes
        return ()
    if isinstance(part, dict | list | tuple) and len(part) > _LARGEST_CONTAINER:
        return ()
    held = gc.get_referents(part)
    classes = [vars(cls).items() for cls in type(part).__mro__ if not _is_opaque(cls.__module__)]
    methods = [value for items in classes for _, value in sorted(items)]  # which use globals
    # An instance's attributes first, in the order of its `__dict__`: the collector's may differ
    # between processes.
    return (
        *getattr(part, "__dict__", {}).values(),
        *(held if len(held) <= 2 * _LARGEST_CONTAINER else ()),
        *methods,
    )


def _held_by_function(function: types.FunctionType) -> Iterator[object]:
    yield from (function.__closure__, function.__defaults__, function.__kwdefaults__)
    codes, names = [function.__code__], set[str]()
    for code in codes:  # and those in it, which are appended
        names.update(code.co_names)
        codes.extend(
            constant for constant in code.co_consts if isinstance(constant, types.CodeType)
        )
    for name in sorted(names):
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, types.ModuleType) and not _is_opaque(value.__name__):
            yield from (vars(value).get(attribute) for attribute in sorted(names))


def _is_opaque(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _OPAQUE
