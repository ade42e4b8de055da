"""Whichever way a stream is left, the `finally` of its generators runs, on the loop that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

STREAMS = '''
class Stream(hr.AsyncIterableDataset):
    """Notes in a folder when it is begun, and when its `finally` has run."""

    def __init__(self, folder):
        self.folder = folder

    async def __aiter__(self):
        name = f"{self.folder}/{os.getpid()}-{time.monotonic_ns()}"
        open(f"{name}.begun", "w").close()
        try:
            for index in range(1_000_000):
                await asyncio.sleep(0.0005)  # latency
                yield index
        finally:
            for _ in range(3):  # as closing a connection would
                await asyncio.sleep(0)
            open(f"{name}.ended", "w").close()


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


def notes(ending):
    return sorted(name.removesuffix(ending) for name in os.listdir(folder) if name.endswith(ending))
'''


@pytest.mark.parametrize("placement", ["thread", "process"])
@pytest.mark.parametrize("kind", ["Stream", "Nested", "WithoutAclose"])
def test_generators_of_a_stream_are_closed_when_the_loader_is_closed_from_another_thread(
    case: Any, placement: str, kind: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    # PREFIX ['STREAMS']

    def program() -> None:
        for _ in range(5):
            loader = hr.DataLoader(globals()[kind](folder), 2, placement=placement)
            iterators = [iter(loader), iter(loader)]
            for iterator in iterators:
                next(iterator)
            closer = threading.Thread(target=loader.close)
            closer.start()
            try:
                for batch in iterators[0]:
                    pass
            except hr.LoaderClosedError:
                closer.join()
        assert len(notes(".begun")) == 10
        assert notes(".begun") == notes(".ended")

    case(program)
