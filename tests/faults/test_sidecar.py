"""Placement "process": same batches as in a thread, nothing left behind, and errors when a process dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import headrace as hr
from headrace._pool import launch
from headrace.errors import ForkedError
from tests.faults import watching
from tests.faults.watching import (
    Numbers,
    Slow,
    drain,
    first_call,
    ignored_deaths,
    in_processes,
    kill,
    negate,
    once_each,
    run_in_fork,
    run_on,
    sidecar,
    wait_for_exit,
    wait_until,
    watch,
    workers,
)
from tests.programs import run_by

KILLS = int(os.environ.get("HEADRACE_ENGINE_KILLS", "4"))
pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


class HangsAtFirst(Numbers):
    """The fetch of an index hangs, and writes a line to a FIFO before, until a file exists."""

    def __init__(self, fifo, goes_on, index):
        super().__init__(64)
        self.fifo, self.goes_on, self.index = fifo, goes_on, index

    async def aget(self, index):
        if index == self.index and not os.path.exists(self.goes_on):  # noqa: ASYNC240
            with open(self.fifo, "w") as fifo:  # noqa: ASYNC230  # does not block: the test has it open
                fifo.write("hangs\n")
            await asyncio.Event().wait()
        return index


def open_fifo(path):
    """Make a FIFO, and open it for reading and writing, so that neither side waits for the other."""
    os.mkfifo(path)
    return open(os.open(path, os.O_RDWR))


# The consumer's event loops are the same to each: one of them has them all.
WAYS_TO_READ: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"placement": "thread", "num_workers": 0}, ("uvloop",)),
    ({"placement": "thread", "num_workers": 2}, ("asyncio",)),
    ({"placement": "process", "num_workers": 2}, ("asyncio", "uvloop", "trio")),
    ({"engines": 2}, ("trio",)),
]


@pytest.mark.parametrize(("options", "loops"), WAYS_TO_READ, ids=str)
@run_by("case")
def test_every_way_to_leave_an_epoch_leaves_nothing(
    options: dict[str, Any], loops: tuple[str, ...]
) -> None:
    def new():
        return hr.DataLoader(Slow(), batch_size=4, transform=negate, **options)

    def break_out():
        loader = new()
        for _ in range(2):
            for batch in loader:
                break
            assert batch.tolist() == [0, -1, -2, -3]

    async def break_out_async():
        async for batch in new():
            break
        assert batch.tolist() == [0, -1, -2, -3]

    def abandon():
        iterator = iter(new())
        next(iterator)
        cycle = [iterator]
        cycle.append(cycle)  # only the collector finds it

    def never_next():
        new().close()
        iter(new())
        aiter(new())

    def fail():
        try:
            iterator = iter(new())
            next(iterator)
            raise KeyError("the training step")
        except KeyError as error:
            held = [error]
            held.append(held)

    def close():
        with new() as loader:
            iterator = iter(loader)
            next(iterator)
        with pytest.raises(hr.errors.LoaderClosedError):
            next(iterator)
        loader.close()

    def close_in_another_thread():
        loader = new()
        iterator = iter(loader)
        next(iterator)
        thread = threading.Thread(target=loader.close)
        thread.start()
        # Or all batches have arrived before.
        with contextlib.suppress(hr.errors.LoaderClosedError):
            list(iterator)
        thread.join()

    async def close_async():
        async with new() as loader:
            stream = aiter(loader)
            await anext(stream)
        with pytest.raises(hr.errors.LoaderClosedError):
            await anext(stream)
        await loader.aclose()

    async def cancel():
        stream = aiter(new())
        await anext(stream)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)

    def exhaust():
        loader = new()
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == 64

    exhaust()
    within = 5.0 if "engines" in options else 0.0
    for leave in (
        break_out,
        abandon,
        never_next,
        fail,
        close,
        close_in_another_thread,
        exhaust,
    ):
        with watch(within):
            leave()
    for loop in loops:
        for leave in (break_out_async, close_async, cancel):
            with watch(within):
                run_on(loop, leave)


class Stepwise:
    """One way to iterate for both kinds of consumer: each step is awaited, or blocks. None is the end."""

    def __init__(self, loader, consumer):
        self.iterator = iter(loader) if consumer == "for" else aiter(loader)

    async def next(self):
        try:
            batch = (
                next(self.iterator)
                if hasattr(self.iterator, "__next__")
                else await anext(self.iterator)
            )
        except (StopIteration, StopAsyncIteration):
            return None
        return batch.tolist()

    async def rest(self):
        """All samples that are left."""
        samples = []
        while (batch := await self.next()) is not None:
            samples += batch
        return samples


@pytest.mark.parametrize("consumer", ["for", "asyncio", "trio"])
@run_by("case", within=10)
def test_sigkill_of_the_sidecar_loses_no_batch(consumer: str, tmp_path: Path) -> None:
    fifo, goes_on = str(tmp_path / "fifo"), str(tmp_path / "goes on")

    async def killed_while_the_consumer_waits():
        dataset = HangsAtFirst(fifo, goes_on, 4)

        def kill_once_it_hangs():
            lines.readline()
            first_call(goes_on)
            os.kill(pid, signal.SIGKILL)

        with in_processes(dataset) as loader:
            steps = Stepwise(loader, consumer)
            assert await steps.next() == [0, 1, 2, 3]
            pid = sidecar(loader)
            killer = threading.Thread(target=kill_once_it_hangs)
            killer.start()
            assert await steps.rest() == list(range(4, 64))
            killer.join()
            assert sidecar(loader) != pid

    async def killed_between_batches():
        with in_processes(Numbers(800), transform=abs) as loader:
            steps, other = Stepwise(loader, consumer), Stepwise(loader, consumer)
            assert await steps.next() == await other.next() == [0, 1, 2, 3]
            kill(sidecar(loader))
            assert await steps.rest() == list(range(4, 800))
            assert await other.rest() == list(range(4, 800)), (
                "an iterator from before the death"
            )
            assert await Stepwise(loader, consumer).rest() == list(range(800))

    with open_fifo(fifo) as lines, ignored_deaths():
        for main in (killed_while_the_consumer_waits, killed_between_batches):
            run_on("asyncio" if consumer == "for" else consumer, main)


class EndlessStream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for number in itertools.count():
            yield number


@run_by("case")
def test_sigkill_of_the_sidecar_ends_a_stream_with_an_error() -> None:
    """The engine's position in the stream is lost."""
    with hr.DataLoader(EndlessStream(), 4, placement="process") as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        pid = sidecar(loader)
        kill(pid)
        with pytest.raises(
            hr.errors.EngineDiedError, match=f"its process {pid} was killed by SIG"
        ):
            for _ in batches:
                pass
        assert next(batches, None) is None
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("placement", ["thread", "process"])
@run_by("case", within=10)
def test_sigkill_of_the_zygote_loses_no_batch_and_leaves_nothing(
    placement: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    go = str(tmp_path.parent / f"{tmp_path.name}.go")

    def transform(index):
        if index >= 64 and not os.path.exists(go):
            first_call(f"{folder}/{os.getpid()}")
            while not os.path.exists(go):  # SIGKILL alone ends it
                pass
        return index

    with in_processes(Numbers(128), transform=transform, placement=placement) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        wait_until(lambda: len(os.listdir(folder)) == 2)
        descriptors = [os.pidfd_open(pid) for pid in workers()]
        assert len(descriptors) == 2 + (placement == "process")
        kill(launch._zygote.process.pid)
        delivered = list(range(4))
        # Workers and engine are killed and replaced, and their batches made again.
        wait_for_exit(descriptors.pop())
        first_call(go)
        with ignored_deaths():
            for batch in iterator:
                delivered += batch.tolist()
        assert delivered == list(range(128)), delivered
        for (
            descriptor
        ) in descriptors:  # the processes from before have ended, though they were busy
            wait_for_exit(descriptor)
        assert drain(loader) == (once_each(range(128)), [])
    with in_processes(Numbers(32), transform=abs, placement=placement) as loader:
        assert drain(loader) == (once_each(range(32)), [])


@run_by("case", within=10)
def test_random_kills_of_any_process_lose_nothing() -> None:
    """Workers, the sidecar, or the zygote. With `HEADRACE_ENGINE_KILLS=200`: 200 kills."""
    draw = random.Random(KILLS)
    with (
        in_processes(Slow(800), transform=negate) as loader,
        ignored_deaths(),
    ):
        for _ in range(-(-KILLS // 4)):
            samples = []
            for number, batch in enumerate(loader):
                samples += batch.tolist()
                if number in (20, 60, 100, 140):
                    kill(draw.choice([*workers(), launch._zygote.process.pid]))
            assert samples == [-index for index in range(800)]


@run_by("case")
def test_unpicklable_dataset_stays_in_a_thread_with_a_warning() -> None:
    class Locks(Numbers):
        def __init__(self):
            self.length, self.lock = 32, threading.Lock()

    with hr.DataLoader(Locks(), 4, num_workers=2, transform=negate) as loader:
        with pytest.warns(
            RuntimeWarning, match="dataset Locks cannot be pickled.*lock"
        ) as caught:
            assert drain(loader) == (once_each(range(0, -32, -1)), [])
        assert loader.stats().placement == "thread"
    assert caught[0].filename == watching.__file__  # where `iter` was called: in `drain`

    with pytest.raises(hr.errors.NotPicklableError, match=r"(?s)dataset Locks.*lock"):
        iter(in_processes(Locks()))


@run_by("case")
def test_array_changed_after_collate_does_not_change_the_batch() -> None:
    array = torch.zeros(4, 256 * 1024, dtype=torch.int64)

    def collate(samples):
        return array.copy_(torch.tensor(samples)[:, None])

    with hr.DataLoader(
        Numbers(128), 4, collate_fn=collate, placement="process"
    ) as loader:
        for number, batch in enumerate(list(loader)):
            assert (batch == torch.arange(number * 4, number * 4 + 4)[:, None]).all(), (
                number,
                batch,
            )


class SaysWhenClosed(hr.AsyncIterableDataset):
    """A stream without an end, which writes a line to a FIFO when its generator is closed."""

    def __init__(self, fifo):
        self.fifo = fifo

    async def __aiter__(self):
        try:
            for number in itertools.count():
                yield number
        finally:
            with open(self.fifo, "w") as fifo:  # noqa: ASYNC230  # does not block: the test has it open
                fifo.write("closed\n")


@run_by("case")
def test_epoch_that_is_left_ends_in_the_sidecar_while_a_fork_lives(
    tmp_path: Path,
) -> None:
    fifo = str(tmp_path / "fifo")
    with (
        open_fifo(fifo) as lines,
        hr.DataLoader(SaysWhenClosed(fifo), 4, placement="process") as loader,
    ):
        iterator = iter(loader)
        next(iterator)
        ended, end = os.pipe()
        child = os.fork()
        if not child:
            os.close(end)
            os.read(ended, 1)  # until the parent closes its end
            os._exit(0)
        iterator.close()
        assert lines.readline() == "closed\n"
        os.close(end)
        os.close(ended)
        os.waitpid(child, 0)


class WaitsForALine(Numbers):
    """The sample of index 4 arrives when there is a line in a FIFO."""

    def __init__(self, size, fifo):
        super().__init__(size)
        self.fifo = fifo

    async def aget(self, index):
        if index == 4:
            await asyncio.to_thread(read_line, self.fifo)
        return index


def read_line(path):
    with open(path) as lines:
        return lines.readline()


@pytest.mark.parametrize(
    ("size", "options"),  # of 16 all is planned at first
    [
        (16, {"placement": "thread"}),
        (400, {"placement": "process"}),
        (400, {"engines": 2}),
    ],
    ids=str,
)
@run_by("case", within=5.0)  # for the thread that the dataset reads the line in
def test_fork_cannot_take_batches_of_its_parent(
    tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    def take_one():
        with pytest.raises(ForkedError):
            next(iterator)

    fifo = str(tmp_path / "fifo")
    with (
        open_fifo(fifo) as lines,
        hr.DataLoader(WaitsForALine(size, fifo), 4, **options) as loader,
    ):
        iterator = iter(loader)
        first = next(iterator)
        run_in_fork(take_one)
        os.write(lines.fileno(), b"arrive\n")
        assert torch.cat([first, *iterator]).tolist() == list(range(size))
