"""The `finally` of a stream's generators runs on the loop that read it, however the stream is left."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from tests.faults.watching import first_call

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


class Stream(hr.AsyncIterableDataset):
    """Makes a file in a folder when it starts, and one when its `finally` has run."""

    def __init__(self, folder):
        self.folder = folder

    async def __aiter__(self):
        name = f"{self.folder}/{os.getpid()}-{time.monotonic_ns()}"
        first_call(f"{name}.started")
        try:
            for index in range(1_000_000):
                await asyncio.sleep(0.0005)  # latency
                yield index
        finally:
            for _ in range(3):  # as closing a connection would
                await asyncio.sleep(0)
            first_call(f"{name}.ended")


class Nested(Stream):
    """A generator around another, which it does not close."""

    async def __aiter__(self):
        async for sample in super().__aiter__():
            yield sample


class WithoutAclose(Stream):
    """An iterator that is no generator, and holds one."""

    def __aiter__(self):
        return Iterating(super().__aiter__())


class Iterating:
    def __init__(self, generator):
        self.generator = generator

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await anext(self.generator)


def notes(folder, ending):
    return sorted(name.removesuffix(ending) for name in os.listdir(folder) if name.endswith(ending))


@pytest.mark.parametrize(("kind", "placement"), [(Stream, "process"), (Nested, "thread"), (WithoutAclose, "process")])
def test_generators_of_a_stream_are_closed_when_another_thread_closes_the_loader(
    case: Any, placement: str, kind: type[Stream], tmp_path: Path
) -> None:
    def program() -> None:
        for _ in range(3):
            loader = hr.DataLoader(kind(tmp_path), 2, placement=placement)
            iterators = [iter(loader), iter(loader)]
            for iterator in iterators:
                next(iterator)
            closer = threading.Thread(target=loader.close)
            closer.start()
            try:
                for batch in iterators[0]:
                    pass
            except hr.errors.LoaderClosedError:
                closer.join()
        assert len(notes(tmp_path, ".started")) == 6
        assert notes(tmp_path, ".started") == notes(tmp_path, ".ended")

    case(program)
